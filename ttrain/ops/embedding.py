"""Lookup of rows by id, and its gradient."""

from __future__ import annotations

from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.composite import cases, composite, primitive, require
from ttrain.graph.graph import Case, Value
from ttrain.ops.common import free
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul


def _one_hot_in_torch(ids: Any, count: int, dtype: DType) -> Any:
    import torch

    return torch.nn.functional.one_hot(ids.clamp(min=0), count).double() * (ids >= 0)[..., None]


@primitive(flops=free, reference=_one_hot_in_torch)
def one_hot(ids: Value, count: int, dtype: DType) -> TensorSpec:
    """y[..., v] = 1 where ids[...] is v, else 0; a row of zeros where it is below zero: ids int64 [...] -> [..., V]."""
    require(ids.spec.dtype is DType.INT64, "one_hot", f"ids {ids.spec}", "int64 ids")
    return TensorSpec((*ids.shape, count), dtype)


@composite(outputs=("dweight",), differentiable=False, flops=lambda node: node.input("dy").spec.size)
def embedding_grad(dy: Value, ids: Value, vocabulary: int) -> Value:
    """dweight[v, :] = the sum of dy over the places whose id is v, accumulated in fp32 at least: dy [..., C]."""
    require(dy.shape[:-1] == ids.shape, "embedding_grad", f"dy {dy.spec} and ids {ids.spec}", "equal leading axes")
    hot = one_hot(reshape(ids, (ids.spec.size,)), vocabulary, dy.spec.dtype)
    return matmul(hot, reshape(dy, (ids.spec.size, dy.shape[-1])), transpose_a=True)


@composite(
    flops=free,
    nbytes=lambda node: node.input("ids").spec.nbytes + 2 * node.outputs[0].spec.nbytes,
    vjp=lambda node, dy: [None, embedding_grad(dy, node.input("ids"), node.input("weight").shape[0])],
)
def embedding(ids: Value, weight: Value) -> Value:
    """y[..., :] = weight[ids[...], :]: ids int64 [...], weight [V, C] -> y [..., C]."""
    require(weight.spec.rank == 2, "embedding", f"weight {weight.spec}", "[vocabulary, width]")
    hot = one_hot(reshape(ids, (ids.spec.size,)), weight.shape[0], weight.spec.dtype)
    return reshape(matmul(hot, weight), (*ids.shape, weight.shape[1]))


cases(
    embedding,
    Case(((3, 5), (7, 4)), integers={"ids": 7}),
    Case(((33,), (65, 12)), integers={"ids": 65}),
    Case(((2, 1), (1, 3)), integers={"ids": 1}),
)


@composite(family="fused", outputs=("sum",), differentiable=False, flops=lambda node: node.input("dy").spec.size)
def add_embedding_grad(base: Value, dy: Value, ids: Value) -> Value:
    """sum = base + embedding_grad(dy, ids), rounded once. Over its base it touches only the rows that occur."""
    name, width = "add_embedding_grad", dy.shape[-1]
    require(dy.shape[:-1] == ids.shape, name, f"dy {dy.spec} and ids {ids.spec}", "equal leading axes")
    fits = base.spec.rank == 2 and base.shape[1] == width and base.spec.dtype is dy.spec.dtype
    require(fits, name, f"base {base.spec}", f"{dy.spec.dtype}[vocabulary, {width}]")
    return base + embedding_grad(dy, ids, base.shape[0])


cases(
    add_embedding_grad,
    Case(((7, 4), (3, 5, 4), (3, 5)), integers={"ids": 7}),
    Case(((65, 40), (33, 40), (33,)), integers={"ids": 65}),
)
