"""AGILLM's weights under the original's names, and rank matrices with fewer columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.models.session import initial_values, tensor_by_tensor_equal
from ttrain.core.errors import CheckpointError
from ttrain.models import agillm_weights
from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_weights import compact, compacted
from ttrain.models.identity import differing
from ttrain.models.settings import AGILLMConfig

SIZE: dict[str, Any] = {"preset": None, "layers": 2, "heads": 2, "width": 8, "rank": 6, "context": 10, "vocabulary": 11}


def small(**changes: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**{**SIZE, **changes}))


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
    model, padded = small(**changes), small(pad_vocabulary=32, **changes)
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
    content = small().original_file(initial_values(small(), seed=3))
    content[part][name] = value
    if value is MISSING:
        del content[part][name]
    with pytest.raises(CheckpointError, match=message):
        sizes = agillm_weights.sizes_of(content)
        AGILLM(AGILLMConfig(preset=None, context=10, **sizes)).from_original(content)


@pytest.mark.parametrize("content", [{}, {"weight": np.ones(3)}, {"core": {}}, {"core": {"x": 1}}, {"core": [1]}])
def test_content_of_another_kind_is_refused(content: dict[str, Any]) -> None:
    for read in (small().from_original, agillm_weights.sizes_of):
        with pytest.raises(CheckpointError, match="holds no weights of AGILLM-3: got "):
            read(content)


def test_a_file_without_its_ar_head_is_no_tied_model() -> None:
    content = small().original_file(initial_values(small(), seed=3))
    tied = {**content, "ar": {"proj.weight": content["core"]["emb.weight"]}}
    assert agillm_weights.sizes_of(tied)["tied"] and small(tied=True).from_original(tied)
    del content["ar"]
    assert not agillm_weights.sizes_of(content)["tied"]
    with pytest.raises(CheckpointError, match="ar.proj.weight: missing"):
        small().from_original(content)
    tied["ar"] = {"proj.weight": content["core"]["emb.weight"] + 1}
    with pytest.raises(CheckpointError, match="ar.proj.weight: differs from core.emb.weight"):
        small(tied=True).from_original(tied)


def test_unknown_names_among_ours_are_left_to_the_reader() -> None:
    values = initial_values(small(), seed=3)
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
    model = small()
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
