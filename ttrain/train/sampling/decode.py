"""Read a growing text with cached keys and values: two built steps serve texts of any length.

One step reads a chunk of tokens, the other the few that are new. Tokens that the caches hold are not read again. A text
that was changed, or lost its first tokens, is read again from the first token that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any, cast

import numpy as np

from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.base import Step, Trace
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind
from ttrain.models.base import CachedModel
from ttrain.models.cache import POSITIONS, TOKENS, VISIBLE, cache_places

CHUNK = 64  # tokens that are read at once
ROWS, KEEP = "rows", "keep"  # step inputs: which of the step's rows are scored, and the factor 0 or 1 of each


def extend_trace(model: CachedModel, count: int, rows: int, mask: str = CAUSAL, texts: int = 1) -> Trace:
    """Records a step that reads `count` tokens of so many texts and scores `rows` of them.

    Inputs of models/cache.py, and rows int64 [rows]. Output logits fp32 [rows, vocabulary]. With the mask `pairs` two
    rows are scored by the pair head: logits fp32 [2, vocabulary] of the two tokens after them, and gate fp32 [1, 2];
    rows are multiplied by keep fp32 [2, 1] first.
    """

    def trace(graph: Graph) -> None:
        hidden = model.extend(graph, count, mask, texts)
        with graph.scope("head"):
            picked = ops.embedding(graph.input(ROWS, TensorSpec((rows,), DType.INT64)), hidden)
            if mask != PAIRS:
                graph.output("logits", model.scores(picked))
                return
            keep = ops.cast(graph.input(KEEP, TensorSpec((rows, 1), DType.FP32)), picked.spec.dtype)
            logits, gate = cast("Any", model).pair_scores(ops.multiply(picked, keep))
            graph.output("logits", logits)
            graph.output("gate", gate)

    return trace


def cache_tensors(traces: Sequence[Trace]) -> list[StateTensor]:
    """The caches that these steps keep, to be placed beside the parameters."""
    found: dict[str, StateTensor] = {}
    for trace in traces:
        graph = Graph()
        trace(graph)
        for name, value in graph.state.items():
            if value.kind is Kind.CACHE:
                found[name] = StateTensor(name, value.spec, value.kind)
    return list(found.values())


def reading_traces(model: CachedModel, mask: str, new: int, rows: int, length: int | None = None) -> dict[str, Trace]:
    """Return the two steps of a reader by name: one for `new` tokens, one for a chunk.

    `length` is that of the longest text, which the model was made for; None takes its context.
    """
    places = cache_places(length or model.context, mask)
    sizes = dict.fromkeys((min(new, places), max(min(CHUNK, places), min(new, places))))
    return {f"read_{mask}_{count}": extend_trace(model, count, rows, mask) for count in sizes}


class Reader:
    """Feeds a text to the steps of `reading_traces`, and returns their outputs for its last tokens.

    Unless it `keeps` what it has read, every call reads the whole text again.
    """

    def __init__(self, steps: Sequence[Step], context: int, mask: str = CAUSAL, keeps: bool = True) -> None:
        self._steps = sorted(steps, key=_size)
        self._places, self._mask, self._keeps = cache_places(context, mask), mask, keeps
        self._block = 2 if mask == PAIRS else 1  # tokens that see each other, and become final together
        self._read: list[int] = []

    def read(self, text: list[int], wanted: int) -> dict[str, Any]:
        """Outputs of a step that scores the last `wanted` tokens of a text, at most as many as it has rows.

        Further rows of the outputs mean nothing.
        """
        start = self._floor(min(self._kept(text), max(0, len(text) - wanted)))
        # A text's first tokens go through the chunk's step however few they are, so that both steps run early.
        known, self._read = start > 0, []
        while True:
            step = next((s for s in self._steps if len(text) - start <= _size(s) and known), self._steps[-1])
            if len(text) - start <= _size(step):
                break
            self._feed(step, text, start, 0)
            start = self._floor(min(start + _size(step), len(text) - wanted))
        outputs = self._feed(step, text, max(0, self._floor(min(start, self._places - _size(step)))), wanted)
        self._read = list(text) if self._keeps else []
        return outputs

    def _floor(self, place: int) -> int:
        return place - place % self._block

    def _kept(self, text: list[int]) -> int:
        """Number of the text's first tokens that have their final rows in the caches."""
        return self._floor(len([*takewhile(bool, map(eq, self._read[: self._floor(len(self._read))], text))]))

    def _feed(self, step: Step, text: list[int], start: int, wanted: int) -> dict[str, Any]:
        count, rows = _size(step), step.inputs[ROWS].shape[0]
        tokens = np.zeros((1, count), np.int64)
        part = text[start : start + count]
        tokens[0, : len(part)] = part
        positions = np.arange(start, start + count)
        visible = positions + 1
        if self._mask == PAIRS:
            visible = np.minimum(positions // 2 * 2 + 2, len(text))
        inputs = {TOKENS: tokens, POSITIONS: positions, VISIBLE: visible}
        places = np.arange(len(text) - wanted, len(text)) - start
        inputs[ROWS] = np.zeros(rows, np.int64)
        inputs[ROWS][:wanted] = np.maximum(places, 0)
        if KEEP in step.inputs:
            inputs[KEEP] = np.ones((rows, 1), np.float32)
            inputs[KEEP][:wanted, 0] = places + start >= 0  # a row before the text is zero
        return dict(step(inputs))


def _size(step: Step) -> int:
    return step.inputs[TOKENS].shape[1]
