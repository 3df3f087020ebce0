"""Nodes of parameters that stay in host memory: they run on the host, the others on the device.

A graph that knows which state is hosted places its nodes as they are recorded, so every engine and every pass sees the
same placement. A node runs on the host where it touches hosted state, where it is the gradient of such a node, or where
all that it reads was made on the host. What it needs of the other side crosses by an explicit node, once per value:
`stage` and `to_host` towards the host, `to_card` towards the device, `host_input` for step inputs, which come from the
host anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import HOST_PREFIX
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind
from ttrain.graph.op import Op

Inputs = tuple[Value | None, ...]
CROSSINGS = ("to_host", "to_card")


class Hosted(Op):
    """An op that runs on the host. Mixed into the class of the op itself, see `on_host`."""

    on_host = True
    cheap = False  # its values are not computed again: what they come from may have crossed
    base: Op

    @property
    def base_name(self) -> str:
        return self.base.name

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        return self.base.reference(*tensors, **attributes)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        with node.outputs[0].graph.host():
            return self.base.vjp(node, *gradients)

    def decompose(self, node: Node, inputs: Inputs) -> Sequence[Value] | None:
        with next(value for value in inputs if value is not None).graph.host():
            return self.base.decompose(node, inputs)

    def rematerialized(self, node: Node) -> Node | None:
        return None

    def rematerialized_outputs(self, node: Node) -> Sequence[Value]:
        return ()


@cache
def on_host(op: Op) -> Op:
    """The same op, to be run on the host."""
    hosted, kind = copy(op), type(op)
    hosted.__class__ = type(kind.__name__, (Hosted, kind), {"base": op, "cheap": False})
    hosted.name = HOST_PREFIX + op.name
    return hosted


class _Transfer(Op):
    family = "transfer"
    inputs = ("x",)
    transfer = True

    def infer(self, x: TensorSpec) -> TensorSpec:
        return x

    def flops(self, node: Node) -> int:
        return 0

    def nbytes(self, node: Node) -> int:
        return node.outputs[0].spec.nbytes

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        return gradients


class _Stage(_Transfer):
    """y = x, in a tensor that nothing else is ever held in: where the host finds it after a captured step too."""

    name = "stage"
    transfer = False


class _ToHost(_Transfer):
    """y = x on the host."""

    name = "to_host"
    on_host = True


class _HostInput(_Transfer):
    """y = a step input, on the host."""

    name = "host_input"
    on_host = True

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        return [None]


class _ToCard(_Transfer):
    """y = x on the device."""

    name = "to_card"


STAGE, TO_HOST, HOST_INPUT, TO_CARD = _Stage(), _ToHost(), _HostInput(), _ToCard()


def placed(graph: Graph, op: Op, inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[Op, Inputs]:
    """The op as it runs where it belongs, and its inputs on that side. Records what has to cross."""
    if op.on_host or op.transfer or op is STAGE:
        return op, inputs
    present = [value for value in inputs if value is not None]
    values = [value for value in present if not _is_input(value)]
    hosted = [value for value in values if value.on_host]
    if graph.hosting or (values and len(hosted) == len(values)) or any(_is_state(value) for value in hosted):
        stray = next((value for value in values if _is_state(value) and not value.on_host), None)
        if stray is not None and "count" in attributes:
            raise GraphError(
                f"{op.name} takes hosted tensors and {stray!r} together. Parameters that share an update must lie on "
                "one side."
            )
        return on_host(op), tuple(None if value is None else _to_host(graph, value) for value in inputs)
    return op, tuple(_to_card(graph, value) if value is not None and value.on_host else value for value in inputs)


def _is_state(value: Value) -> bool:
    """Whether a value is persistent, or what an update made of it."""
    while value.producer is not None:
        aliases = {} if value.producer.op.view else value.producer.op.aliases(value.producer)
        source = value.producer.inputs[aliases[value.index]] if value.index in aliases else None
        if source is None:
            return False
        value = source
    return value.kind.is_state


def _is_input(value: Value) -> bool:
    """Whether a value is a step input or a view of one."""
    while value.producer is not None and value.producer.op.view and not value.producer.op.on_host:
        value = value.producer.values[0]
    return value.kind is Kind.INPUT


def _to_host(graph: Graph, value: Value) -> Value:
    if value.on_host:
        return value
    if value not in graph.crossed or _is_state(value):
        with graph.no_segment():
            if _is_input(value):
                (crossed,) = graph.append(HOST_INPUT, (value,), {}).outputs
            else:
                (staged,) = graph.append(STAGE, (value,), {}).outputs
                (crossed,) = graph.append(TO_HOST, (staged,), {}).outputs
        graph.crossed[value] = crossed
    return graph.crossed[value]


def _to_card(graph: Graph, value: Value) -> Value:
    if value not in graph.crossed:
        with graph.no_segment():
            (graph.crossed[value],) = graph.append(TO_CARD, (value,), {}).outputs
    return graph.crossed[value]


def crossing_bytes(nodes: Sequence[Node]) -> dict[str, int]:
    """Bytes that one run of the nodes moves, by direction."""
    return {name: sum(node.op.nbytes(node) for node in nodes if node.op.name == name) for name in CROSSINGS}
