"""A frozen model with adapters: what a step holds and computes, the same on every engine, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.models.session import Session, tensor_by_tensor_equal, token_batch
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType
from ttrain.graph import Graph, Kind
from ttrain.graph.passes import live_nodes
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.settings import AGILLMConfig, GPTConfig
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import check_groups, trained, width_factor
from ttrain.optim.settings import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.step_graph import StepGraph

WIDTH, CONTEXT, VOCABULARY, ROWS, RANK = 16, 8, 11, 2, 4
SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": WIDTH, "context": CONTEXT, "vocabulary": VOCABULARY}
LINEAR = {"attention.qkv": (48, 16), "attention.projection": (16, 16), "feed_forward.up": (64, 16),
          "feed_forward.down": (16, 64)}  # fmt: skip


def gpt(compute: DType = DType.FP32, lora: LoraConfig | None = None, **changes: Any) -> GPT:
    model = GPT(GPTConfig(**{**SIZES, **changes}), compute)
    if lora is not None:
        attach(model, lora)
    for parameter in model.parameters().values():
        parameter.master = compute if not parameter.trainable and parameter.follows_compute else DType.FP32
    return model


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": RANK, "alpha": 8.0, **changes})


def matmuls(model: GPT) -> int:
    """Products of the backward pass of one training step, as it is launched."""
    graph = Graph()
    StepGraph(model, AdamW(AdamWConfig()), ROWS).trace_train(graph)
    nodes = [node for node in live_nodes(graph) if node.stage.value == "backward"]
    return sum(node.op.name == "matmul" for node in nodes)


def test_a_frozen_model_has_no_gradient_no_moments_and_no_second_copy() -> None:
    model = gpt(DType.BF16, lora())
    tensors = StepGraph(model, AdamW(AdamWConfig()), ROWS).state_tensors()
    named = {kind: {tensor.name for tensor in tensors if tensor.kind is kind} for kind in Kind}
    adapters = {f"blocks.{n}.{layer}.lora.{matrix}.weight" for n in range(2) for layer in LINEAR for matrix in "ab"}
    assert named[Kind.PARAMETER] == adapters
    assert named[Kind.GRADIENT] == {f"{path}/gradient" for path in adapters}
    assert named[Kind.COPY] == {f"{path}/compute" for path in adapters}
    assert len(named[Kind.OPTIMIZER]) == 2 * len(adapters)
    assert named[Kind.FROZEN] == set(gpt().parameters())
    bytes_of = {kind: sum(t.spec.nbytes for t in tensors if t.kind is kind) for kind in Kind}
    trained = 2 * sum(RANK * (outputs + inputs) for outputs, inputs in LINEAR.values())
    assert bytes_of[Kind.OPTIMIZER] == 8 * trained and bytes_of[Kind.GRADIENT] == 2 * trained
    norms = 5 * 2 * WIDTH  # in fp32, as layers read them
    assert bytes_of[Kind.FROZEN] == 2 * (gpt().parameter_count - norms) + 4 * norms


def test_backward_makes_no_product_for_a_frozen_weight() -> None:
    """Of 8 layers all but the first pass a gradient on, before which nothing is trained; so do adapters, which take
    three products for their own two matrices.
    """
    assert matmuls(gpt()) == 2 * 8
    assert matmuls(gpt(lora=lora())) == 7 + 7 + 3 * 8


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_makes_no_gradient_of_a_frozen_head(tied: bool) -> None:
    frozen = AdamWConfig(freeze=["embedding", "head"][: 2 - tied])
    for model, config, made in (
        (gpt(tied=tied), AdamWConfig(), 3),
        (gpt(tied=tied), frozen, 2),
        (gpt(tied=tied, lora=lora()), AdamWConfig(), 2),
    ):
        graph = Graph()
        StepGraph(model, AdamW(config), ROWS).trace_train(graph)
        assert len(next(node for node in graph.nodes if node.op.name == "head_cross_entropy").outputs) == made


def adapted(family: str, **changes: Any) -> Any:
    """A model of a family with dropout, and adapters that drop too."""
    sizes = {**SIZES, "dropout": 0.1, **changes}
    model: Any = GPT(GPTConfig(**sizes)) if family == "gpt" else AGILLM(AGILLMConfig(**sizes, rank=8))
    attach(model, lora(dropout=0.2))
    return model


@pytest.mark.parametrize("family", ["gpt", "agillm"])
def test_engines_agree_with_dropout_and_recomputation(family: str) -> None:
    traced = [("traced", "block")] if family == "gpt" else []  # compiling takes seconds
    found = []
    for engine, recompute in (("dynamic", "none"), ("static", "block"), *traced):
        session = Session(adapted(family, recompute=recompute), AdamW(AdamWConfig()), ROWS, engine=engine)
        frozen = {name: session.state.read(name) for name in session.state.names(Kind.FROZEN)}
        losses = [
            session.train(token_batch(VOCABULARY, ROWS, CONTEXT, 0), step, {"lr": 3e-2}, seed=step)["loss"]
            for step in range(1, 6)
        ]
        assert all(np.array_equal(session.state.read(name), value) for name, value in frozen.items())
        found.append((losses, session.parameters()))
    assert found[1][0] == found[0][0]
    assert tensor_by_tensor_equal(found[1][1], found[0][1])
    for losses, _ in found[2:]:  # whose kernels sum in another order
        assert losses == pytest.approx(found[0][0], rel=1e-5)


def test_only_training_drops_inputs_and_every_use_has_a_mask_of_its_own() -> None:
    model = gpt(lora=lora(dropout=0.5))
    session = Session(model, AdamW(AdamWConfig()), ROWS)
    for path in model.parameters():
        if path.endswith("lora.b.weight"):
            session.state.write(path, np.ones(session.state.spec(path).shape, np.float32))
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0)
    assert session.evaluate(batch)["loss"] == session.evaluate(batch)["loss"]
    losses = [session.train(batch, 1, {"lr": 0.0}, seed=seed)["loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2] and session.evaluate(batch)["loss"] not in losses
    assert len({stream for _, stream in masks(session.graph.trace_train)}) == 8


def masks(trace: Any) -> list[tuple[str, int]]:
    """Scope and stream of every dropout mask of forward."""
    graph = Graph()
    trace(graph)
    drops = [node for node in graph.nodes if node.op.name == "dropout" and node.stage.value == "forward"]
    return [(node.scope, node.attributes["stream"]) for node in drops]


@pytest.mark.parametrize("family", ["gpt", "agillm"])
def test_masks_depend_on_layers_and_not_on_what_else_a_step_records(family: str) -> None:
    model = adapted(family)
    plain, resident = StepGraph(model, AdamW(AdamWConfig()), ROWS), Resident(model.batch_specs(ROWS))
    found = masks(plain.trace_train)
    assert len({stream for _, stream in found}) == len(found)
    others = [replace(plain, resident=resident), replace(plain, watched=True), replace(plain, gradient_accumulation=2)]
    assert all(masks(other.trace_train) == found for other in others)


def test_a_wider_model_under_mup_slows_the_matrix_that_sums_over_the_width_alone() -> None:
    """As muP has it for matrices from width to a fixed number of features, and back (LoRA+: Hayou et al., 2024)."""
    model = gpt(lora=lora(), parametrization="mup", base_width=WIDTH // 4)
    for optimizer, slower in ((AdamWConfig(), 1 / 4), (LionConfig(), 1 / 4), (AdafactorConfig(), 1 / 2)):
        factors = {
            path: width_factor(parameter, optimizer)
            for path, parameter in trained(model.parameters(), optimizer).items()
        }
        assert {factor for path, factor in factors.items() if path.endswith("lora.a.weight")} == {slower}
        assert {factor for path, factor in factors.items() if path.endswith("lora.b.weight")} == {1.0}


@pytest.mark.parametrize(
    "settings",
    [{"lr_multipliers": {"embedding": 2.0}}, {"clip_scope": ["blocks.*.*.*.lora", "*.0.attention.qkv.weight"]}],
)
def test_keys_for_what_adapters_freeze_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"adapters alone are trained, such as blocks\.0\.attention\.qkv\.lora\.b"):
        check_groups(gpt(lora=lora()).parameters(), AdamWConfig(**settings))
    with pytest.raises(ConfigError, match=r"optimizer\.adamw_lr=0\.1: muon updates all"):
        check_groups(gpt(lora=lora()).parameters(), MuonConfig(adamw_lr=0.1))


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        (["all-linear"], set(LINEAR)),
        (["qkv", "attention.projection"], {"attention.qkv", "attention.projection"}),
        (["c_attn", "mlp.c_proj"], {"attention.qkv", "feed_forward.down"}),
        (["blocks.*.feed_forward.*"], {"feed_forward.up", "feed_forward.down"}),
    ],
)
def test_layers_are_named_by_the_end_of_their_name(wanted: list[str], layers: set[str]) -> None:
    found = {path for path in gpt(lora=lora(targets=wanted)).parameters() if path.endswith("lora.a.weight")}
    assert found == {f"blocks.{n}.{layer}.lora.a.weight" for n in range(2) for layer in layers}
    alone = gpt(lora=lora(targets=["h.1.attn.c_attn"], rank=40)).parameters()  # a rank may exceed a side
    (a, b) = (path for path in alone if "lora" in path)
    assert a == "blocks.1.attention.qkv.lora.a.weight" and alone[a].shape == (40, 16) and alone[b].shape == (48, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["qkw"]}, r"no linear layer of a block is 'qkw'\. Did you mean 'qkv'\?"),
        ({"targets": ["head"]}, "no linear layer of a block is 'head'"),
        ({"targets": []}, "nothing would be trained"),
    ],
)
def test_wrong_keys_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpt(lora=lora(**changes), tied=False)
