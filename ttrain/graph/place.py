"""Assign each node to a side: the device, or the host beside a device with memory of its own.

Where some parameters are offloaded, they stay in host memory, and so does what belongs to them. A node runs on the host
where it reads state that lies there, where it is the gradient of a node that runs there, or where all that it reads was
made there. What it needs of the other side is transferred by a node of its own, once per value: `stage` and `to_host`
towards the host, `to_device` towards the device, `host_input` for step inputs, which come from the host anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.graph.composite import Primitive
from ttrain.graph.graph import Graph, Node, Op, Value
from ttrain.graph.rewrite import Rewriter

Inputs = Sequence[Value | None]


def _transfer(name: str, doc: str, transfer: bool = True) -> Op:
    facts: dict[str, Any] = {"flops": lambda node: 0, "nbytes": lambda node: node.outputs[0].spec.nbytes}
    return Primitive(_same, name=name, __doc__=doc, family="transfer", transfer=transfer, **facts)


def _same(x: Value) -> TensorSpec:
    return x.spec


_ALONE = "y = x, in a tensor that nothing else is ever held in: where the host finds it after a captured step too."
STAGE = _transfer("stage", _ALONE, transfer=False)
TO_HOST = _transfer("to_host", "y = x on the host.")
HOST_INPUT = _transfer("host_input", "y = a step input, on the host.")
TO_DEVICE = _transfer("to_device", "y = x on the device.")


def place(graph: Graph, offloaded: Callable[[str], bool]) -> Graph:
    """Give every node its side; `offloaded` tells by its name whether a persistent tensor stays in host memory.

    Runs on a graph as it was recorded. An op that takes tensors of both sides at once is recorded once for each, see
    `Op.by_side`. Raises GraphError where a node on the host would overwrite state of the device.
    """
    placer = _Placer(graph, offloaded)
    for node in graph.nodes:
        placer.place(node)
    return placer.rewriter.finish()


class _Placer:
    def __init__(self, graph: Graph, offloaded: Callable[[str], bool]) -> None:
        self.rewriter = Rewriter(graph)
        self.new = self.rewriter.new
        for name, value in self.new.state.items():
            value.on_host = offloaded(name)
        self.offloaded: set[Node] = set()  # nodes of the old graph that run on the host
        self.transferred: dict[Value, Value] = {}  # value -> the same on the other side
        # Of the new graph: persistent tensors, also by what updates made of them, and step inputs with their views.
        self.state: dict[Value, Value | None] = {value: value for value in self.new.state.values()}
        self.given = set(self.new.inputs.values())

    def place(self, node: Node) -> None:
        inputs = self.rewriter.inputs(node)
        on_host = self._runs_on_host(node, inputs)
        with self.rewriter.at(node):
            outputs = self._divided(node, inputs)
            if outputs is None:
                if on_host:
                    self.offloaded.add(node)
                there = [self._on_side(old, new, on_host) for old, new in zip(node.inputs, inputs, strict=True)]
                outputs = self._append(node.op, there, node.attributes, on_host)
        self.rewriter.replace(node.outputs, outputs)

    def _runs_on_host(self, node: Node, inputs: Inputs) -> bool:
        if node.copy_of is not None:
            return node.copy_of in self.offloaded
        if node.gradient_of in self.offloaded:
            return True
        values = [value for value in inputs if value is not None and value not in self.given]
        made_there = [value for value in values if value.on_host]
        return bool(values) and (len(made_there) == len(values) or any(self.state.get(value) for value in made_there))

    def _divided(self, node: Node, inputs: Inputs) -> Sequence[Value] | None:
        """The outputs of an op that is recorded for each side apart; None where it is not."""
        if len({value.on_host for value in inputs if value is not None and value not in self.given}) < 2:
            return None

        def record(inputs: Inputs, attributes: Mapping[str, Any], on_host: bool) -> Sequence[Value]:
            there = [self._on_side(None, value, on_host) for value in inputs]
            return self._append(node.op, there, attributes, on_host)

        return node.op.by_side(inputs, node.attributes, record)

    def _append(self, op: Op, inputs: Inputs, attributes: Mapping[str, Any], on_host: bool) -> Sequence[Value]:
        with self.new.within(on_host=on_host):
            node = self.new.append(op, tuple(inputs), attributes)
        if op.view:
            self.given.update(node.outputs if node.values[0] in self.given and not on_host else ())
            return node.outputs
        for output, source in op.aliases(node).items():
            value = node.inputs[source]
            state = None if value is None else self.state.get(value)
            self.state[node.outputs[output]] = state
            if value is not None and (state is None or state.on_host is not on_host):
                raise GraphError(
                    f"{op.name} runs on the {'host' if on_host else 'device'} and overwrites {state or value!r}, which "
                    "does not lie there. State that shares an update must lie on one side."
                )
        return node.outputs

    def _on_side(self, old: Value | None, value: Value | None, on_host: bool) -> Value | None:
        """A value where a node of that side finds it."""
        if value is None or value.on_host is on_host:
            return value
        original = _copied_from(old)
        if original is not None and self.rewriter.map[original] in self.transferred:
            value = self.rewriter.map[original]  # backward does not transfer again what it computes again
        if value not in self.transferred or (on_host and self.state.get(value)):  # state may have changed since
            with self.new.within(segment=None):
                self.transferred[value] = self._transfer(value, on_host)
        return self.transferred[value]

    def _transfer(self, value: Value, on_host: bool) -> Value:
        if not on_host:
            return self._append(TO_DEVICE, [value], {}, False)[0]
        if value in self.given:
            return self._append(HOST_INPUT, [value], {}, True)[0]
        return self._append(TO_HOST, self._append(STAGE, [value], {}, False), {}, True)[0]


def _copied_from(value: Value | None) -> Value | None:
    """The value of which this one is computed again."""
    copied = None if value is None or value.producer is None else value.producer.copy_of
    return None if copied is None or value is None else copied.outputs[value.index]
