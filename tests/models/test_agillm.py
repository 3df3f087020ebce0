"""AGILLM-3: sizes, windows, padding, gradients against plain PyTorch; and its weights under the original's names."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_agillm import PlainAGILLM, slopes
from tests.models.session import ENGINES, Session, initial_values, relative_error, tensor_by_tensor_equal, token_batch
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.attention_mask import alibi_slopes
from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.graph import Kind
from ttrain.models import agillm_weights
from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_weights import compact, compacted
from ttrain.models.agillm_windows import window_starts
from ttrain.models.identity import differing
from ttrain.models.settings import AGILLMConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint

SIZE: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16, "rank": 12, "context": 12, "vocabulary": 23}
ORIGINAL = 128815  # ids of the tokenizer that the published counts are for


def small(**changes: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**{**SIZE, **changes}))


def session(model: AGILLM, rows: int = 2, **options: Any) -> Session:
    return Session(model, AdamW(AdamWConfig(clip_norm=None)), rows, **options)


# The published table: core with embedding, core and AR head, all untied, all untied at 128,832 ids, all tied.
COUNTS = {
    "femto_1x": (2064544, 4254399, 6444288, 6445138, 4254433),
    "pico_3x": (4135488, 8386383, 12637344, 12639010, 8386449),
    "nano_3x": (8345280, 16718255, 25091360, 25094658, 16718385),
    "micro_24x": (17304192, 33921327, 50538720, 50545282, 33921585),
    "small": (91173376, 157255471, 223338592, 223364738, 157256497),
    "base": (183985920, 283044655, 382104928, 382144130, 283046193),
    "large": (434316288, 566351663, 698389088, 698441346, 566353713),
}


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    def count(vocabulary: int = ORIGINAL, **options: Any) -> int:
        return AGILLM(AGILLMConfig(preset=preset, vocabulary=vocabulary, **options)).parameter_count

    core = count(objective="ar_only", tied=True)
    assert (core, count(objective="ar_only"), count(), count(128832), count(tied=True)) == COUNTS[preset]
    assert count(pad_vocabulary=32) == count(), "what pads the vocabulary is not trained"


def test_every_preset_folds_where_its_rank_exceeds_the_head_width() -> None:
    presets = AGILLMConfig.presets
    folded = {name for name in presets if AGILLM(AGILLMConfig(preset=name, vocabulary=9)).folded}
    assert set(presets) - folded == {"femto_1x", "pico_1x", "nano_1x"}
    assert not AGILLM(AGILLMConfig(preset="large", vocabulary=9, fold="off")).folded
    for heads in (1, 2, 3, 4, 8, 16, 24):
        assert np.allclose(alibi_slopes(heads), slopes(heads))


def test_first_values_are_those_of_torch() -> None:
    model = small(width=64, heads=4, rank=24, vocabulary=500)
    values = initial_values(model, seed=3)
    assert values["embedding.weight"].std() == pytest.approx(1.0, abs=0.02)
    bound = 1 / math.sqrt(64)
    for path in ("blocks.0.attention.query.weight", "ar_head.bias", "sat_head.gate.weight"):
        assert bound * 0.6 < np.abs(values[path]).max() <= bound
    shared = values["blocks.1.attention.rank_matrix"].astype(np.float64)
    assert np.allclose(shared @ shared.T, np.eye(16), atol=1e-6), "orthonormal rows: M is the identity"
    narrow = initial_values(small(width=64, heads=2, rank=5), seed=3)["blocks.0.attention.rank_matrix"]
    assert np.allclose(narrow.T @ narrow, np.eye(5), atol=1e-6)
    assert (values["norm.weight"] == 1).all() and (values["norm.bias"] == 0).all()


def plain_of(ours: Session) -> PlainAGILLM:
    """Return a plain model with equal parameters as leaves."""
    built: Any = ours.graph.model
    values = {path: torch.from_numpy(ours.state.read(path)).requires_grad_() for path in built.parameters()}
    return PlainAGILLM(values, built.layers, built.heads, standard=built.config.alibi == "standard")


FORMS: list[dict[str, Any]] = [
    {"fold": "on"},
    {"fold": "off"},
    {"rank": 3, "fold": "on"},  # a projector: M is not the identity
    {"rank": 3, "fold": "off"},
    {"heads": 1, "rank": 4, "tied": True},
    {"heads": 8, "alibi": "standard"},
    {"sat_stride": 2, "label_smoothing": 0.0},
    {"sat_max_windows": 2},
    {"sat_target": "legacy"},
    {"context": 4, "sat_stride": 5},
    {"context": 5},
    {"context": 33, "recompute": "block", "pad_vocabulary": 32},
    {"objective": "ar_only", "tied": True},
]


@pytest.mark.parametrize("options", FORMS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_logits_losses_and_every_gradient_equal_those_of_pytorch(options: dict[str, Any]) -> None:
    ours = session(small(**{"context": 11, "dropout": 0.0, **options}))
    config, plain = ours.graph.model.config, plain_of(ours)
    batch = token_batch(23, 2, config.context, 1, masked=2)
    tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
    loss, ar = plain.ar_losses(tokens, targets, config.label_smoothing)
    expected = {"ar/ce": ar.item()}
    if config.objective == "joint":
        legacy, length = config.sat_target == "legacy", tokens.shape[1]
        starts = [length - 2] if legacy else window_starts(length, config.sat_stride, config.sat_max_windows)
        smoothed, sat, gate = plain.sat_losses(tokens, targets, config.label_smoothing, starts, legacy)
        loss = loss + smoothed + 0.1 * gate
        expected |= {"sat/ce": sat.item(), "gate/ce": gate.item()}
    loss.backward()
    logits = ours.run(ours.graph.trace_logits, {"tokens": batch["tokens"][:1], "position": 3})["logits"]
    assert relative_error(logits[0, :23], plain.ar_logits(tokens)[0, 3].detach().numpy()) < 1e-5
    trained = ours.train(batch, 1, {"lr": 0.0})
    for outputs in (trained, ours.evaluate(batch)):
        for name, value in {"loss": loss.item(), **expected}.items():
            assert outputs[name] == pytest.approx(value, rel=1e-5), name
    for path, value in plain.values.items():
        assert value.grad is not None
        assert relative_error(ours.state.read(f"{path}/gradient"), value.grad.numpy()) < 1e-5, path


def test_engines_agree() -> None:
    found = {}
    for engine in ENGINES:
        ours = session(small(dropout=0.1, layers=1), engine=engine)
        losses = [ours.train(token_batch(23, 2, 12, step), step, {"lr": 1e-2}, step)["loss"] for step in range(1, 9)]
        found[engine] = losses, ours.parameters()
    assert found["dynamic"][0] == found["static"][0]
    assert tensor_by_tensor_equal(found["dynamic"][1], found["static"][1])
    assert found["traced"][0] == pytest.approx(found["static"][0], rel=2e-5)  # its kernels sum in another order


def test_windows_start_where_two_tokens_follow() -> None:
    """At most so many, evenly spaced."""
    assert [window_starts(*sizes, 0) for sizes in ((10, 2), (10, 1), (3, 1))] == [[0, 2, 4, 6], list(range(7)), []]
    for most in (1, 2, 3, 7, 100):
        starts = window_starts(64, 1, most)
        assert len(starts) == len(set(starts)) == min(most, 61)
        gaps = np.diff(starts)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_a_sequence_too_short_for_a_window_has_no_sat_loss() -> None:
    ours = session(small(context=3))
    batch = token_batch(23, 2, 3, 0)
    outputs = ours.train(batch, 1, {"lr": 1e-3})
    assert (outputs["sat/ce"], outputs["gate/ce"]) == (0.0, 0.0)
    assert not ours.state.read("sat_head.weight/gradient").any()
    alone = session(small(context=3, objective="ar_only")).train(batch, 1, {"lr": 1e-3})
    assert outputs["loss"] == alone["loss"]


def test_masked_targets_weigh_nothing_and_never_make_nan() -> None:
    model = small(dropout=0.0)
    batch = token_batch(23, 4, 12, 3)
    batch["targets"][0, :] = -1
    batch["targets"][1, 4:6] = -1
    batch["targets"][3, ::2] = -1
    whole = session(model, rows=4).train(batch, 1, {"lr": 0.0})
    parts = session(model, rows=1, gradient_accumulation=4).train(batch, 1, {"lr": 0.0})
    for name in ("loss", "ar/ce", "sat/ce", "gate/ce", "grad_norm"):
        assert math.isfinite(whole[name])
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name
    nothing = session(model, rows=4).train({**batch, "targets": np.full((4, 12), -1)}, 1, {"lr": 1e-3})
    assert (nothing["loss"], nothing["grad_norm"]) == (0.0, 0.0)


def test_what_pads_the_vocabulary_stays_zero_and_unlikely() -> None:
    """Same losses as without, no gradient, no drift, none of it read."""
    plain, padded = session(small()), session(small(pad_vocabulary=32))
    for step in range(1, 4):
        batch = token_batch(23, 2, 12, step)
        assert padded.train(batch, step, {"lr": 1e-2})["loss"] == plain.train(batch, step, {"lr": 1e-2})["loss"]
    for name in padded.state.names():
        whole = padded.state.device.download(padded.state.placed(name)[2])
        assert whole.shape == padded.state.tensor(name).spec.shape
        assert np.array_equal(padded.state.read(name), plain.state.read(name)), name
        assert not whole[len(padded.state.read(name)) :].any(), name
    assert padded.state.tensor("ar_head.weight").spec.shape == (32, 16)


def test_documents_apart_are_refused() -> None:
    sizes = ["model=agillm", "model.preset=femto_1x", "model.context=32"]
    config = load([*sizes, "data=documents", "data.sources=[x]", "data.attention=document"])
    with pytest.raises(ConfigError, match=r"^data\.attention=document: model=agillm attends to whole sequences\. Give"):
        build.build_model(config, 256)


@pytest.mark.parametrize(("before", "after"), [(32, 1), (1, 32), (32, 100)])
def test_a_checkpoint_loads_at_another_padding(tmp_path: Path, before: int, after: int) -> None:
    """It holds only ids that exist."""
    ours, other = (session(small(pad_vocabulary=padding, dropout=0.0)) for padding in (before, after))
    for step in range(1, 4):
        ours.train(token_batch(23, 2, 12, step), step, {"lr": 1e-2})
    saved = save_checkpoint(tmp_path, ours.state, CheckpointContent(3, {}))
    assert saved.weights()["embedding.weight"].shape == (23, 16) and saved.weights()["ar_head.bias"].shape == (23,)
    read_checkpoint(saved.path).load(other.state)
    names = ours.state.names(Kind.PARAMETER, Kind.OPTIMIZER)
    assert tensor_by_tensor_equal(*({name: each.state.read(name) for name in names} for each in (ours, other)))
    steps = [each.train(token_batch(23, 2, 12, 4), 4, {"lr": 1e-2})["loss"] for each in (ours, other)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)  # products of another shape


def test_padding_that_follows_from_the_device_is_not_kept() -> None:
    config = load(["model=agillm", "model.preset=femto_1x", "model.vocabulary=40", "device=n300"])
    model: Any = build.build_model(config)
    assert model.config.pad_vocabulary == 32 and model.embedding.weight.padding == 24
    assert build.resolved_model(config.model, model)["pad_vocabulary"] is None


# weights under the original's names, and rank matrices with fewer columns


TINY: dict[str, Any] = {"preset": None, "layers": 2, "heads": 2, "width": 8, "rank": 6, "context": 10, "vocabulary": 11}


def tiny(**changes: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**{**TINY, **changes}))


# As the spec lists them for two layers of width 8 with head width 4 and rank 6.
CORE = {"emb.weight": (11, 8), "ln.weight": (8,), "ln.bias": (8,)}
for _layer in range(2):
    CORE |= {f"blocks.{_layer}.ln{n}.{leaf}": (8,) for n in (1, 2) for leaf in ("weight", "bias")}
    CORE |= {f"blocks.{_layer}.mha.{n}.weight": (8, 8) for n in ("q", "k", "v", "proj")}
    CORE |= {f"blocks.{_layer}.mha.U": (4, 6)}
    CORE |= {f"blocks.{_layer}.ff.0.weight": (32, 8), f"blocks.{_layer}.ff.0.bias": (32,)}
    CORE |= {f"blocks.{_layer}.ff.2.weight": (8, 32), f"blocks.{_layer}.ff.2.bias": (8,)}
AR = {"proj.weight": (11, 8), "proj.bias": (11,)}
SAT = {"proj.weight": (11, 8), "proj.bias": (11,), "gate.weight": (2, 8), "gate.bias": (2,)}


@pytest.mark.parametrize(
    ("changes", "ar", "sat"),
    [({}, AR, SAT), ({"tied": True}, {"proj.weight": (11, 8)}, SAT), ({"objective": "ar_only"}, AR, None)],
    ids=["untied", "tied", "ar_only"],
)
def test_there_and_back_under_the_names_of_the_original(changes: dict[str, Any], ar: Any, sat: Any) -> None:
    """Also with padding, and under the names of compiled modules."""
    model, padded = tiny(**changes), tiny(pad_vocabulary=32, **changes)
    values = initial_values(model, seed=3)
    content = model.original_file(values)
    parts = {part: content[part] for part in ("core", "ar", "sat") if part in content}
    shapes = {part: {name: weight.shape for name, weight in named.items()} for part, named in parts.items()}
    assert shapes == {"core": CORE, "ar": ar} | ({"sat": sat} if sat else {})
    assert content["cfg"] == {"d": 8, "layers": 2, "heads": 2, "rank": 6}
    assert content["tie_weights"] is bool(changes.get("tied"))
    compiled = {part: {f"_orig_mod.{name}": w for name, w in named.items()} for part, named in parts.items()}
    for given in (content, {"weights": content, "delta": True}, model.to_original(values), compiled):
        for target in (model, padded):
            assert tensor_by_tensor_equal(target.from_original(given), values)
    for given in (content, values):
        sizes = agillm_weights.sizes_of(given)
        assert AGILLM(AGILLMConfig(preset=None, context=10, **sizes)).specs() == model.specs()


MISSING = object()


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("core", "blocks.1.mha.U", MISSING, "core.blocks.1.mha.U: missing"),
        ("core", "blocks.1.mha.U", np.ones((4, 7)), r"core.blocks.1.mha.U: got \[4, 7\], expected \[4, 6\]"),
        ("ar", "proj.weight", np.ones((12, 8)), r"ar.proj.weight: got \[12, 8\], expected \[11, 8\]"),
        ("sat", "gate.bias", MISSING, "sat.gate.bias: missing"),
        ("core", "emb.weight", 5, "core.emb.weight: is int, expected a tensor"),
        ("core", "emb.weight", np.ones(8), "no matrix core.blocks.0.mha.U"),
        ("core", "emb.weight", np.ones((0, 8)), "no matrix core.blocks.0.mha.U"),
        ("core", "blocks.0.mha.U", np.ones(4), "no matrix core.blocks.0.mha.U"),
        ("core", "blocks.0.mha.U", np.ones((0, 4)), "no matrix core.blocks.0.mha.U"),
        ("core", "blocks.0.mha.U", None, "core.blocks.0.mha.U: is NoneType"),
        ("core", "blocks.0.ln1.bias", [1], "core.blocks.0.ln1.bias: is list"),
        ("core", 7, np.ones(3), "core.7: not a weight of this model"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(part: str, name: Any, value: Any, message: str) -> None:
    content = tiny().original_file(initial_values(tiny(), seed=3))
    content[part][name] = value
    if value is MISSING:
        del content[part][name]
    with pytest.raises(CheckpointError, match=message):
        sizes = agillm_weights.sizes_of(content)
        AGILLM(AGILLMConfig(preset=None, context=10, **sizes)).from_original(content)


@pytest.mark.parametrize("content", [{}, {"weight": np.ones(3)}, {"core": {}}, {"core": {"x": 1}}, {"core": [1]}])
def test_content_of_another_kind_is_refused(content: dict[str, Any]) -> None:
    for read in (tiny().from_original, agillm_weights.sizes_of):
        with pytest.raises(CheckpointError, match="holds no weights of AGILLM-3: got "):
            read(content)


def test_a_file_without_its_ar_head_is_no_tied_model() -> None:
    content = tiny().original_file(initial_values(tiny(), seed=3))
    tied = {**content, "ar": {"proj.weight": content["core"]["emb.weight"]}}
    assert agillm_weights.sizes_of(tied)["tied"] and tiny(tied=True).from_original(tied)
    del content["ar"]
    assert not agillm_weights.sizes_of(content)["tied"]
    with pytest.raises(CheckpointError, match="ar.proj.weight: missing"):
        tiny().from_original(content)
    tied["ar"] = {"proj.weight": content["core"]["emb.weight"] + 1}
    with pytest.raises(CheckpointError, match="ar.proj.weight: differs from core.emb.weight"):
        tiny(tied=True).from_original(tied)


def test_unknown_names_among_ours_are_left_to_the_reader() -> None:
    values = initial_values(tiny(), seed=3)
    assert agillm_weights.sizes_of({**values, "foo": np.ones(1), 3: np.ones(1)}) == agillm_weights.sizes_of(values)


def planted(rank: int, columns: int, seed: int = 0) -> np.ndarray:
    """A matrix [16, columns] of that rank."""
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(16, rank)) @ generator.normal(size=(rank, columns))).astype(np.float32)


@pytest.mark.parametrize(("rank", "columns"), [(5, 12), (1, 3), (16, 40), (16, 17), (5, 5), (1, 1), (0, 6)])
def test_compaction_finds_the_rank_and_keeps_the_metric(rank: int, columns: int) -> None:
    before = planted(rank, columns)
    after = compact(before)
    assert after.shape == (16, max(1, rank)) and after.dtype == np.float32 and (rank != columns or after is before)
    metric, other = (matrix.astype(np.float64) @ matrix.T.astype(np.float64) for matrix in (before, after))
    np.testing.assert_allclose(other, metric, rtol=0, atol=2e-6 * np.abs(metric).max())


def test_layers_get_one_rank_and_columns_of_zeros() -> None:
    matrices, report = compacted({0: planted(3, 20), 1: planted(7, 20, seed=1)})
    assert [(each["before"], each["kept"]) for each in report["layers"]] == [(20, 3), (20, 7)]
    assert all(each["error"] < 1e-6 for each in report["layers"]) and report["rank"] == 7
    assert matrices[0].shape == matrices[1].shape == (16, 7)
    assert not matrices[0][:, 3:].any()


def test_what_a_file_of_the_original_says_of_the_function() -> None:
    """Heads and tying as the original writes them; a head of its own under our name says that it is not tied."""
    model = tiny()
    file = model.original_file(initial_values(model, 0))
    assert model.original_config(file) == {"heads": 2, "tied": False}
    assert model.original_config(initial_values(model, 0)) == {"tied": False}
    other = {**file, "cfg": {**file["cfg"], "heads": 4}, "tie_weights": True}
    standard = dataclasses.replace(model.config, alibi="standard", dropout=0.0, label_smoothing=0.0)
    for there, config, keys in (
        (model.original_config(file), model.config, []),
        (model.original_config(other), model.config, ["model.heads", "model.tied"]),
        (dataclasses.asdict(model.config), standard, ["model.alibi"]),
    ):
        assert [told.partition(":")[0] for told in differing(there, config)] == keys
