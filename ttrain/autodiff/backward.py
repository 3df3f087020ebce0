"""Reverse-mode differentiation of a recorded graph: appends the backward nodes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttrain.core.errors import GraphError
from ttrain.graph import Composite, Graph, Node, Stage, Value
from ttrain.ops import add, full


def backward(loss: Value, wrt: Sequence[Value]) -> list[Value]:
    """Record the gradients of a scalar loss with respect to `wrt`, in that order.

    The first contribution to a gradient is the gradient; later ones are added. Nodes of a recomputed segment are
    recorded a second time, right before backward needs them. No gradient goes through state that the step writes, such
    as a running mean. Raises GraphError naming every value of `wrt` that the
    loss does not depend on: such a parameter would silently never train.
    """
    graph = loss.graph
    if loss.spec.size != 1:
        raise GraphError(f"backward: got a loss of {loss.spec}, expected a scalar. Reduce it first.")
    with graph.stage(Stage.BACKWARD):
        with graph.within(gradient_of=loss.producer):
            one = full(graph, loss.spec, 1.0)
        gradients = _Reverse(graph, list(graph.nodes), wrt).run({loss: one})
    missing = [value.name or repr(value) for value in wrt if value not in gradients]
    if missing:
        told = f"no gradient reaches {', '.join(missing)}: the loss does not depend on it"
        raise GraphError(f"{told}. Use it in the forward pass or leave it out of the trained parameters.")
    return [gradients[value] for value in wrt]


class _Reverse:
    """One reverse walk over nodes that lie between `wrt` and what the gradients are known of."""

    def __init__(self, graph: Graph, forward: Sequence[Node], wrt: Sequence[Value]) -> None:
        self.graph, self.forward, self.wrt = graph, forward, set(wrt)
        self.needed = self._dependents(wrt)
        self.gradients: dict[Value, Value] = {}
        self.again: dict[Node, Node] = {}  # node of a recomputed segment -> its second recording
        self.values: dict[Value | None, Value] = {}  # the same of what it makes

    def _dependents(self, wrt: Sequence[Value]) -> set[Value]:
        """Floating-point values that depend on `wrt`. What was written to state is constant from there on."""
        reached = set(wrt)
        for node in self.forward:
            if any(value in reached for value in node.values) and not node.overwritten:
                reached.update(output for output in node.outputs if output.spec.dtype.is_floating)
        return reached

    def run(self, known: Mapping[Value, Value]) -> dict[Value, Value]:
        """Gradients of `wrt`, as far as they are reached, from those of later values."""
        self.gradients = {value: gradient for value, gradient in known.items() if value in self.needed}
        before, self.graph.needed = self.graph.needed, self.needed
        for node in reversed(self.forward):
            incoming = [self._take(output) for output in node.outputs]
            reached = any(gradient is not None for gradient in incoming)
            if reached and any(value in self.needed for value in node.values):
                self._apply(node, incoming)
        self.graph.needed = before
        return self.gradients

    def _take(self, output: Value) -> Value | None:
        """The gradient of a value all of whose readers have been passed."""
        return self.gradients.get(output) if output in self.wrt else self.gradients.pop(output, None)

    def _apply(self, node: Node, incoming: list[Value | None]) -> None:
        source = self._computed_again(node)
        with self.graph.scope(node.scope or node.op.name), self.graph.within(gradient_of=node):
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
        """Gradients of the node's inputs: by the op's own rule, or by going through its body."""
        if not (isinstance(node.op, Composite) and node.op.goes_through_body):
            return node.op.vjp(source, *incoming)
        start = len(self.graph.nodes)
        outputs = node.op.decompose(source, source.inputs)
        known = {value: given for value, given in zip(outputs, incoming, strict=True) if given is not None}
        pairs = zip(node.inputs, source.inputs, strict=True)
        wrt = [own for value, own in pairs if own is not None and value in self.needed]
        gradients = _Reverse(self.graph, self.graph.nodes[start:], wrt).run(known)
        return [None if value is None else gradients.pop(value, None) for value in source.inputs]

    def _computed_again(self, node: Node) -> Node:
        """The node itself, or its second recording where it belongs to a recomputed segment."""
        if node.segment is None:
            return node
        if node not in self.again:
            for original in self.forward:
                if original.segment == node.segment and not original.overwritten:  # state changes once
                    self.again[original] = self._record_again(original)
        return self.again[node]

    def _record_again(self, node: Node) -> Node:
        inputs = tuple(self.values.get(value, value) for value in node.inputs)
        with self.graph.within(copy=1), self.graph.scope(node.scope):
            copied = self.graph.append(node.op, inputs, node.attributes)
        copied.copy_of = node
        self.values.update(zip(node.outputs, copied.outputs, strict=True))
        return copied
