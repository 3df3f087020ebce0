"""Lookup of rows by id, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Op, Value
from ttrain.graph.op import declare, op
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul


@declare
class Embedding(Op):
    """y[..., :] = weight[ids[...], :]: ids int64 [...], weight [V, C] -> y [..., C]."""

    name = "embedding"
    family = "embedding"
    inputs = ("ids", "weight")

    def infer(self, ids: TensorSpec, weight: TensorSpec) -> TensorSpec:
        self.require(ids.dtype is DType.INT64, f"ids {ids}", "int64 ids")
        self.require(weight.rank == 2, f"weight {weight}", "[vocabulary, width]")
        return weight.with_shape(*ids.shape, weight.shape[1])

    def flops(self, node: Node) -> int:
        return 0

    def nbytes(self, node: Node) -> int:
        return node.input("ids").spec.nbytes + 2 * node.outputs[0].spec.nbytes

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        vocabulary = node.input("weight").shape[0]
        return [None, embedding_grad(dy, node.input("ids"), vocabulary)]

    def reference(self, ids: Any, weight: Any) -> Any:
        return weight[ids]

    def cases(self) -> Sequence[Case]:
        return [
            Case(((3, 5), (7, 4)), integers={"ids": 7}),
            Case(((33,), (65, 12)), integers={"ids": 65}),
            Case(((2, 1), (1, 3)), integers={"ids": 1}),
        ]


@declare
class OneHot(Op):
    """y[..., v] = 1 where ids[...] is v, else 0; a row of zeros where it is below zero: ids int64 [...] -> [..., V]."""

    name = "one_hot"
    family = "embedding"
    inputs = ("ids",)
    differentiable = False

    def infer(self, ids: TensorSpec, count: int, dtype: DType) -> TensorSpec:
        self.require(ids.dtype is DType.INT64, f"ids {ids}", "int64 ids")
        return TensorSpec((*ids.shape, count), dtype)

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, ids: Any, count: int, dtype: DType) -> Any:
        import torch

        return torch.nn.functional.one_hot(ids.clamp(min=0), count).double() * (ids >= 0)[..., None]

    def cases(self) -> Sequence[Case]:
        return [
            Case((ids,), {"count": count, "dtype": DType.FP32}, {"ids": count}, holes=("ids",))
            for ids, count in (((3, 5), 7), ((33,), 65), ((2,), 1))
        ]


@composite(outputs=("dweight",), differentiable=False, flops=lambda node: node.input("dy").spec.size)
def embedding_grad(dy: Value, ids: Value, vocabulary: int) -> Value:
    """dweight[v, :] = the sum of dy over the places whose id is v, accumulated in fp32 at least: dy [..., C]."""
    require(dy.shape[:-1] == ids.shape, "embedding_grad", f"dy {dy.spec} and ids {ids.spec}", "equal leading axes")
    hot = one_hot(reshape(ids, (ids.spec.size,)), vocabulary, dy.spec.dtype)
    return matmul(hot, reshape(dy, (ids.spec.size, dy.shape[-1])), transpose_a=True)


cases(
    embedding_grad,
    Case(((3, 5, 4), (3, 5)), {"vocabulary": 7}, integers={"ids": 7}),
    Case(((33, 12), (33,)), {"vocabulary": 65}, integers={"ids": 65}),
    Case(((6, 3), (6,)), {"vocabulary": 1}, integers={"ids": 1}),
    Case(((5, 3), (5,)), {"vocabulary": 33}, integers={"ids": 3}),
)


def embedding(ids: Value, weight: Value) -> Value:
    """Rows of weight [V, C] by ids [...] -> [..., C]."""
    return op("embedding").record(ids, weight)


def one_hot(ids: Value, count: int, dtype: DType) -> Value:
    """Rows [..., count] with a one at each id; zeros where it is below zero."""
    return op("one_hot").record(ids, count=count, dtype=dtype)
