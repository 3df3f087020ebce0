"""Properties of the transformer that need no oracle: counts, dropout, recomputation, accumulation, bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.session import BF16, FP32, Session, tensor_by_tensor_equal, token_batch
from ttrain.autodiff import backward
from ttrain.core.errors import ConfigError, GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.graph import Graph, Kind
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
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
    ],
)
def test_impossible_sizes_are_refused(config: GPTConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT(config)


def test_dropout_masks_differ_by_seed_and_are_off_in_evaluation() -> None:
    session, plain = (Session(small(dropout=p), adamw(), 2) for p in (0.3, 0.0))
    losses = [session.train(batch(2), 1, {"lr": 0.0}, seed)["loss"] for seed in (1, 2, 1, 3)]
    assert losses[0] == losses[2]
    assert len(set(losses)) == 3
    assert session.evaluate(batch(2))["loss"] == plain.evaluate(batch(2))["loss"]


@pytest.mark.parametrize("engine", ["dynamic", "static"])
@pytest.mark.parametrize("compute", [FP32, BF16], ids=str)
def test_recomputed_blocks_change_no_bit(engine: str, compute: DType) -> None:
    results = []
    for recompute in ("none", "block"):
        session = Session(small(compute, dropout=0.2, recompute=recompute), adamw(), 2, engine=engine)
        losses = [session.train(batch(2, step), step, {"lr": 1e-2}, step)["loss"] for step in (1, 2, 3)]
        results.append((losses, session.parameters()))
    assert results[0][0] == results[1][0]
    assert tensor_by_tensor_equal(results[0][1], results[1][1])


def test_recomputation_keeps_one_tensor_per_block() -> None:
    def kept(recompute: str) -> int:
        session = Session(small(layers=6, recompute=recompute), adamw(), 4)
        return peak(session.steps["train"].plan.blocks)[0]  # wherever they lie

    assert kept("block") < 0.6 * kept("none")


@pytest.mark.parametrize("engine", ["dynamic", "static"])
def test_accumulation_equals_one_big_batch_whatever_the_split_of_valid_targets(engine: str) -> None:
    """Twice: the first micro-batch overwrites what the last step left."""
    whole = batch(6, masked=13)  # so the first micro-batch has fewer valid targets
    one, parts = (Session(small(), adamw(), rows, engine=engine, gradient_accumulation=6 // rows) for rows in (6, 2))
    for step in (1, 2):
        expected, found = (each.train(whole, step, {"lr": 0.0}) for each in (one, parts))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        gradients = parts.gradients()
        for path, gradient in one.gradients().items():
            np.testing.assert_allclose(gradients[path], gradient, rtol=1e-4, atol=1e-7, err_msg=path)


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


def test_sampling_looks_at_one_position_and_not_beyond_it() -> None:
    session = Session(small(), adamw(), 2)
    step = session.engine.build("logits", session.graph.trace_logits)
    tokens = batch(1)["tokens"]
    changed = tokens.copy()
    changed[0, 6:] = 0
    outputs = [step({"tokens": ids, "position": 5})["logits"] for ids in (tokens, changed)]
    assert outputs[0].shape == (1, SIZE["vocabulary"])
    assert np.array_equal(*outputs)
    assert not np.array_equal(outputs[0], step({"tokens": tokens, "position": 6})["logits"])


def test_full_logits_of_a_large_vocabulary_never_exist() -> None:
    graph = Graph()
    model = GPT(GPTConfig(preset="124M", context=256, vocabulary=50257))
    loss = model.loss(graph, 4, training=True)
    backward(loss, [graph.state["embedding.weight"]])
    largest = max(output.spec.nbytes for node in graph.nodes for output in node.outputs)
    assert largest <= 4 * 50257 * 768  # the head's gradient, not [1024, 50257] logits
    (node,) = (node for node in graph.nodes if node.op.name == "head_cross_entropy")
    kernel = TorchDevice("cpu", threads=1).kernels["head_cross_entropy"]
    work = kernel.workspace_specs(*node.specs, node.attributes)
    assert 30 * 2**20 < max(spec.nbytes for spec in work) <= 32 * 2**20


def test_a_layer_outside_a_model_has_no_parameters_to_read() -> None:
    graph = Graph()
    with pytest.raises(GraphError, match="name_parameters"):
        Linear(3, 4)(graph.input("x", TensorSpec((2, 3))))
