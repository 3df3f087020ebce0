"""GPT: sizes, dropout, recomputation, bf16, its weights as other programs name them, and initial values of models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.models.session import BF16, FP32, Session, initial_values, tensor_by_tensor_equal, token_batch
from ttrain.autodiff import backward
from ttrain.core.errors import CheckpointError, ConfigError, GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.graph import Graph, Kind
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.gpt_weights import config_from_transformers, config_to_transformers
from ttrain.models.mlp import MLP
from ttrain.models.settings import AGILLMConfig, GPTConfig, MLPConfig
from ttrain.models.weight_checks import bf16_bits
from ttrain.nn.layers import Linear
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.forecast.step_cost import peak
from ttrain.train.steps.step_graph import StepGraph

SIZE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 37}
COUNTS = {"124M": 124_439_808, "355M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200}


def small(compute: DType = FP32, **changes: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZE, **changes}), compute)


def batch(rows: int, index: int = 0, masked: int = 0) -> dict[str, np.ndarray]:
    return token_batch(SIZE["vocabulary"], rows, SIZE["context"], index, masked)


def adamw(**changes: Any) -> AdamW:
    return AdamW(AdamWConfig(**changes))


@pytest.mark.parametrize("preset", GPTConfig.presets)
def test_presets_are_named_by_their_parameters(preset: str) -> None:
    vocabulary = 50257 if preset in COUNTS else 65
    count = GPT(GPTConfig(preset=preset, vocabulary=vocabulary, bias=preset in COUNTS)).parameter_count
    named = float(preset[:-1]) * {"M": 1e6, "B": 1e9}[preset[-1]]
    assert count == pytest.approx(named, rel=0.04) and count == COUNTS.get(preset, count)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTConfig(preset="125M", vocabulary=9), "model.preset=125M"),
        (GPTConfig(preset="124M"), "model.vocabulary: no value"),
        (GPTConfig(layers=1, heads=3, width=32, context=4, vocabulary=9), "model.heads=3: must divide model.width=32"),
        (GPTConfig(vocabulary=9), "model.layers, .*model.context: no value"),
        (AGILLMConfig(preset="huge", vocabulary=9), "model.preset=huge"),
        (AGILLMConfig(preset="large", heads=7, vocabulary=9), "model.heads=7: must divide model.width=1024"),
        (AGILLMConfig(width=16, heads=2, layers=1, vocabulary=9), "model.rank: no value"),
    ],
)
def test_impossible_sizes_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AGILLM(config) if isinstance(config, AGILLMConfig) else GPT(config)


def test_dropout_masks_differ_by_seed_and_are_off_in_evaluation() -> None:
    session, plain = (Session(small(dropout=p), adamw(), 2) for p in (0.3, 0.0))
    losses = [session.train(batch(2), 1, {"lr": 0.0}, seed)["loss"] for seed in (1, 2, 1, 3)]
    assert losses[0] == losses[2]
    assert len(set(losses)) == 3
    assert session.evaluate(batch(2))["loss"] == plain.evaluate(batch(2))["loss"]


def test_recomputation_keeps_one_tensor_per_block() -> None:
    def kept(recompute: str) -> int:
        session = Session(small(layers=6, recompute=recompute), adamw(), 4)
        return peak(session.steps["train"].plan.blocks)[0]  # wherever they lie

    assert kept("block") < 0.6 * kept("none")


@pytest.mark.parametrize("engine", ["dynamic", "static"])
def test_bf16_trains_close_to_fp32_and_its_copies_follow_the_masters(engine: str) -> None:
    losses = {}
    for compute in (FP32, BF16):
        session = Session(small(compute), adamw(), 4, engine=engine)
        losses[compute] = [session.train(batch(4), step, {"lr": 3e-3})["loss"] for step in range(1, 21)]
    np.testing.assert_allclose(losses[BF16], losses[FP32], rtol=0.01)  # bf16 keeps 8 bits: steps of 1/256
    assert losses[BF16][-1] < 0.9 * losses[BF16][0]
    copies = session.state.names(Kind.COPY)
    assert copies and not any("norm" in name for name in copies)
    for name in copies:
        master = session.state.read(name.removesuffix("/compute"))
        assert np.array_equal(session.state.read(name).view(np.uint32) >> 16, bf16_bits(master)), name


def test_bf16_state_has_fp32_masters_and_gradients_of_the_compute_dtype() -> None:
    for parts, dtype in ((1, BF16), (2, FP32)):
        specs = {each.name: each.spec for each in StepGraph(small(BF16), adamw(), 2, parts).state_tensors()}
        path = "blocks.0.attention.qkv.weight"
        assert specs[path] == TensorSpec((96, 32), FP32)
        wanted = {"compute": BF16, "gradient": dtype, "first_moment": FP32}
        assert {name: specs[f"{path}/{name}"].dtype for name in wanted} == wanted
        assert specs["norm.weight/gradient"].dtype is FP32 and "norm.weight/compute" not in specs
    kinds = {tensor.kind for tensor in StepGraph(small(BF16), adamw(), 2).state_tensors(training=False)}
    assert kinds == {Kind.PARAMETER, Kind.COPY}  # of an evaluation


@pytest.mark.parametrize(
    "model",
    [
        GPT(GPTConfig(preset="124M", context=256, vocabulary=50257)),
        AGILLM(AGILLMConfig(preset="nano_3x", context=1122, vocabulary=40000)),
    ],
    ids=["gpt", "agillm"],
)
def test_full_logits_of_a_large_vocabulary_never_exist(model: Any) -> None:
    graph = Graph()
    loss = model.loss(graph, 4, training=True)
    backward(loss, [graph.state["embedding.weight"]])
    logits = 4 * model.config.context * model.config.vocabulary * 4
    assert max(output.spec.nbytes for node in graph.nodes for output in node.outputs) < logits
    node = next(node for node in graph.nodes if node.op.name == "head_cross_entropy")
    kernel = TorchDevice("cpu", threads=1).kernels["head_cross_entropy"]
    work = kernel.workspace(*node.specs, node.attributes)
    assert 30 * 2**20 < max(spec.nbytes for spec in work) <= 32 * 2**20


def test_a_layer_outside_a_model_has_no_parameters_to_read() -> None:
    graph = Graph()
    with pytest.raises(GraphError, match="name_parameters"):
        Linear(3, 4)(graph.input("x", TensorSpec((2, 3))))


# names and layouts of nanoGPT's and Hugging Face's weights


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back(tied: bool, bias: bool, transposed: bool) -> None:
    model = small(tied=tied, bias=bias)
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
    model = small(width=8)
    values = initial_values(model, seed=3)
    weights = model.to_original(values, transposed=True)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    bare = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.float32(-1e4)}  # type: ignore[dict-item]
    assert tensor_by_tensor_equal(model.from_original(bare), values)


def test_what_does_not_fit_is_told_by_name_as_the_file_has_it() -> None:
    """Also where the first projection is missing: nothing is turned that should not be."""
    model = small(width=8)
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


# initial values


def test_values_depend_on_seed_and_path_alone() -> None:
    two, three = small(tied=False), small(layers=3, bias=False)
    first, again, other = initial_values(two, 1), initial_values(two, 1), initial_values(two, 2)
    assert all(np.array_equal(first[path], again[path]) for path in first)
    assert not np.array_equal(first["embedding.weight"], other["embedding.weight"])
    elsewhere = initial_values(three, 1)["blocks.1.attention.qkv.weight"]
    assert np.array_equal(elsewhere, first["blocks.1.attention.qkv.weight"])
    assert not np.array_equal(elsewhere, first["blocks.0.attention.qkv.weight"])
    assert all(value.dtype == np.float32 for value in first.values())


def test_gpt_starts_as_nanogpt_does() -> None:
    values = initial_values(small(layers=8, width=64, context=32, vocabulary=128), 5)
    for path, value in values.items():
        if path.endswith("bias"):
            assert not value.any(), path
        elif "norm" in path:
            assert (value == 1).all(), path
        else:
            std = 0.02 / 4 if path.endswith(("projection.weight", "down.weight")) else 0.02  # sqrt(2 * 8) = 4
            assert value.std() == pytest.approx(std, rel=0.1), path
            assert abs(value.mean()) < 0.1 * std, path


def test_mlp_starts_as_torch_linear_does() -> None:
    values = initial_values(MLP(MLPConfig(layers=2, inputs=100, width=400, outputs=3)), 5)
    for path, value in values.items():
        bound = 1 / math.sqrt(100 if path.startswith("layers.0") else 400)
        assert np.abs(value).max() <= bound
        if value.size > 100:
            assert np.abs(value).max() > 0.95 * bound
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.05), path
