"""Switches of the decoders, and parametrisation by width: against plain PyTorch in fp64, and the published table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.decoder.plain_decoder import PlainDecoder
from tests.models.session import ENGINES, Session, initial_values, relative_error, token_batch
from tests.native.conftest import require_compiler
from tests.train.sampling.test_decode import Reading
from ttrain.cli import main
from ttrain.core.errors import ConfigError
from ttrain.core.spec import TensorSpec
from ttrain.graph import op
from ttrain.models.gpt import GPT
from ttrain.models.llama import Llama
from ttrain.models.settings import GPTConfig, LlamaConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import flat_parameters, learning_rates, width_factor
from ttrain.optim.settings import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, NorMuonConfig, SGDConfig
from ttrain.optim.sgd import SGD
from ttrain.testing import check_model

VOCABULARY, CONTEXT, ROWS = 23, 12, 3
SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16, "context": CONTEXT, "vocabulary": VOCABULARY}
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "qk_norm": {"qk_norm": True},
    "relu_squared": {"activation": "relu_squared"},
    "gelu": {"activation": "gelu"},
    "logit_cap": {"logit_cap": 2.0},
    "value_embeddings": {"value_embeddings": True},
    "untied": {"tied": False},
    "future": {"future_weight": 0.3},
    "mup": {"parametrization": "mup", "base_width": 4},
    "all": {
        "qk_norm": True, "activation": "relu_squared", "logit_cap": 2.0, "value_embeddings": True, "tied": False,
        "future_weight": 0.3, "parametrization": "mup", "base_width": 4,
    },
}  # fmt: skip

BIAS = {"gpt": {"bias": False}, "llama": {"feed_forward_bias": True}}  # other than their defaults


def built(family: str, **changes: Any) -> Any:
    if family == "gpt":
        return GPT(GPTConfig(**{**SIZES, **changes}))
    return Llama(LlamaConfig(**{**SIZES, "hidden": 24, "kv_heads": 2, **changes}))


def rates(model: Any, config: Any, lr: float) -> dict[str, float]:
    config = replace(config, lr=lr)
    return learning_rates(model.parameters(), config, lambda step: 1.0)(1)


def random_values(model: Any) -> dict[str, np.ndarray]:
    """Every tensor random and large enough that no switch drowns."""
    generator = np.random.default_rng(0)
    return {
        path: (("norm" in path or "mix" in path) + 0.3 * generator.standard_normal(parameter.shape)).astype(np.float32)
        for path, parameter in model.parameters().items()
    }


def leaves(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {path: torch.tensor(value, dtype=torch.float64, requires_grad=True) for path, value in values.items()}


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("switch", [*SWITCHES, "bias"])
def test_loss_gradients_and_growing_texts_are_those_of_plain_torch(family: str, switch: str) -> None:
    model = built(family, **(BIAS[family] if switch == "bias" else SWITCHES[switch]))
    values = random_values(model)
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0, masked=4)
    weights = leaves(values)
    plain = PlainDecoder(model.config, weights)
    given = [torch.from_numpy(batch[name]) for name in ("tokens", "targets")]
    expected = plain.loss(*given, training=True)
    expected.backward()
    session = Session(model, SGD(SGDConfig(clip_norm=None)), ROWS, values=values, engine="static")
    assert session.evaluate(batch)["loss"] == pytest.approx(plain.loss(*given).item(), rel=1e-6)
    assert session.train(batch, 1, rates(model, SGDConfig(), 0.0))["loss"] == pytest.approx(expected.item(), rel=1e-6)
    for path, gradient in session.gradients().items():
        assert relative_error(gradient, weights[path].grad.numpy()) < 2e-5, path
    reading, text = Reading(model, "static"), [int(token) for token in batch["tokens"][0]]
    for path, value in values.items():
        reading.state.write(path, value)
    with torch.no_grad():
        logits = plain.logits(torch.tensor([text]))[0].numpy()
    for length in (5, 6, CONTEXT):
        assert relative_error(reading.reader.read(text[:length], 1)["logits"][0], logits[length - 1]) < 1e-5


@pytest.mark.parametrize("engine", ["dynamic", "static"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_dropout_sits_where_nanogpt_has_it_and_backward_sees_the_same_masks(recompute: str, engine: str) -> None:
    p, seed = 0.25, 2**40 + 17
    model = built("gpt", dropout=p, recompute=recompute)
    values, batch = random_values(model), token_batch(VOCABULARY, 1, CONTEXT, 0)
    weights, streams = leaves(values), iter(range(1 + 3 * model.config.layers))  # in the order of a forward pass

    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * op("dropout_mask").reference(seed, TensorSpec(tuple(x.shape)), p, next(streams))

    loss = PlainDecoder(model.config, weights, drop).loss(*(torch.from_numpy(array) for array in batch.values()))
    loss.backward()
    session = Session(model, SGD(SGDConfig(clip_norm=None)), 1, values=values, engine=engine)
    assert session.train(batch, 1, {"lr": 0.0}, seed)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for path, gradient in session.gradients().items():
        assert relative_error(gradient, weights[path].grad.numpy()) < 2e-5, path


@pytest.mark.parametrize("engine", ["dynamic", "traced"])
def test_other_engines_take_all_switches(engine: str) -> None:
    require_compiler()
    check_model(built("gpt", **SWITCHES["all"], layers=1), ROWS, engine=ENGINES[engine])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_branches_that_start_at_zero_add_nothing_at_first(family: str) -> None:
    with_zeros, without = built(family, zero_init=True), built(family)
    first, other = initial_values(with_zeros, 1), initial_values(without, 1)
    zero = {path for path, value in first.items() if not value.any() and other[path].any()}
    ends = ("attention.projection.weight", "feed_forward.down.weight")
    assert zero == {f"blocks.{block}.{end}" for block in range(2) for end in ends}
    assert all(np.array_equal(first[path], other[path]) for path in first.keys() - zero)


TABLE = {  # role -> std of initial values, learning-rate factors of Adam and of SGD, relative to the base (table 8)
    "input": (1, 1, 4), "hidden": (0.5, 0.25, 1), "output": (1, 1, 4), "vector": (None, 1, 4),
}  # fmt: skip


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_first_values_and_rates_follow_the_published_table(family: str) -> None:
    mup = {"parametrization": "mup", "base_width": 64, "tied": False, "value_embeddings": True, "vocabulary": 256}
    base, wide = built(family, **{**mup, "width": 64}), built(family, **{**mup, "width": 256})
    plain = initial_values(built(family, tied=False, value_embeddings=True, vocabulary=256, width=64), 1)
    narrow, broad = initial_values(base, 1), initial_values(wide, 1)
    assert all(np.array_equal(narrow[path], value) for path, value in plain.items()), "at the base nothing changes"
    seen = set()
    for path, parameter in wide.parameters().items():
        std, adam, sgd = TABLE[parameter.role.value]
        seen.add(parameter.role.value)
        if std is not None:
            assert broad[path].std() / narrow[path].std() == pytest.approx(std, rel=0.1), path
        assert (width_factor(parameter, AdamWConfig()), width_factor(parameter, SGDConfig())) == (adam, sgd), path
        assert width_factor(base.parameters()[path], SGDConfig()) == 1
    assert seen == set(TABLE)
    inputs = {run.lr for run in flat_parameters(wide.parameters(), AdamW(AdamWConfig()), wide.compute)}
    assert inputs == {"lr", "lr/width_0.25"} and rates(wide, AdamWConfig(), 0.1) == {"lr": 0.1, "lr/width_0.25": 0.025}
    grouped = rates(wide, AdamWConfig(lr_multipliers={"blocks": 2.0}), 0.1)
    assert grouped == {"lr": 0.1, "lr/blocks": 0.2, "lr/blocks/width_0.25": 0.05}


@pytest.mark.parametrize(
    ("config", "factor"),
    [(LionConfig(), 0.25), (MuonConfig(), 0.5), (MuonConfig(scale="spectral"), 1), (NorMuonConfig(), 0.5),
     (AdafactorConfig(), 0.5)],
)  # fmt: skip
def test_rates_of_other_optimizers_by_the_size_of_their_steps(config: Any, factor: float) -> None:
    """A hidden step has to have a spectral norm that does not grow with the width."""
    parameters = built("gpt", parametrization="mup", base_width=4).parameters()
    assert {width_factor(p, config) for p in parameters.values() if p.role == "hidden"} == {factor}
    assert {width_factor(p, config) for p in parameters.values() if p.role != "hidden"} == {1}


def sizes_after_three_steps(family: str, width: int, **changes: Any) -> np.ndarray:
    """Mean absolute change of the logits in three steps of Adam at one learning rate."""
    model = built(family, width=width, **({"hidden": 2 * width} if family == "llama" else {}), **changes)
    session = Session(model, AdamW(AdamWConfig(weight_decay=0.0)), ROWS, values=initial_values(model, 3))
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0)

    def logits() -> np.ndarray:
        weights = {path: torch.from_numpy(value) for path, value in session.parameters().items()}
        with torch.no_grad():
            return PlainDecoder(model.config, weights).logits(torch.from_numpy(batch["tokens"])).numpy()

    before = logits()
    for step in range(1, 4):
        session.train(batch, step, rates(model, AdamWConfig(), 0.01))
    return np.abs(logits() - before).mean()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_what_three_steps_change_does_not_depend_on_the_width(family: str) -> None:
    widths = (32, 256)
    standard = [sizes_after_three_steps(family, width) for width in widths]
    mup = [sizes_after_three_steps(family, width, parametrization="mup", base_width=32) for width in widths]
    assert mup[0] == pytest.approx(standard[0], rel=1e-5)
    assert standard[1] / standard[0] > 2.5, "the standard parametrisation changes more the wider it is"
    assert 1 / 1.6 < mup[1] / mup[0] < 1.6


def test_what_is_refused(inside: Path, capsys: Any) -> None:
    for given in (
        ["model.parametrization=mup"],
        ["model.base_width=32"],
        ["model=llama", "model.preset=tiny", "model.base_width=8"],
    ):
        assert main(["task=plan", *given]) == 2
        assert "mup needs the width that learning rates were tuned at" in capsys.readouterr().err
    for family, switch in (("gpt", "qk_norm"), ("gpt", "logit_cap"), ("llama", "value_embeddings"), ("llama", "mup")):
        model = built(family, **SWITCHES[switch])
        with pytest.raises(ConfigError, match=f"model.{'parametrization' if switch == 'mup' else switch}="):
            model.original_file(random_values(model))
