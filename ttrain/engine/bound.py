"""The values of a graph as buffers, and its nodes as launches on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Buffer, Launch, of_side
from ttrain.engine.base import Engine
from ttrain.engine.state import Placed
from ttrain.graph import Node, Value


class Bound(ABC):
    """Finds the buffers of values, on a side each, and binds nodes to them; a subclass says where memory lies.

    `owner_of` tells of a value the one whose buffer it shares. Offsets are bytes.
    """

    def __init__(self, engine: Engine, owner_of: Callable[[Value], Value]) -> None:
        self.device, self.state, self.kernels = engine.device, engine.state, engine.kernels
        self.owner_of = owner_of

    @abstractmethod
    def placed(self, owner: Value) -> Placed:
        """Return the place of a value that is not state and owns its buffer."""

    @abstractmethod
    def workspace(self, node: Node, specs: Sequence[TensorSpec]) -> list[Buffer]:
        """The scratch buffers of a node, one for each spec."""

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of a value: its owner's, under the value's own shape and dtype."""
        owner = self.owner_of(value)
        arena, offset, buffer = self.state.placed(owner.name) if owner.kind.is_state else self.placed(owner)
        return buffer if owner.spec == value.spec else self.device.side(owner.on_host).place(arena, offset, value.spec)

    def download(self, value: Value) -> np.ndarray:
        """A host copy of what its buffer holds now."""
        return self.device.side(value.on_host).download(self.buffer(value))

    def bind(self, node: Node) -> Launch:
        """The call without arguments that runs a node."""
        kernel = of_side(self.kernels, node.on_host)[node.op.name]
        ins = [None if value is None else self.buffer(value) for value in node.inputs]
        outs = [self.buffer(output) for output in node.outputs]
        workspace = self.workspace(node, kernel.workspace_specs(*node.specs, node.attributes))
        return self.device.side(node.on_host).bind(kernel, ins, outs, node.attributes, workspace)
