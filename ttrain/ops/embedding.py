"""Lookup of rows by id, and its gradient."""

from __future__ import annotations

from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.composite import cases, composite, primitive
from ttrain.graph.graph import Case, Value
from ttrain.ops.common import free
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
