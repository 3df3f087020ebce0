"""Steps over texts that are as long as they have to be: built for one class of lengths at a time."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from typing import Any

from ttrain.engine.base import Step, Trace
from ttrain.graph import Kind
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph

SHORTEST = 64  # tokens of the first class; each other is twice as long as the one before, up to the context

Resized = Callable[[int], Any]  # length -> model over the same parameters, None where these depend on the length


def length_class(tokens: int, context: int) -> int:
    """Return the length of the rows that hold so many tokens."""
    return min(context, max(SHORTEST, 1 << max(tokens - 1, 0).bit_length()))


class StepsByLength:
    """Builds steps of a session when they are asked for, and lets those before go with their memory."""

    def __init__(self, session: Session, resized: Resized) -> None:
        self.session, self._resized = session, resized
        self.model: Any = session.graph.model
        self._key: tuple[str, int] | None = None
        self._steps: Mapping[str, Step] = {}
        self.context = session.graph.model.batch_specs(1)["tokens"].shape[1]
        self._fixed = self.context > SHORTEST and resized(SHORTEST) is None

    def length(self, tokens: int) -> int:
        """Return the length of the rows that hold so many tokens: the context where the model takes no other."""
        return self.context if self._fixed else length_class(tokens, self.context)

    def get(self, name: str, length: int, traces: Callable[[StepGraph], Mapping[str, Trace]]) -> Mapping[str, Step]:
        """Return the steps of `traces` for rows of one of the lengths that `length` gives, built and placed.

        `name` tells them from others.
        """
        if self._key != (name, length):
            state, engine, graph = self.session.state, self.session.engine, self.session.graph
            if length != self.context:
                graph = dataclasses.replace(graph, model=self._resized(length))
            recorded = traces(graph)
            before, self._steps, self._key = self._key, {}, None
            engine.close()
            state.drop(state.names(Kind.CACHE))
            if before is not None:
                gc.collect()  # the memory of steps and caches before, as graph and values refer to each other
            state.add(cache_tensors(list(recorded.values())))
            self._steps = {each: engine.build(each, trace) for each, trace in recorded.items()}
            for step in self._steps.values():
                if hasattr(step, "take_addresses"):  # all before one runs, because some engines compile then
                    step.take_addresses()
            self._key = name, length
        return self._steps
