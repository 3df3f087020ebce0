"""Passes that join neighbouring nodes into one fused op: fewer launches, fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from ttrain.core.spec import DType
from ttrain.device.base import of_side
from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.rewrite import Rewriter, uses


class _Matcher:
    """What the patterns ask: who reads a value, whether anybody else does, and whether it could be read later."""

    def __init__(self, graph: Graph) -> None:
        self.readers = uses(graph)
        self.kept = set(graph.outputs.values())
        self.roots = roots_of(graph)
        self.times = {node: time for time, node in enumerate(graph.nodes)}
        self.writes: dict[Value, list[int]] = {}
        for node, time in self.times.items():
            for value in overwritten(node):
                self.writes.setdefault(self.roots[value], []).append(time)

    def source(self, value: Value, reader: Node, *names: str) -> Node | None:
        """The node of one of these ops that makes a value which one reader alone reads, and nothing else keeps."""
        source = value.producer
        alone = self.readers.get(value) == [reader] and value not in self.kept
        return source if source is not None and source.op.name in names and alone else None

    def unchanged(self, value: Value, start: Node, end: Node) -> bool:
        """Whether no node between the two overwrites the buffer of a value."""
        times = self.writes.get(self.roots[value], [])
        return not any(self.times[start] < time < self.times[end] for time in times)

    def unread(self, values: Sequence[Value]) -> bool:
        return not any(self.readers.get(value) or value in self.kept for value in values)


class Match(NamedTuple):
    """One place where a pattern applies: which node disappears and what takes its reader's place."""

    absorbed: Node
    name: str
    inputs: tuple[Value | None, ...]
    attributes: dict[str, Any]
    outputs: list[Value]  # the old values that the fused op's outputs stand for, in order


Pattern = Callable[[_Matcher, Node], Match | None]


def fuse(graph: Graph, kernels: Container[str]) -> Graph:
    """Join matmul + bias -> linear, linear + activation, residual sum + norm and their gradients, a sum + the
    gradient of a lookup, and head + cross-entropy, where the device has a kernel for what they become.

    A pattern applies only where no node outside it reads what would disappear.
    """
    for pattern, names in _PATTERNS.items():
        graph = _apply(graph, pattern, names, kernels)
    return graph


def _apply(graph: Graph, pattern: Pattern, names: Container[str], kernels: Container[str]) -> Graph:
    matcher = _Matcher(graph)
    replaced: dict[Node, Match] = {}
    absorbed: set[Node] = set()
    for node in graph.nodes:
        match = pattern(matcher, node) if node.op.name in names else None
        if match is None or match.absorbed in absorbed or match.absorbed.on_host is not node.on_host:
            continue
        if match.name not in of_side(kernels, node.on_host):
            continue
        if all(matcher.unchanged(value, match.absorbed, node) for value in match.absorbed.values):
            absorbed.add(match.absorbed)
            replaced[node] = match
    if not replaced:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node in replaced:
            match = replaced[node]
            inputs = tuple(None if value is None else rewriter.map[value] for value in match.inputs)
            with rewriter.at(node):
                fused = rewriter.new.append(op(match.name), inputs, match.attributes)
            rewriter.replace(match.outputs, fused.outputs)
        elif node not in absorbed:
            rewriter.copy(node)
    return rewriter.finish()


def _bias(matcher: _Matcher, node: Node) -> Match | None:
    """add(matmul(x, W^T), b) or add(linear(x, W), b) with b [O] -> linear(x, W, b)."""
    product, bias = node.values
    source = matcher.source(product, node, "linear", "matmul")
    if source is None or bias.spec != product.spec.with_shape(*product.shape[-1:]):
        return None
    if source.op.name == "linear":
        fits = source.inputs[2] is None and source.attributes.get("activation") is None
    else:
        fits = source.attributes == {"transpose_a": False, "transpose_b": True} and product.spec.rank == 2
    return Match(source, "linear", (*source.inputs[:2], bias), {}, list(node.outputs)) if fits else None


def _activation(matcher: _Matcher, node: Node) -> Match | None:
    """activation(linear(x, W, b)) -> linear with that activation, where backward does not read the sum itself."""
    source = matcher.source(node.values[0], node, "linear")
    if source is None or source.attributes.get("activation") is not None:
        return None
    name = "gelu_tanh" if node.attributes.get("approximate") == "tanh" else node.op.name
    return Match(source, "linear", source.inputs, {"activation": name}, list(node.outputs))


def _residual_norm(matcher: _Matcher, node: Node) -> Match | None:
    """norm(add(x, branch)) -> add_norm, of layers or of RMS; the sum stays readable."""
    total = node.input("x")
    source = total.producer
    if source is None or source.op.name != "add" or source.stage is not node.stage or source.copy != node.copy:
        return None
    x, branch = source.input("x"), source.input("y")
    if x.spec != branch.spec or total in node.inputs[1:] or matcher.readers[total][0] is not node:
        return None
    inputs = (x, branch, *node.inputs[1:])
    return Match(source, f"add_{node.op.name}", inputs, dict(node.attributes), [total, *node.outputs])


def _residual_norm_grad(matcher: _Matcher, node: Node) -> Match | None:
    """add(gradient beside the norm, the norm's dx) -> the norm's gradient that adds it."""
    for source, beside in _summed(matcher, node, "layer_norm_grad", "rms_norm_grad"):
        if source.inputs[-1] is not None:
            continue
        start, end = matcher.times[source], matcher.times[node]
        readers = [reader for output in source.outputs[1:] for reader in matcher.readers.get(output, [])]
        if not any(start < matcher.times[reader] < end for reader in readers):
            outputs = [*node.outputs, *source.outputs[1:]]
            return Match(source, source.op.name, (*source.inputs[:-1], beside), dict(source.attributes), outputs)
    return None


def _lookup_grad(matcher: _Matcher, node: Node) -> Match | None:
    """add(base, embedding_grad(dy, ids)) -> add_embedding_grad: the rows that do not occur are left alone."""
    for source, base in _summed(matcher, node, "embedding_grad"):
        if base.spec.dtype.wide is DType.FP32:
            return Match(source, "add_embedding_grad", (base, *source.inputs), {}, list(node.outputs))
    return None


def _summed(matcher: _Matcher, node: Node, *names: str) -> Iterator[tuple[Node, Value]]:
    """Nodes of these ops whose first output a sum of equal specs alone reads, each with what it is added to."""
    for inside, beside in (node.values[::-1], node.values):
        source = matcher.source(inside, node, *names)
        if source is not None and inside.index == 0 and inside.spec == beside.spec:
            yield source, beside


def _head_cross_entropy(matcher: _Matcher, node: Node) -> Match | None:
    """cross_entropy(linear(hidden, head)) -> head_cross_entropy in evaluation, where nothing reads the logits."""
    logits = node.input("logits")
    source = matcher.source(logits, node, "linear")
    if source is None or not matcher.unread(node.outputs[1:]):
        return None
    hidden, head, bias = source.inputs
    if source.attributes.get("activation") is not None or hidden is None or hidden.spec.rank != 2:
        return None
    inputs = (hidden, head, node.input("targets"), node.input("weight"), bias)
    attributes = {"smoothing": 0.0, "live": logits.shape[1], "gradients": False}
    return Match(source, "head_cross_entropy", inputs, attributes, [node.outputs[0]])


_PATTERNS: dict[Pattern, tuple[str, ...]] = {  # what may disappear into a node of these ops, in this order
    _bias: ("add",),
    _activation: ("relu", "tanh", "gelu"),
    _residual_norm: ("layer_norm", "rms_norm"),
    _residual_norm_grad: ("add",),
    _lookup_grad: ("add",),
    _head_cross_entropy: ("cross_entropy",),
}
