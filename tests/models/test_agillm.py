"""AGILLM-3: sizes, first values, what each pass sees, windows, and what its config refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.plain_agillm import slopes
from tests.models.session import Session, initial_values, tensor_by_tensor_equal, token_batch
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.attention_mask import alibi_slopes
from ttrain.core.errors import ConfigError
from ttrain.graph import Graph, Kind
from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_windows import Windows, window_starts
from ttrain.models.decoder import BlockInputs
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


@pytest.mark.parametrize(("changed", "first"), [(5, 4), (6, 6), (0, 0), (11, 10)])
def test_a_token_is_seen_from_the_start_of_its_pair_on(changed: int, first: int) -> None:
    """Under the pair mask; under the causal one from its own place on."""
    ours = session(small(), rows=1)
    tokens = token_batch(23, 1, 12, 0)["tokens"]
    other = tokens.copy()
    other[0, changed] = (other[0, changed] + 1) % 23
    for mask, start in (("pairs", first), ("causal", changed)):

        def trace(graph: Graph, mask: str = mask) -> None:
            graph.output("hidden", ours.graph.model.states(graph, 1, False, BlockInputs(mask=mask)))  # type: ignore[attr-defined]

        step = ours.engine.build(mask, trace)
        before, after = (step({"tokens": given})["hidden"][0].copy() for given in (tokens, other))
        differs = (before != after).any(1)
        assert differs.tolist() == [place >= start for place in range(12)]


def test_windows_start_where_two_tokens_follow() -> None:
    """At most so many, evenly spaced."""
    assert [window_starts(*sizes, 0) for sizes in ((10, 2), (10, 1), (3, 1))] == [[0, 2, 4, 6], list(range(7)), []]
    for most in (1, 2, 3, 7, 100):
        starts = window_starts(64, 1, most)
        assert len(starts) == len(set(starts)) == min(most, 61)
        gaps = np.diff(starts)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("options", [{}, {"sat_stride": 2}, {"sat_stride": 5}, {"sat_max_windows": 2}])
@pytest.mark.parametrize("context", [4, 5, 12, 33])
def test_rows_count_as_often_as_windows_ask_them(context: int, options: dict[str, int]) -> None:
    config = AGILLMConfig(**{**SIZE, **options, "context": context})
    windows = Windows.of(config, context)
    starts = window_starts(context, config.sat_stride, config.sat_max_windows)
    asked = sorted((row, row + 2) for start in starts for row in (start, start + 1))
    pairs = np.repeat(list(zip(windows.rows, windows.ids, strict=True)), windows.times, axis=0)
    assert sorted(map(tuple, pairs.tolist())) == asked and list(windows.starts) == starts


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "model.preset=huge"),
        ({"preset": "large", "heads": 7}, "model.heads=7: must divide model.width=1024"),
        ({"width": 16, "heads": 2, "layers": 1}, "model.rank: no value"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AGILLM(AGILLMConfig(**{"vocabulary": 9, **options}))


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


def test_the_logits_never_exist_whole() -> None:
    """A long sequence over many ids: no buffer of a step is as large as its logits, and the arena is smaller still."""
    model = AGILLM(AGILLMConfig(preset="nano_3x", context=1122, vocabulary=40000, recompute="block"))
    ours = session(model, rows=1)
    plan = ours.steps["train"].plan
    logits = 1122 * 40000 * 4
    assert max(block.nbytes for block in plan.blocks) < logits / 4
    assert plan.arena_bytes < logits / 2


def test_documents_apart_are_refused() -> None:
    sizes = ["model=agillm", "model.preset=femto_1x", "model.context=32"]
    config = load([*sizes, "data=documents", "data.sources=[x]", "data.attention=document"])
    with pytest.raises(ConfigError, match=r"^data\.attention=document: model=agillm attends to whole sequences\. Give"):
        build.build_model(*config.model_parts, 256)


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
    model: Any = build.build_model(*config.model_parts)
    assert model.config.pad_vocabulary == 32 and model.embedding.weight.padding == 24
    assert build.resolved_model(config.model, model)["pad_vocabulary"] is None
