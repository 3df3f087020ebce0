"""Mixtures of experts against Transformers' Qwen3-MoE: the same weights and batches, every number compared."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.conftest import Told
from tests.models.session import Session, initial_values, open_cpu, relative_error, tensor_by_tensor_equal, token_batch
from tests.models.test_llama import CONTEXT, ROWS, SIZES, VOCABULARY
from ttrain import ops
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
from ttrain.engine.settings import EngineConfig
from ttrain.models.base import preparation
from ttrain.models.decoder import BlockInputs
from ttrain.models.llama import Llama
from ttrain.models.llama_weights import config_from_transformers, config_to_transformers
from ttrain.models.settings import LlamaConfig
from ttrain.models.weight_checks import as_fp32
from ttrain.nn.experts import MOST_TOLD
from ttrain.nn.initialize import Normal
from ttrain.nn.module import Parameter, use
from ttrain.objectives.base import Objective
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.settings import TrainConfig
from ttrain.train.steps.step import TrainStep

EXPERTS, CHOSEN = 5, 2
COUNTS = {  # ids, and parameters
    "moe-tiny": (65, 3_355_904),
    "minimind-moe-198m": (6_400, 198_416_640),
    "Qwen3-30B-A3B": (151_936, 30_532_122_624),
}
MIXTURE = {
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24, "head_dim": 8,
    "router_aux_loss_coef": 0.05, "output_router_logits": True, "norm_topk_prob": True,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "every layer": {},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
}


def pair(variant: str, **changes: Any) -> tuple[Llama, Any]:
    """Our model, and Transformers' of the same config with random weights."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    options = {**SIZES, **MIXTURE, **VARIANTS[variant]}
    config = transformers.Qwen3MoeConfig(**options, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    plain = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Llama(LlamaConfig(**config_from_transformers(config.to_dict()), **changes)), plain


def apart(weights: Any) -> dict[str, Any]:
    """Weights or gradients of Transformers, which stacks experts and joins gates to ups, as folders hold them."""
    found = {}
    for name, value in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
            found[name] = value
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, each in enumerate(value):
            parts = each.chunk(2) if kind == "gate_up_proj" else [each]
            for part, own in zip(parts, kind.split("_")[:2] if len(parts) == 2 else ["down"], strict=True):
                found[f"{prefix}.{expert}.{own}_proj.weight"] = part
    return found


def arrays(model: Llama, weights: Any) -> dict[str, np.ndarray]:
    """Transformers' weights or gradients by our paths."""
    given = {name: value for name, value in weights.items() if not (model.config.tied and name == "lm_head.weight")}
    return {path: as_fp32(value) for path, value in model.from_original(apart(given)).items()}


def session(model: Llama, plain: Any, engine: str, optimizer: AdamWConfig, **options: Any) -> Session:
    values = arrays(model, plain.state_dict())
    return Session(model, AdamW(optimizer), ROWS, engine=engine, values=values, **options)


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    vocabulary, count = COUNTS[preset]
    assert Llama(LlamaConfig(preset=preset.lower(), vocabulary=vocabulary)).parameter_count == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(variant: str) -> None:
    model, plain = pair(variant)
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0)
    tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
    found = plain(tokens)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
    loss = loss + plain.config.router_aux_loss_coef * plain(tokens, labels=targets).aux_loss
    loss.backward()
    gradients = arrays(model, {name: parameter.grad for name, parameter in plain.named_parameters()})

    def trace(graph: Any) -> None:
        head = model.embedding.weight if model.head is None else model.head.weight
        graph.output("logits", ops.linear(model.hidden(graph, ROWS, False), use(graph, head, model.compute)))

    for engine in ("dynamic", "static", "traced"):
        ours = session(model, plain, engine, AdamWConfig(clip_norm=None))
        logits = ours.run(trace, {"tokens": batch["tokens"]})["logits"]
        assert np.abs(logits - found.logits.detach().flatten(0, 1).numpy()).max() < 1e-4
        result = ours.train(batch, 1, {"lr": 0.0})
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result["router/dropped"] == pytest.approx(0, abs=1e-6)
        for path, gradient in gradients.items():
            assert relative_error(ours.state.read(f"{path}/gradient"), gradient) < 1e-4, path


def test_twenty_steps_are_those_of_transformers() -> None:
    model, plain = pair("every layer")
    config = AdamWConfig(lr=1e-3, weight_decay=0.0, clip_norm=None)
    ours = session(model, plain, "static", config)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=tuple(config.betas), eps=config.eps, weight_decay=0.0)
    for step in range(1, 21):
        batch = token_batch(VOCABULARY, ROWS, CONTEXT, step % 4)
        tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
        found = plain(tokens, labels=targets)
        loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
        loss = loss + plain.config.router_aux_loss_coef * found.aux_loss
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert ours.train(batch, step, {"lr": 1e-3})["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_configs_and_names_go_to_transformers_and_back() -> None:
    model, plain = pair("every second layer")
    made = config_to_transformers(model.config)
    assert made["architectures"] == [type(plain).__name__] and made["num_experts"] == EXPERTS
    assert config_from_transformers(made) == config_from_transformers(plain.config.to_dict())
    values = {path: np.zeros(spec.shape) for path, spec in model.specs().items()}
    assert set(model.to_original(values)) == set(apart(plain.state_dict()))
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[1\]: model=llama takes decoder_sparse_step alone"):
        config_from_transformers({**made, "mlp_only_layers": [1]})


@pytest.mark.parametrize(
    "changes", [{"router": "sigmoid"}, {"router": "biased"}, {"shared_experts": 1}, {"qk_norm": False}]
)
def test_what_transformers_has_not_is_refused_by_name(changes: dict[str, Any]) -> None:
    config = pair("every layer")[0].config
    ((key, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"model.{key}={value}: no model of Transformers"):
        config_to_transformers(replace(config, **changes))


def test_a_mixture_of_which_nothing_is_said_goes_to_transformers() -> None:
    """Weights of experts that are normalised because nothing is said are those of norm_topk_prob."""
    assert config_to_transformers(small(qk_norm=True).config)["norm_topk_prob"] is True
    with pytest.raises(ConfigError, match=r"model\.qk_norm=False: .*; qwen3_moe has model\.qk_norm=True\. "):
        config_to_transformers(small().config)


def small(**changes: Any) -> Llama:
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "hidden": 24, "context": CONTEXT}
    mixture = {"vocabulary": VOCABULARY, "experts": 4, "experts_per_token": 2, "expert_width": 12}
    return Llama(LlamaConfig(**{**sizes, **mixture, **changes}))


def routed_to(model: Llama, favourites: float) -> dict[str, np.ndarray]:
    """Initial values whose routers take every token to the same experts, as one feature is large in all of them."""
    values = initial_values(model, seed=5)
    values["embedding.weight"][:, 0] = 3
    for path in values:
        if path.endswith("router.weight"):
            values[path][:] = 0
            values[path][1:3, 0] = [favourites, favourites / 2]
    return values


@pytest.mark.parametrize("engine", ["static", "traced"])
def test_experts_without_tokens_get_no_gradient(engine: str) -> None:
    """And all tokens of a step may go to one expert; of equal scores the first counts."""
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0)
    for count, favourites, used in ((1, 9.0, [1]), (2, 9.0, [1, 2]), (2, 0.0, [0, 1])):
        model = small(experts_per_token=count, balance_weight=0.0)
        ours = Session(model, AdamW(AdamWConfig()), ROWS, engine=engine, values=routed_to(model, favourites))
        assert np.isfinite(ours.train(batch, 1, {"lr": 0.0})["loss"])
        loads = [ours.evaluate(batch)[f"load/{expert}"] for expert in range(4)]
        assert np.allclose(loads, [(expert in used) / count for expert in range(4)])
        for path in ("gate", "up", "down"):
            gradient = ours.state.read(f"blocks.1.feed_forward.{path}.weight/gradient")
            assert [bool(expert.any()) for expert in gradient] == [expert in used for expert in range(4)]


@pytest.mark.parametrize("engine", ["static", "traced"])
def test_a_router_of_nan_makes_the_loss_nan(engine: str) -> None:
    model = small()
    values = initial_values(model, seed=5)
    values["blocks.0.feed_forward.router.weight"][2] = np.nan
    ours = Session(model, AdamW(AdamWConfig()), ROWS, engine=engine, values=values)
    assert np.isnan(ours.train(token_batch(VOCABULARY, ROWS, CONTEXT, 0), 1, {"lr": 0.0})["loss"])


def test_static_and_dynamic_train_the_same_bits() -> None:
    def trained(engine: str) -> dict[str, np.ndarray]:
        ours = Session(small(shared_experts=1, router="biased"), AdamW(AdamWConfig()), ROWS, engine=engine)
        for step in range(1, 4):
            ours.train(token_batch(VOCABULARY, ROWS, CONTEXT, step), step, {"lr": 1e-2})
        return ours.parameters()

    assert tensor_by_tensor_equal(trained("static"), trained("dynamic"))


@pytest.mark.parametrize("compute", [DType.FP32, DType.BF16])
def test_a_token_has_the_same_bits_among_any_others(compute: DType) -> None:
    """With compiled kernels: the same sequence alone, and beside others that fill panels of other heights."""
    model = small(width=32, expert_width=40, experts=3)
    model.compute = compute
    tokens = token_batch(VOCABULARY, 5, CONTEXT, 0)["tokens"]

    def hidden(rows: int) -> np.ndarray:
        device = open_device(DeviceConfig(name="cpu", threads=1, batch_invariant=True))
        ours = Session(model, AdamW(AdamWConfig()), rows, engine="traced", device=device)
        trace = partial(_hidden, model, rows)
        return np.asarray(ours.run(trace, {"tokens": tokens[:rows]})["hidden"])[:CONTEXT]

    alone = hidden(1)
    assert all(hidden(rows).tobytes() == alone.tobytes() for rows in (2, 5))


def _hidden(model: Llama, rows: int, graph: Any) -> None:
    graph.output("hidden", model.hidden(graph, rows, False))


@pytest.mark.parametrize(("experts", "told"), [(MOST_TOLD, MOST_TOLD), (MOST_TOLD + 1, 0)])
def test_loads_of_very_many_experts_are_not_told(experts: int, told: int) -> None:
    """Each would be an output of its own: with 100,000 of them steps were planned for many minutes."""
    model = small(experts=experts, layers=1, expert_width=1)
    found = Session(model, AdamW(AdamWConfig()), ROWS).evaluate(token_batch(VOCABULARY, ROWS, CONTEXT, 0))
    loads = [value for name, value in found.items() if name.startswith("load/")]
    assert len(loads) == told and "router/balance" in found and (not told or np.isclose(sum(loads), 1))


def test_a_bias_learns_the_excess_load_of_its_expert() -> None:
    model = small(router="biased", balance_weight=0.0)
    values, batch = initial_values(model, seed=5), token_batch(VOCABULARY, ROWS, CONTEXT, 0, masked=5)
    ours = Session(model, AdamW(AdamWConfig(clip_norm=None)), ROWS, values=values)
    ours.train(batch, 1, {"lr": 0.0})
    excess = sum(ours.state.read(f"blocks.{layer}.feed_forward.router.bias/gradient") for layer in range(2))
    loads = np.array([ours.evaluate(batch)[f"load/{expert}"] for expert in range(4)])
    assert np.allclose(excess / 4, loads - 0.25, atol=1e-6) and np.abs(excess).max() > 0.01  # 2 layers, 2 experts each


def test_sigmoid_scores_and_shared_experts_against_torch() -> None:
    """The branch of one layer in fp64 torch."""
    model = small(router="biased", shared_experts=2, layers=1)
    values = initial_values(model, seed=5)
    values["blocks.0.feed_forward.router.bias"][:] = [0.1, 0, -0.1, 0.05]
    own = {path.removeprefix("blocks.0.feed_forward."): torch.from_numpy(x).double() for path, x in values.items()}
    x = torch.randn(ROWS, CONTEXT, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = torch.sigmoid(x @ own["router.weight"].T)
    ids = (scores + own["router.bias"]).topk(2).indices
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True)

    def passed(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    experts = torch.stack([passed(*(own[f"{n}.weight"][e] for n in ("gate", "up", "down"))) for e in range(4)], -1)
    expected = passed(*(own[f"shared.{n}.weight"] for n in ("gate", "up", "down")))
    expected = expected + (experts.gather(-1, ids[..., None, :].expand(-1, -1, 16, -1)) * weights[..., None, :]).sum(-1)

    def trace(graph: Any) -> None:
        y = graph.input("y", TensorSpec((ROWS, CONTEXT, 16)))
        graph.output("branch", model.blocks[0].feed_forward(y, BlockInputs()))

    ours = Session(model, AdamW(AdamWConfig()), ROWS, values=values)
    found = ours.run(trace, {"y": x.float().numpy()})["branch"]
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_muon_makes_each_expert_of_a_stack_orthogonal() -> None:
    from ttrain.optim.muon import Muon
    from ttrain.optim.settings import MuonConfig

    stack = Parameter((3, 8, 16), Normal(1.0), path="x")
    rule = Muon(MuonConfig()).rule(stack, True)
    alone = Muon(MuonConfig()).rule(Parameter((8, 16), Normal(1.0), path="x"), True)
    assert rule == alone
    gradient = torch.randn(3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zero, number = torch.zeros_like(gradient), torch.tensor(1.0)
    whole = rule.body.reference(zero, gradient, zero, number, number, **dict(rule.settings))[0]
    for expert in range(3):
        each = (x[expert] for x in (zero, gradient, zero))
        assert torch.equal(whole[expert], rule.body.reference(*each, number, number, **dict(rule.settings))[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "model.experts_per_token=2, model.expert_width=12: the model has no experts"),
        ({"expert_width": None}, "model.expert_width: no value for model.experts=4"),
        ({"experts_per_token": 5}, "model.experts_per_token=5: must be at most model.experts=4"),
        ({"expert_step": 3}, "model.expert_step=3: none of model.layers=2 has experts. Give less."),
        ({"feed_forward_bias": True}, "experts have no biases"),
        ({"parametrization": "mup", "base_width": 8}, "not known for model.experts=4"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def stepped(parts: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Numbers and gradients of a step of 6 rows in so many micro-batches, whose routing is far from balanced."""
    model = small(balance_weight=1.0, router_z_weight=0.1)
    train = TrainConfig(batch_size=6, gradient_accumulation=parts)
    config = Config(train=train, optimizer=AdamWConfig(clip_norm=None), engine=EngineConfig(name="static"))
    objective = Objective(config.objective)
    objective.slice, objective.balances = (parts, 6 // parts), True
    values = routed_to(model, 1.0)
    with closing(open_cpu()) as device:
        built = build.build_session(model, device, config, objective=objective)
        with closing(built):
            for name, value in values.items():
                built.state.write(name, value)
            told: Any = built.build_training(), 6 // parts, 1, preparation(model)
            step = TrainStep(*told, coupled=objective.coupled or dict)
            result = step(token_batch(VOCABULARY, 6, CONTEXT, 1, masked=9), {"lr": 0.0}, 1)
            return result, {path: built.state.read(f"{path}/gradient") for path in model.parameters()}


def test_micro_batches_change_neither_the_loss_nor_its_gradients() -> None:
    whole, gradients = stepped(1)
    assert whole.metrics["router/balance"] > 2.1  # 2 where the loads are even
    for parts in (2, 3):
        result, found = stepped(parts)
        assert result.loss == pytest.approx(whole.loss, rel=1e-6)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)
        for path, gradient in gradients.items():
            assert relative_error(found[path], gradient) < 1e-5, path


TINY = ["model=llama", "model.preset=null", "model.layers=2", "model.heads=2", "model.width=16", "model.hidden=12"]
TINY += ["model.context=8", "data=text", "data.path=book.txt", "train.batch_size=4", "train.eval_sequences=4"]
TINY += ["sample.tokens=2", "device=cpu", "device.threads=1", "engine=static", "logger=jsonl"]
MOE = ["model.experts=3", "model.experts_per_token=2", "model.expert_width=12"]


def values_of(run: str) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in find_checkpoint(Path(run), "last").weights().items()}


@pytest.fixture
def book(inside: Path) -> None:
    Path("book.txt").write_text("some words of a book that nobody wrote\n" * 40)


def test_a_dense_run_becomes_the_first_of_every_expert(book: None, told: Told) -> None:
    assert main([*TINY, "train.steps=2", "run.dir=dense"]) == 0
    warm = ["train.init_from=dense", "train.steps=1", "optimizer.lr=0", "run.dir=moe"]
    found = told(*TINY, *MOE, *warm)
    assert "20 of 22 parameters" in found
    assert "The feed-forward of blocks.0, blocks.1 becomes each of 3 experts." in found
    assert "blocks.1.feed_forward.router.weight  [3, 16] starts anew: not in the source" in found
    dense, mixture = values_of("dense"), values_of("moe")
    for path, value in dense.items():
        assert np.array_equal(np.broadcast_to(value, mixture[path].shape), mixture[path]), path


def test_a_run_goes_on_with_the_same_bits(book: None) -> None:
    words = [*TINY, *MOE, "model.router=biased", "train.gradient_accumulation=2"]
    assert main([*words, "train.steps=2", "schedule=constant", "run.dir=parts"]) == 0
    assert main(["resume=auto", "train.steps=4", "run.dir=parts"]) == 0
    assert main([*words, "train.steps=4", "schedule=constant", "run.dir=again"]) == 0
    assert tensor_by_tensor_equal(values_of("parts"), values_of("again"))


def test_adapters_of_experts_are_trained_and_merged(book: None, refused: Told) -> None:
    assert main([*TINY, *MOE, "train.steps=2", "run.dir=base"]) == 0
    adapters = ["train.init_from=base", "lora.rank=2", "optimizer.lr=0.1", "train.steps=3", "run.dir=tuned"]
    assert main([*TINY, *MOE, *adapters]) == 0
    trained = values_of("tuned")
    assert trained["blocks.0.feed_forward.up.lora.a.weight"].shape == (3, 2, 16)
    assert all(trained[f"blocks.1.feed_forward.{part}.lora.b.weight"].any() for part in ("gate", "up", "down"))
    assert main(["task=export", "run.dir=tuned", "export.form=ttrain", "export.file=whole.safetensors"]) == 0
    path = "blocks.0.feed_forward.up"
    a, b = (torch.from_numpy(trained[f"{path}.lora.{name}.weight"]).double() for name in "ab")
    expected = torch.from_numpy(values_of("base")[f"{path}.weight"]).double() + 8.0 * torch.bmm(b, a)
    assert np.abs(load_file("whole.safetensors")[f"{path}.weight"] - expected.numpy()).max() < 1e-6
    refused(
        "PEFT has no form for adapters of experts", "task=export", "run.dir=tuned", "export.form=peft", "export.dir=x"
    )


def test_other_objectives_refuse_what_balances(refused: Told) -> None:
    words = ["objective=dpo", "data=documents", "data.sources=[x]"]
    refused("objective=dpo does not add what balances experts", *TINY[:7], *MOE, *words)
