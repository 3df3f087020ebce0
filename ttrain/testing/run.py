"""Runs recorded functions by one engine on one device: what verify compares comes from the engines themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.engine.base import Engine, Trace, traced_graph
from ttrain.engine.state import State, StateTensor

MakeEngine = Callable[[Device, State], Engine]


def run_once(
    device: Device,
    make: MakeEngine,
    trace: Trace,
    feeds: Mapping[str, np.ndarray],
    tensors: Sequence[StateTensor] | None = None,
) -> dict[str, Any]:
    """Outputs by name of one run of a recorded step. `feeds` holds step inputs and first values of state, by name.

    `tensors` lists the state where the graph alone does not tell all of it.
    """
    graph = traced_graph(trace)
    if tensors is None:
        tensors = [StateTensor(name, value.spec, value.kind) for name, value in graph.state.items()]
    state = State(device, tensors)
    for name in state.names():
        if name in feeds:
            state.write(name, np.asarray(feeds[name], np.float32))
    engine = make(device, state)
    try:
        step = engine.build("verify", trace)
        return step({name: _host(feeds[name], spec.dtype) for name, spec in step.inputs.items()})
    finally:
        engine.close()
        device.freeze(None)


def _host(array: np.ndarray, dtype: DType) -> np.ndarray:
    if not dtype.is_floating or dtype is DType.FP64:
        return np.asarray(array)
    return np.asarray(array, np.float32)
