"""Lookup of rows by id, and its gradient; lookup of sequences in a stream of ids."""

from __future__ import annotations

from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Node, Value, cases, composite, primitive, require
from ttrain.ops.elementwise import free
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul

_ROWS = "dy [..., C], ids int64 [...]"


def _one_hot_in_torch(ids: Any, count: int, dtype: DType) -> Any:
    return (ids[..., None] == ids.new_tensor(range(count))).double()


@primitive("ids int64 [...]", flops=free, reference=_one_hot_in_torch)
def one_hot(ids: Value, count: int, dtype: DType) -> TensorSpec:
    """y[..., v] = 1 where ids[...] is v, else 0; a row of zeros where it is below zero: ids int64 [...] -> [..., V]."""
    return TensorSpec((*ids.shape, count), dtype)


@composite(_ROWS, outputs=("dweight",), differentiable=False, flops=lambda node: node.input("dy").spec.size)
def embedding_grad(dy: Value, ids: Value, vocabulary: int) -> Value:
    """dweight[v, :] = the sum of dy over the places whose id is v, accumulated in fp32 at least: dy [..., C]."""
    hot = one_hot(reshape(ids, (ids.spec.size,)), vocabulary, dy.spec.dtype)
    return matmul(hot, reshape(dy, (ids.spec.size, dy.shape[-1])), transpose_a=True)


@composite(
    "ids int64 [...], weight [V, C]",
    flops=free,
    nbytes=lambda node: node.input("ids").spec.nbytes + 2 * node.outputs[0].spec.nbytes,
    vjp=lambda node, dy: [None, embedding_grad(dy, node.input("ids"), node.input("weight").shape[0])],
)
def embedding(ids: Value, weight: Value) -> Value:
    """y[..., :] = weight[ids[...], :]: ids int64 [...], weight [V, C] -> y [..., C]."""
    hot = one_hot(reshape(ids, (ids.spec.size,)), weight.shape[0], weight.spec.dtype)
    return reshape(matmul(hot, weight), (*ids.shape, weight.shape[1]))


cases(embedding, Case())


@composite(
    "base [V, C], " + _ROWS,
    family="fused",
    outputs=("sum",),
    differentiable=False,
    flops=lambda node: node.input("dy").spec.size,
)
def add_embedding_grad(base: Value, dy: Value, ids: Value) -> Value:
    """sum = base + embedding_grad(dy, ids), rounded once. Over its base it touches only the rows that occur."""
    return base + embedding_grad(dy, ids, base.shape[0])


cases(add_embedding_grad, Case())


def _windows_in_torch(starts: Any, stream: Any, length: int) -> tuple[Any, Any]:
    windows = stream.unfold(0, length + 1, 1)[starts].long()
    return windows[:, :-1], windows[:, 1:]


def _windows_nbytes(node: Node) -> int:
    """Return the bytes read and written. Of the stream only the looked-up tokens count."""
    (starts, stream), tokens = node.values, node.outputs[0].spec
    looked_up = TensorSpec((starts.shape[0], node.attributes["length"] + 1), stream.spec.dtype)
    return starts.spec.nbytes + looked_up.nbytes + 2 * tokens.nbytes


@primitive(
    "starts int64 [B], stream any [N]",
    outputs=("tokens", "targets"),
    flops=free,
    nbytes=_windows_nbytes,
    reference=_windows_in_torch,
)
def token_windows(starts: Value, stream: Value, length: int) -> list[TensorSpec]:
    """Sequences of `length` ids of a stream, and as targets the ids that follow each of them: both int64 [B, length].

    tokens[b, t] = stream[starts[b] + t], targets[b, t] = stream[starts[b] + t + 1]: stream of any integers [N], starts
    int64 [B], each from 0 to N - length - 1.
    """
    fits = not stream.spec.dtype.is_floating and 0 < length < stream.shape[0]
    require(fits, "token_windows", f"{stream.spec} for sequences of {length}", "integers, at least one more than that")
    return [TensorSpec((starts.shape[0], length), DType.INT64)] * 2


for _starts, _size, _length in (([0, 32, 11], 40, 7), ([5], 7, 1), ([2, 2, 0, 1], 36, 33)):
    _shapes = ((len(_starts),), (_size,))
    cases(token_windows, Case(_shapes, {"length": _length}, integers={"stream": 50}, values={"starts": _starts}))
