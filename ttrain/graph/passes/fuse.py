"""Join neighbouring nodes into one fused op: fewer launches, fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from ttrain.core.errors import ShapeError
from ttrain.core.spec import DType
from ttrain.device.base import of_side
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.rewrite import Rewriter, uses

Inputs = tuple[Value | None, ...]


class Joined(NamedTuple):
    """The fused node that takes the place of two."""

    name: str
    inputs: Inputs
    attributes: Mapping[str, Any]
    outputs: Sequence[Value]  # the old values that the fused op's outputs stand for, in order


# (a node, the node that makes one of its inputs, its other inputs) -> what they become, unless they don't fit
Rule = Callable[[Node, Node, Inputs], Joined | None]


def fuse(graph: Graph, kernels: Container[str]) -> Graph:
    """Join nodes for which the device has one kernel.

    matmul + bias become linear; linear + activation, residual sum + norm and their gradients, a sum + the gradient of a
    lookup, and head + cross-entropy become one node each.

    Two nodes are joined only where no node outside them reads what would disappear.
    """
    while found := _Matcher(graph, kernels).matches():
        absorbed = {source for source, _ in found.values()}
        rewriter = Rewriter(graph)
        for node in graph.nodes:
            if node in found:
                _, joined = found[node]
                fused = Node(op(joined.name), joined.inputs, joined.attributes)
                rewriter.replace(joined.outputs, rewriter.record(node, fused))
            elif node not in absorbed:
                rewriter.copy(node)
        graph = rewriter.finish()
    return graph


class _Matcher:
    """Finds pairs of nodes that may become one: who reads a value, and whether it could be read later."""

    def __init__(self, graph: Graph, kernels: Container[str]) -> None:
        self.graph, self.kernels = graph, kernels
        self.readers, self.kept, self.roots = uses(graph), set(graph.outputs.values()), graph.roots()
        self.times = {node: time for time, node in enumerate(graph.nodes)}
        self.writes: dict[Value, list[int]] = {}
        for node, time in self.times.items():
            for value in node.overwritten:
                self.writes.setdefault(self.roots[value], []).append(time)

    def matches(self) -> dict[Node, tuple[Node, Joined]]:
        """Find pairs: the later node, the earlier one and what they become. No node is part of two pairs."""
        found: dict[Node, tuple[Node, Joined]] = {}
        taken: set[Node] = set()
        for node in self.graph.nodes:
            for position in (1, 0) if node.op.name == "add" else (0,):  # either term of a sum may be absorbed
                value = node.inputs[position] if node.inputs else None
                source = None if value is None else value.producer
                rule = None if source is None else _RULES.get((node.op.name, source.op.name))
                if value is None or source is None or rule is None or value.index or source in taken:
                    continue
                joined = rule(node, source, (*node.inputs[:position], *node.inputs[position + 1 :]))
                if joined is not None and self._fits(node, source, joined):
                    found[node] = source, joined
                    taken |= {node, source}
                    break
        return found

    def _fits(self, node: Node, source: Node, joined: Joined) -> bool:
        """True if a kernel can run both where the later one is, and all others still find what they read."""
        same = source.stage is node.stage and source.copy == node.copy and source.on_host is node.on_host
        made = {*source.outputs, *node.outputs}
        if not same or joined.name not in of_side(self.kernels, node.on_host) or made & {*joined.inputs}:
            return False
        start, end = self.times[source], self.times[node]
        for value in made:  # is read by others once the fused node has run, or not at all if it is no output of that
            others = [self.times[reader] for reader in self.readers.get(value, []) if reader is not node]
            if any(time < end for time in others) if value in joined.outputs else others or value in self.kept:
                return False
        if any(start < time < end for value in source.values for time in self.writes.get(self.roots[value], [])):
            return False
        try:
            specs = [None if value is None else value.spec for value in joined.inputs]
            return op(joined.name).infer_outputs(specs, joined.attributes) == [value.spec for value in joined.outputs]
        except ShapeError:  # such as a sum of another shape, which is no bias
            return False


def _bias(node: Node, source: Node, rest: Inputs) -> Joined | None:
    """add(matmul(x, W^T), b) or add(linear(x, W), b) -> linear(x, W, b)."""
    plain = {"transpose_a": False, "transpose_b": True} if source.op.name == "matmul" else {}
    fits = source.attributes == plain and len(source.values) == 2
    return Joined("linear", (*source.values, *rest), {}, node.outputs) if fits else None


def _activation(node: Node, source: Node, rest: Inputs) -> Joined | None:
    """activation(linear(x, W, b)) -> linear with that activation, where backward does not read the sum itself."""
    name = "gelu_tanh" if node.attributes.get("approximate") == "tanh" else node.op.name
    return None if source.attributes else Joined("linear", source.inputs, {"activation": name}, node.outputs)


def _residual_norm(node: Node, source: Node, rest: Inputs) -> Joined:
    """norm(add(x, branch)) -> add_norm, of layers or of RMS; the sum stays readable."""
    return Joined(f"add_{node.op.name}", (*source.inputs, *rest), node.attributes, (*source.outputs, *node.outputs))


def _residual_norm_grad(node: Node, source: Node, rest: Inputs) -> Joined | None:
    """add(gradient beside the norm, the norm's dx) -> the norm's gradient that adds it."""
    inputs, outputs = (*source.inputs[:-1], *rest), (*node.outputs, *source.outputs[1:])
    return None if source.inputs[-1] else Joined(source.op.name, inputs, source.attributes, outputs)


def _lookup_grad(node: Node, source: Node, rest: Inputs) -> Joined | None:
    """add(base, embedding_grad(dy, ids)) -> add_embedding_grad: the rows that do not occur are left alone."""
    fits = node.outputs[0].spec.dtype.accumulation is DType.FP32  # or bf16, as its kernels are
    return Joined("add_embedding_grad", (*rest, *source.inputs), {}, node.outputs) if fits else None


def _head_cross_entropy(node: Node, source: Node, rest: Inputs) -> Joined | None:
    """cross_entropy(linear(hidden, head)) -> head_cross_entropy in evaluation, where nothing reads the logits."""
    hidden, head, bias = source.inputs
    attributes = {"smoothing": 0.0, "live": source.outputs[0].shape[-1], "gradients": False}
    inputs = (hidden, head, *rest, bias)
    return None if source.attributes else Joined("head_cross_entropy", inputs, attributes, node.outputs[:1])


_RULES: dict[tuple[str, str], Rule] = {
    **dict.fromkeys((("add", "linear"), ("add", "matmul")), _bias),
    **dict.fromkeys(((name, "linear") for name in ("relu", "tanh", "gelu")), _activation),
    **dict.fromkeys(((name, "add") for name in ("layer_norm", "rms_norm")), _residual_norm),
    **dict.fromkeys((("add", name) for name in ("layer_norm_grad", "rms_norm_grad")), _residual_norm_grad),
    ("add", "embedding_grad"): _lookup_grad,
    ("cross_entropy", "linear"): _head_cross_entropy,
}
