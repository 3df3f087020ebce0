"""A frozen model with adapters: what a step holds and computes, on every engine, and against Hugging Face's PEFT."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import Session, relative_error, tensor_by_tensor_equal, token_batch
from ttrain.api import load_config
from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.core.spec import DType
from ttrain.graph import Graph, Kind
from ttrain.graph.passes import live_nodes
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.settings import AGILLMConfig, GPTConfig
from ttrain.models.weight_checks import Weights
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import check_groups, trained, width_factor
from ttrain.optim.settings import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig
from ttrain.train.checkpoint.adapters import PeftAdapter, merged, write_peft
from ttrain.train.checkpoint.weights_file import read_file
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.step_graph import StepGraph

WIDTH, CONTEXT, VOCABULARY, ROWS, RANK = 16, 12, 61, 3, 4
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


# against PEFT on its own models: scores, losses of training, files both ways


STEPS = 20
OPTIMIZER = AdamWConfig(lr=3e-3, clip_norm=None, weight_decay=0.05)


SHAPE = ["model.preset=null", "model.layers=2", "model.width=32"]
# A config of Transformers, the layers that get adapters, and the overrides that make ours the same model.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "gpt2": (
        "GPT2Config", {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": CONTEXT, "resid_pdrop": 0.0,
                       "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ["c_attn", "c_proj", "c_fc"], ["model=gpt2", *SHAPE, "model.heads=2"],
    ),
    "llama": (
        "LlamaConfig", {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
                        "intermediate_size": 48, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6},
        ["q_proj", "v_proj", "down_proj"],
        ["model=llama", *SHAPE, "model.heads=4", "model.kv_heads=2", "model.hidden=48", "model.tied=false",
         "model.norm_eps=1e-6"],
    ),
}  # fmt: skip


@dataclass
class Pair:
    """PEFT's model, its files, and ours with the same values."""

    folder: Path
    peft: Any
    config: Config

    def open(self, engine: str = "static", **lora: Any) -> Session:
        config = replace(self.config, lora=replace(self.config.lora, **lora))
        model: Any = build.build_model(config)
        base = Weights.widened(model.from_original(read_file(self.folder / "base" / "model.safetensors")))
        values = {**base, **PeftAdapter.open(str(self.folder / "adapter")).values(model)}
        return Session(model, AdamW(OPTIMIZER), ROWS, engine=engine, values=values)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import peft
    import transformers

    torch.manual_seed(0)
    name, sizes, targets, overrides = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("peft")
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes, vocab_size=VOCABULARY))
    model.save_pretrained(folder / "base")
    turned = request.param == "gpt2"
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, fan_in_fan_out=turned, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    for path, parameter in adapted.named_parameters():
        if "lora_B" in path:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    sizes_of_ours = [f"model.context={CONTEXT}", f"model.vocabulary={VOCABULARY}"]
    config = load_config(*overrides, *sizes_of_ours, "device=cpu", f"lora.from={folder / 'adapter'}")
    return Pair(folder, adapted, replace(config, lora=build.with_adapters(config.lora, config.source.explicit)))


def scores(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Return the scores of the last position of every text."""
    made = [
        session.run(session.graph.trace_logits, {"tokens": text[None], "position": len(text) - 1})["logits"][0]
        for text in tokens
    ]
    return np.stack(made)


def expected_scores(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model.eval()(input_ids=torch.from_numpy(tokens)).logits[:, -1].numpy()
    return found


def batch(number: int) -> dict[str, np.ndarray]:
    return token_batch(VOCABULARY, ROWS, CONTEXT, number % 5)


def losses_of(session: Session) -> list[float]:
    return [session.train(batch(step), step, {"lr": OPTIMIZER.lr})["loss"] for step in range(1, STEPS + 1)]


def peft_losses(model: Any) -> list[float]:
    """Return the losses of the same steps by PEFT."""
    model = copy.deepcopy(model).train()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, OPTIMIZER.lr, OPTIMIZER.betas, OPTIMIZER.eps, OPTIMIZER.weight_decay)
    losses = []
    for step in range(1, STEPS + 1):
        tokens, targets = (torch.from_numpy(batch(step)[name]) for name in ("tokens", "targets"))
        loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_scores_losses_and_files_are_pefts(pair: Pair, tmp_path: Path) -> None:
    import peft
    import transformers

    assert pair.config.lora.rank == 4 and pair.config.lora.alpha == 12
    session, tokens = pair.open(), batch(99)["tokens"]
    assert relative_error(scores(session, tokens), expected_scores(pair.peft, tokens)) < 1e-5
    frozen = {name: session.state.read(name) for name in session.state.names(Kind.FROZEN)}
    assert losses_of(session) == pytest.approx(peft_losses(pair.peft), rel=1e-5)
    assert all(np.array_equal(session.state.read(name), value) for name, value in frozen.items())

    model, ours = session.graph.model, scores(session, tokens)
    values = {name: session.state.read(name) for name in model.parameters()}
    write_peft(tmp_path / "made", model, values, pair.config.lora, "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.folder / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "made")
    assert relative_error(expected_scores(again, tokens), ours) < 1e-5

    bare: Any = build.build_model(replace(pair.config, lora=LoraConfig()))
    one = Session(bare, AdamW(OPTIMIZER), ROWS, values=merged(values, pair.config.lora.scale))
    assert relative_error(scores(one, tokens), ours) < 1e-6
    assert relative_error(expected_scores(again.merge_and_unload(), tokens), scores(one, tokens)) < 1e-5


PLAIN, OTHER, MALFORMED = "plain", "other", "malformed"  # computes what plain LoRA does; is refused; is no config
KEYS: list[tuple[str, Any, str]] = [
    *(("init_lora_weights", value, PLAIN) for value in (True, False, "gaussian", "orthogonal", "eva", "mica")),
    *(("init_lora_weights", value, OTHER) for value in ("pissa", "pissa_niter_4", "olora", "OLoRA", "loftq", "corda")),
    ("init_lora_weights", "lora_ga", OTHER),  # the frozen weights were changed in training
    *((key, {}, PLAIN) for key in ("loftq_config", "eva_config", "corda_config", "lora_ga_config")),
    *((key, {}, OTHER) for key in ("monteclora_config", "kasa_config", "use_bdlora", "arrow_config")),
    *((key, True, OTHER) for key in ("use_dora", "use_rslora", "use_qalora", "lora_bias", "ensure_weight_tying")),
    *((key, [], PLAIN) for key in ("modules_to_save", "target_parameters", "alora_invocation_tokens")),
    *((key, [1], OTHER) for key in ("alora_invocation_tokens", "trainable_token_indices", "modules_to_save")),
    *((key, value, OTHER) for key in ("rank_pattern", "alpha_pattern") for value in ({"q_proj": 8}, {"c_attn": 8})),
    *(("bias", value, OTHER) for value in ("all", "lora_only")),
    *(("fan_in_fan_out", value, PLAIN) for value in (True, False)),
    *(("peft_type", value, OTHER) for value in ("ADALORA", "IA3", "VERA")),
    ("velora_config", {"num_groups": 2}, OTHER),
    ("target_parameters", ["weight"], OTHER),
    ("layer_replication", [[0, 2], [1, 2]], OTHER),
    ("megatron_config", {"a": 1}, OTHER),
    ("megatron_core", "elsewhere", PLAIN),
    ("qalora_group_size", 2, PLAIN),
    ("task_type", "SEQ_CLS", OTHER),
    ("task_type", None, PLAIN),
    ("inference_mode", False, PLAIN),
    ("revision", "main", PLAIN),
    ("base_model_name_or_path", "elsewhere", PLAIN),
    ("peft_version", "0.1", PLAIN),
    ("auto_mapping", {"base_model_class": "A", "parent_library": "b"}, PLAIN),
    ("runtime_config", {"ephemeral_gpu_offload": True}, PLAIN),
    ("target_modules", "all-linear", PLAIN),
    ("target_modules", r".*\.(q_proj|v_proj|down_proj|c_attn|c_proj|c_fc)", PLAIN),
    ("target_modules", r".*\.(q_proj|c_attn)", MALFORMED),  # PEFT leaves out what the file has
    ("target_modules", None, MALFORMED),
    ("target_modules", "(", MALFORMED),
    ("exclude_modules", ["0.self_attn.q_proj", "h.0.attn.c_attn"], MALFORMED),
    ("layers_to_transform", [0, 1], PLAIN),
    ("layers_to_transform", 0, MALFORMED),
    ("layers_pattern", [], PLAIN),
    *(("r", value, MALFORMED) for value in (4.5, "4", True, 0, None)),
    *(("lora_alpha", value, MALFORMED) for value in ("12", 0, None)),
    *(("lora_dropout", value, MALFORMED) for value in (1.0, "0.1")),
    ("lora_dropout", 0.5, PLAIN),
    ("of_tomorrow", None, PLAIN),
    ("of_tomorrow", False, PLAIN),
    ("of_tomorrow", {}, OTHER),
    ("of_tomorrow", 1.0, OTHER),
]


def test_every_key_of_the_installed_peft_is_tried() -> None:
    import peft

    assert set(peft.LoraConfig.__dataclass_fields__) <= {key for key, *_ in KEYS}


@pytest.mark.parametrize(("key", "value", "kind"), KEYS, ids=lambda value: str(value)[:24])
def test_a_key_is_plain_lora_or_is_refused(key: str, value: Any, kind: str, pair: Pair, tmp_path: Path) -> None:
    import peft
    import transformers

    shutil.copytree(pair.folder / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, key: value}))

    def understood() -> LoraConfig:
        return PeftAdapter.open(str(tmp_path / "adapter")).adopted(pair.config.lora, ())

    if kind != PLAIN:
        with pytest.raises(CheckpointError, match="lora.from=" if kind == MALFORMED else re.escape(f"{key}={value!r}")):
            understood()
        return
    lora, tokens = understood(), batch(99)["tokens"]
    if key == "target_modules" and value == "all-linear":
        return  # the file lacks some of them
    theirs = transformers.AutoModelForCausalLM.from_pretrained(pair.folder / "base")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    if key not in ("target_modules", "layers_to_transform"):  # for others it is the same model
        assert lora == replace(pair.config.lora, dropout=value if key == "lora_dropout" else 0.0)
        assert np.array_equal(expected_scores(adapted, tokens), expected_scores(pair.peft, tokens))
        return
    session = pair.open(**{name: getattr(lora, name) for name in ("rank", "alpha", "targets")})
    assert relative_error(scores(session, tokens), expected_scores(adapted, tokens)) < 1e-5
