"""Parts of a model: frozen, clipped apart, with learning rates and updates of their own, against torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import ENGINES, Session, token_batch
from tests.optim.test_contract import STEPS, Run
from tests.ttnn.runs import adamw
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType
from ttrain.graph import Graph, Kind, Stage
from ttrain.graph.passes import live_nodes
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.groups import check_groups, flat_parameters, frozen, frozen_count, learning_rates, longest
from ttrain.optim.settings import AdamWConfig
from ttrain.train.steps.step import TrainStep
from ttrain.train.steps.step_graph import StepGraph

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocabulary": 11}


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZES, "tied": False, **changes}))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", ["adamw", "sgd-nesterov"])
def test_only_the_scope_is_clipped(row: str, engine: str, guarded: bool) -> None:
    run = Run(row, {"clip_norm": 0.5, "clip_scope": ["head", "cube"]}, engine, guarded=guarded)
    run.clipped = [tensor for path, tensor in run.tensors.items() if path.startswith(("head", "cube"))]
    for step in range(1, STEPS + 1):
        assert "clipped_norm" in run.both(step)
    run.check()
    assert ("norm" in run.built) == guarded


def test_the_train_step_hands_the_norm_of_the_scope_to_a_guarded_update() -> None:
    """Every parameter after three steps: guarded or not, in one or two micro-batches."""
    finals = []
    for guarded, gradient_accumulation in ((False, 1), (True, 1), (False, 2), (True, 2)):
        optimizer = adamw(clip_scope=["blocks"], clip_norm=0.01)
        graph = StepGraph(gpt(), optimizer, 4 // gradient_accumulation, gradient_accumulation, guarded=guarded)
        session = Session(gpt(), optimizer, 4 // gradient_accumulation, gradient_accumulation=gradient_accumulation)
        steps = {name: session.engine.build(f"again {name}", trace) for name, trace in graph.train_steps().items()}
        step = TrainStep(steps, 4 // gradient_accumulation, seed=1)
        for number in (1, 2, 3):
            result = step(token_batch(11, 4, 8, number), {"lr": 0.01}, number)
            assert 0 < result.metrics["clipped_norm"] < result.grad_norm
        finals.append(session.parameters())
    for other in finals[1:]:
        for name, value in finals[0].items():
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


def test_chips_share_the_norm_of_the_scope() -> None:
    """Gradients are summed over all chips before any norm is formed."""
    graph = Graph()
    StepGraph(gpt(), adamw(clip_scope=["blocks"]), 2, chips=2).trace_train(graph)
    names = [node.op.name for node in graph.nodes if node.stage is Stage.UPDATE]
    assert names.index("all_reduce_state") < names.index("global_norm") and names.count("global_norm") == 3


@pytest.mark.parametrize(("engine", "recompute"), [("dynamic", "none"), ("dynamic", "block"), ("static", "block")])
def test_frozen_parameters_stay_and_the_others_get_the_gradients_they_would_get(engine: str, recompute: str) -> None:
    freeze = {"freeze": ["blocks", "embedding", "positions"], "unfreeze": ["blocks.*.attention_norm", "blocks.1"]}
    part, whole = (Session(gpt(recompute=recompute), adamw(**given), 2, engine=engine) for given in (freeze, {}))
    trained = {parameter.path for parameter in part.graph.parameters}
    still = {parameter.path for parameter in part.graph.frozen}
    assert trained & still == set() and trained | still == set(gpt().parameters())
    assert "blocks.0.attention_norm.weight" in trained and "blocks.1.feed_forward.up.weight" in trained
    assert "blocks.0.feed_forward.up.weight" in still and "head.weight" in trained
    before, start = ({name: part.state.read(name) for name in names} for names in (still, trained))
    for kind in (Kind.GRADIENT, Kind.OPTIMIZER):
        assert {name.rpartition("/")[0] for name in part.state.names(kind)} == trained
    for session in (part, whole):
        session.train(token_batch(11, 2, 8, 1), 1, {"lr": 0.01})
    for name in trained:
        gradients = [session.state.read(f"{name}/gradient") for session in (part, whole)]
        np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-8, err_msg=name)
        assert not np.array_equal(part.state.read(name), start[name])
    part.train(token_batch(11, 2, 8, 2), 2, {"lr": 0.01})
    assert all(np.array_equal(part.state.read(name), value) for name, value in before.items())


def test_copies_of_frozen_parameters_are_there_in_bf16() -> None:
    model = GPT(GPTConfig(**SIZES), DType.BF16)
    session = Session(model, adamw(freeze=["blocks"]), 2)
    name = "blocks.0.attention.qkv.weight"
    copy, master = session.state.read(f"{name}/compute"), session.state.read(name)
    assert master.any() and np.array_equal(copy, torch.from_numpy(master).bfloat16().float().numpy())
    losses = [session.train(token_batch(11, 2, 8, 1), step, {"lr": 0.01})["loss"] for step in range(1, 12)]
    assert losses[-1] < losses[0] - 0.5 and np.array_equal(session.state.read(name), master)


def test_nothing_runs_for_what_is_frozen() -> None:
    counts = {}
    for key, freeze in {"all": [], "no blocks": ["blocks"], "head alone": ["blocks", "embedding", "positions"]}.items():
        graph = Graph()
        StepGraph(gpt(), adamw(freeze=freeze), 2).trace_train(graph)
        backward = [node for node in live_nodes(graph) if node.stage is Stage.BACKWARD]
        counts[key] = sum(node.op.name == "matmul" for node in backward)
    # Four products with a weight per block, each with two gradients; a frozen one needs that of its input alone.
    assert counts["all"] - counts["no blocks"] == 2 * 4
    assert counts["head alone"] == counts["all"] - 2 * 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"freeze": ["blcks"]}, r"optimizer.freeze.blcks: no parameter's name begins so. Did you mean 'blocks'"),
    ({"freeze": ["blocks.0.atention"]}, "Did you mean 'blocks.0.attention"),
    ({"unfreeze": ["nothing.here"]}, "optimizer.unfreeze.nothing.here: no parameter's name begins so"),
    ({"clip_scope": ["core"]}, "optimizer.clip_scope.core: no parameter's name begins so"),
    ({"freeze": ["*"]}, "nothing is left to train"),
    ({"freeze": ["blocks", "embedding", "positions", "norm", "head"]}, "nothing is left to train"),
    ({"freeze": ["blocks"], "unfreeze": ["blocks"]}, "both name blocks"),
    ({"unfreeze": ["blocks"]}, r"optimizer.unfreeze=\['blocks'\]: nothing in it is frozen"),
    ({"freeze": ["blocks"], "clip_scope": ["blocks"]}, "all of it is frozen"),
    ({"freeze": [""]}, "no parameter's name begins so"),
    ({"clip_scope": ["blocks"], "clip_norm": None}, "nothing is clipped with optimizer.clip_norm=null"),
    ({"lr_multipliers": {"blocks.*.nrm": 2.0}}, r"lr_multipliers.blocks.\*.nrm: no parameter's name begins so"),
    ({"freeze": ["head"], "lr_multipliers": {"head": 2.0}}, "optimizer.lr_multipliers.head: changes no rate"),
    ({"lr_multipliers": {"blocks": 2.0, "blocks.*": 3.0}}, "optimizer.lr_multipliers.blocks: changes no rate"),
    ({"freeze": ["head"], "clip_scope": ["blocks", "head"]}, "optimizer.clip_scope.head: nothing of it is trained"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_can_not_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_groups(gpt().parameters(), AdamWConfig(**settings))


def test_the_longest_prefix_wins_and_stars_lose_against_names() -> None:
    assert longest("blocks.1.norm.weight", ["blocks", "blocks.*.norm", "blocks.1.norm"]) == "blocks.1.norm"
    assert longest("blocks.2.norm.weight", ["blocks", "blocks.*.norm", "blocks.1.norm"]) == "blocks.*.norm"
    assert longest("head.weight", ["blocks", "hea"]) is None and longest("head.weight", ["*"]) == "*"
    assert frozen_count(gpt().parameters(), AdamWConfig(freeze=["head"])) == 11 * 16
    assert not frozen("head.weight", ["*"], ["head"]) and frozen("norm.bias", ["*"], ["head"])


def test_a_tied_weight_is_in_one_group() -> None:
    graph = StepGraph(gpt(tied=True), adamw(lr_multipliers={"embedding": 4.0}), 2)
    paths = [parameter.path for parameter in graph.parameters]
    assert len(paths) == len(set(paths)) and not any("head" in path for path in paths)
    (run,) = [shard.flat for shard in graph.shards if any(p.path == "embedding.weight" for p in shard.flat.parameters)]
    assert run.lr == "lr/embedding"


PARAMETERS = gpt().parameters()


def runs(compute: DType = DType.FP32, **options: object) -> dict[str, list[str]]:
    found = flat_parameters(PARAMETERS, adamw(**options), compute)
    return {run.name: [parameter.path for parameter in run.parameters] for run in found}


def test_matrices_decay_and_vectors_do_not_and_norms_are_apart_where_the_rest_is_read_as_bf16() -> None:
    found = runs()
    assert found.keys() == {"lr/adamw/decay/fp32", "lr/adamw/no_decay/fp32"}
    for label, rank in (("decay", 2), ("no_decay", 1)):
        assert {PARAMETERS[path].spec.rank for path in found[f"lr/adamw/{label}/fp32"]} == {rank}
    found = runs(DType.BF16)
    assert found.keys() == {"lr/adamw/decay/bf16", "lr/adamw/no_decay/bf16", "lr/adamw/no_decay/fp32"}
    assert all("norm" in path for path in found["lr/adamw/no_decay/fp32"])


def test_a_parameter_is_in_the_run_of_its_longest_prefix_alone_and_prefixes_end_at_dots() -> None:
    found = runs(decay_rule="none", lr_multipliers={"blocks": 0.5, "blocks.1.attention": 0.1})
    assert sorted(path for members in found.values() for path in members) == sorted(PARAMETERS)
    assert {path.rpartition(".")[0] for path in found["lr/blocks.1.attention/adamw/no_decay/fp32"]} == {
        "blocks.1.attention.qkv",
        "blocks.1.attention.projection",
    }
    assert "blocks.1.attention_norm.weight" in found["lr/blocks/adamw/no_decay/fp32"]
    assert "norm.weight" in found["lr/adamw/no_decay/fp32"]


def test_no_lr_input_without_a_parameter_that_reads_it() -> None:
    tops = {path.split(".")[0] for path in PARAMETERS}
    config = AdamWConfig(lr=1.0, lr_multipliers=dict.fromkeys(tops, 0.5))
    assert "lr" not in learning_rates(PARAMETERS, config, lambda step: 1.0)(1)
    assert learning_rates(PARAMETERS, AdamWConfig(lr=1.0), lambda step: 1.0)(1) == {"lr": 1.0}
