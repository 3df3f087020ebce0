"""Reverse-mode differentiation of a recorded graph: appends the backward nodes to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from ttrain.core.errors import GraphError
from ttrain.graph.graph import Graph, Node, Stage, Value
from ttrain.ops import add, full


def backward(loss: Value, wrt: Sequence[Value]) -> list[Value]:
    """Record the gradients of a scalar loss with respect to `wrt`, in that order.

    The first contribution to a gradient is the gradient; later ones are added. Nodes of a recomputed segment are
    recorded a second time, right before backward needs them. Raises GraphError naming every value of `wrt` that the
    loss does not depend on: such a parameter would silently never train.
    """
    graph = loss.graph
    if loss.spec.size != 1:
        raise GraphError(f"backward: got a loss of {loss.spec}, expected a scalar. Reduce it first.")
    with graph.stage(Stage.BACKWARD):
        gradients = _Reverse(graph, loss, wrt).run()
    missing = [value.name or repr(value) for value in wrt if value not in gradients]
    if missing:
        raise GraphError(
            f"no gradient reaches {', '.join(missing)}: the loss does not depend on it. "
            "Use it in the forward pass or leave it out of the trained parameters."
        )
    return [gradients[value] for value in wrt]


class _Reverse:
    """One reverse walk over the nodes that lie between `wrt` and the loss."""

    def __init__(self, graph: Graph, loss: Value, wrt: Sequence[Value]) -> None:
        self.graph, self.loss = graph, loss
        self.forward = list(graph.nodes)
        self.needed = self._dependents(wrt)
        self.gradients: dict[Value, Value] = {}
        self.again: dict[Value, Value] = {}  # value of a recomputed segment -> its second computation
        self.first_of: dict[int, Node] = {}  # segment -> the node of it that the walk comes to last
        for node in reversed(self.forward):
            if node.segment is not None:
                self.first_of[node.segment] = node
        self.recomputed: set[int] = set()
        self.wrt = set(wrt)
        self.keep = {loss, *wrt, *graph.outputs.values()}

    def _dependents(self, wrt: Sequence[Value]) -> set[Value]:
        """Floating-point values that depend on `wrt`."""
        reached = set(wrt)
        for node in self.forward:
            if any(value in reached for value in node.values):
                reached.update(output for output in node.outputs if output.spec.dtype.is_floating)
        return reached

    def run(self) -> dict[Value, Value]:
        if self.loss in self.needed:
            with self.graph.host() if self.loss.on_host else nullcontext():
                self.gradients[self.loss] = full(self.graph, self.loss.spec, 1.0)
        for node in reversed(self.forward):
            incoming = [self._take(output) for output in node.outputs]
            recorded = len(self.graph.nodes)
            if any(gradient is not None for gradient in incoming) and self._differentiate(node):
                self._apply(node, incoming)
            self._release(node, incoming, self.graph.nodes[recorded:])
        return self.gradients

    def _take(self, output: Value) -> Value | None:
        """The gradient of a value all of whose readers have been passed."""
        return self.gradients.get(output) if output in self.wrt else self.gradients.pop(output, None)

    def _release(self, node: Node, incoming: Sequence[Value | None], recorded: Sequence[Node]) -> None:
        """Whoever reads this node's outputs came later in forward, so its backward has been recorded by now."""
        if self.graph.on_release is None:
            return
        done = dict.fromkeys((*node.outputs, *self._passed_copies(node)))
        done.update(dict.fromkeys(gradient for gradient in incoming if gradient is not None))
        for part in recorded:
            done.update(dict.fromkeys(value for value in (*part.values, *part.outputs) if _made_by_backward(value)))
        still_read = {*self.gradients.values(), *self.keep, *self.again.values()}
        self.graph.release([value for value in done if value not in still_read])

    def _passed_copies(self, node: Node) -> list[Value]:
        """The second computation of a segment, once the walk has left it."""
        if node.segment is None or self.first_of[node.segment] is not node:
            return []
        originals = [output for part in self.forward if part.segment == node.segment for output in part.outputs]
        return [self.again.pop(output) for output in originals if output in self.again]

    def _differentiate(self, node: Node) -> bool:
        return any(value in self.needed for value in node.values)

    def _apply(self, node: Node, incoming: list[Value | None]) -> None:
        source = self._computed_again(node)
        with self.graph.scope(node.scope) if node.scope else self.graph.scope(node.op.name):
            contributions = self._contributions(node, source, incoming)
        for value, contribution in zip(node.inputs, contributions, strict=True):
            if value is None or contribution is None or value not in self.needed:
                continue
            if contribution.spec != value.spec:
                raise GraphError(
                    f"{node.op.name}: gradient {contribution.spec} for an input {value.spec}; they must be equal."
                )
            earlier = self.gradients.get(value)
            self.gradients[value] = contribution if earlier is None else add(earlier, contribution)

    def _contributions(self, node: Node, source: Node, incoming: list[Value | None]) -> Sequence[Value | None]:
        """Gradients of the node's inputs. What would only serve that of a frozen parameter is not recorded."""
        graph = self.graph
        if not any(value.kind.is_state and value not in self.needed for value in node.values):
            return node.op.vjp(source, *incoming)
        start, on_record, graph.on_record = len(graph.nodes), graph.on_record, None
        try:
            contributions = node.op.vjp(source, *incoming)
        finally:
            graph.on_record = on_record
        wanted = {gradient for value, gradient in zip(node.inputs, contributions, strict=True) if value in self.needed}
        kept: list[Node] = []
        for recorded in reversed(graph.nodes[start:]):
            if any(output in wanted for output in recorded.outputs):
                kept.insert(0, recorded)
                wanted.update(recorded.values)
        graph.nodes[start:] = kept
        if graph.crossed:
            present = set(graph.nodes)
            graph.crossed = {value: twin for value, twin in graph.crossed.items() if twin.producer in present}
        for recorded in kept:
            if on_record is not None:
                on_record(recorded)
        return [
            gradient if value in self.needed else None
            for value, gradient in zip(node.inputs, contributions, strict=True)
        ]

    def _computed_again(self, node: Node) -> Node:
        """The node itself, or its second recording where it belongs to a recomputed segment."""
        if node.segment is None:
            return node
        if node.segment not in self.recomputed:
            self.recomputed.add(node.segment)
            for original in self.forward:
                if original.segment == node.segment:
                    self._record_again(original)
        again = [self.again.get(output, output) for output in node.outputs]
        inputs = tuple(None if value is None else self.again.get(value, value) for value in node.inputs)
        return Node(node.op, inputs, node.attributes, tuple(again), node.scope)

    def _record_again(self, node: Node) -> None:
        inputs = tuple(None if value is None else self.again.get(value, value) for value in node.inputs)
        with self.graph.copying(1), self.graph.scope(node.scope):
            copied = self.graph.append(node.op, inputs, node.attributes)
        self.again.update(zip(node.outputs, copied.outputs, strict=True))


def _made_by_backward(value: Value) -> bool:
    return value.producer is not None and value.producer.stage is Stage.BACKWARD
