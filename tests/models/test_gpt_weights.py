"""Names and layouts of nanoGPT's and Hugging Face's weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.session import initial_values, tensor_by_tensor_equal
from ttrain.core.errors import CheckpointError
from ttrain.models.gpt import GPT
from ttrain.models.gpt_weights import config_from_transformers, config_to_transformers
from ttrain.models.settings import GPTConfig

SIZE = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocabulary": 11}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back(tied: bool, bias: bool, transposed: bool) -> None:
    model = GPT(GPTConfig(**SIZE, tied=tied, bias=bias))
    values = initial_values(model, seed=3)
    assert tensor_by_tensor_equal(model.from_original(model.to_original(values, transposed)), values)


@pytest.mark.parametrize("p", [None, 0.0, 0.25])
def test_dropout_goes_in_and_out(p: float | None) -> None:
    transformers = pytest.importorskip("transformers")
    given = {} if p is None else dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), p)
    told = config_from_transformers(transformers.GPT2Config(**given).to_dict())
    assert told["dropout"] == (0.1 if p is None else p)
    back = transformers.GPT2Config(**config_to_transformers(GPTConfig(**told)))
    assert {back.attn_pdrop, back.embd_pdrop, back.resid_pdrop} == {told["dropout"]}
    several = {"attn_pdrop": 0.0, "embd_pdrop": None, "resid_pdrop": 0.2}
    assert config_from_transformers(several)["dropout"] == 0.2


def test_hugging_face_files_keep_projections_as_inputs_by_outputs_and_carry_masks() -> None:
    model = GPT(GPTConfig(**SIZE))
    values = initial_values(model, seed=3)
    weights = model.to_original(values, transposed=True)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    bare = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.float32(-1e4)}  # type: ignore[dict-item]
    assert tensor_by_tensor_equal(model.from_original(bare), values)


def test_what_does_not_fit_is_told_by_name_as_the_file_has_it() -> None:
    """Also where the first projection is missing: nothing is turned that should not be."""
    model = GPT(GPTConfig(**SIZE))
    weights = model.to_original(initial_values(model, seed=3), transposed=True)
    del weights["transformer.h.0.attn.c_attn.weight"]
    weights |= {"transformer.h.1.mlp.c_fc.weight": np.ones((8, 31), np.float32), "transformer.h.9.x": np.ones(8)}
    with pytest.raises(CheckpointError) as refused:
        model.from_original(weights)
    assert str(refused.value).partition("must agree: ")[2].split("; ") == [
        "transformer.h.0.attn.c_attn.weight: missing",
        "transformer.h.1.mlp.c_fc.weight: got [8, 31], expected [8, 32]",
        "transformer.h.9.x: not a weight of this model",
    ]
