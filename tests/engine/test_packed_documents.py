"""Documents packed in a row: as if each were trained apart, and none sees another, on every engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.models.session import Session, relative_error, tensor_by_tensor_equal
from tests.ttnn.runs import adamw, gpt, llama

SIZE = {"layers": 1, "heads": 2, "width": 16, "context": 72, "vocabulary": 31}
LENGTHS = ((5, 40, 27), (71, 1))  # of the documents of two rows: across and within blocks of kernels, and one token
TOKENS = np.random.default_rng(3).integers(0, SIZE["vocabulary"], (2, SIZE["context"]))
CASES = (("gpt", "dynamic"), ("gpt", "static"), ("llama", "traced"))


@lru_cache
def session(name: str, packed: bool, engine: str, rows: int) -> Session:
    model: Any = gpt(**SIZE, recompute="block" if engine == "static" else "none")
    if name == "llama":
        model = llama(**SIZE, hidden=24, kv_heads=1, window=30)
    model = model.packing_documents() if packed else model
    return Session(model, adamw(clip_norm=None), rows, engine=engine)


def packed(tokens: np.ndarray) -> dict[str, np.ndarray]:
    positions = np.stack([np.concatenate([np.arange(length) for length in row]) for row in LENGTHS])
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    targets[:, :-1][positions[:, 1:] == 0] = -1
    return {"tokens": tokens, "targets": targets, "positions": positions}


def apart(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """A document a row, with tokens after it that nothing before them sees and no target is at."""
    rows = [part for row, sizes in zip(tokens, LENGTHS, strict=True) for part in np.split(row, np.cumsum(sizes)[:-1])]
    given = np.stack([np.pad(row, (0, SIZE["context"] - len(row))) for row in rows])
    targets = np.stack([np.pad(row[1:], (0, SIZE["context"] - len(row) + 1), constant_values=-1) for row in rows])
    return {"tokens": given, "targets": targets}


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_packed_documents_train_as_apart(model: str, engine: str) -> None:
    together, alone = session(model, True, engine, 2), session(model, False, engine, 5)
    loss, expected = (each.train(make(TOKENS), 1, {"lr": 0.0}) for each, make in ((together, packed), (alone, apart)))
    assert loss["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    wanted = alone.gradients()
    for name, gradient in together.gradients().items():
        assert relative_error(gradient, wanted[name]) < 1e-5, name
    assert together.evaluate(packed(TOKENS))["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_another_document_changes_no_bit(model: str, engine: str) -> None:
    """Hidden states of the others, and gradients of a loss over them alone."""
    ours, changed = session(model, True, engine, 2), TOKENS.copy()
    changed[0, 5:45] = (changed[0, 5:45] + 1) % SIZE["vocabulary"]
    found: list[Any] = []
    for tokens in (TOKENS, changed):
        batch = packed(tokens)
        batch["targets"][0, 5:45] = -1

        def trace(graph: Any, batch: Any = batch) -> None:
            positions = graph.input("positions", ours.graph.model.batch_specs(2)["positions"])
            graph.output("hidden", ours.graph.model.hidden(graph, 2, False, positions))

        hidden = ours.run(trace, {name: batch[name] for name in ("tokens", "positions")})["hidden"]
        ours.train(batch, 1, {"lr": 0.0})
        found.append((hidden.reshape(2, SIZE["context"], -1), ours.gradients()))
    (before, gradients), (after, others) = found
    assert not np.array_equal(before[0, 5:45], after[0, 5:45])
    before[0, 5:45] = after[0, 5:45] = 0
    assert np.array_equal(before, after) and tensor_by_tensor_equal(gradients, others)
