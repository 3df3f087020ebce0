"""Lookup of rows by id, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op


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
        return [None, op("embedding_grad").record(dy, node.input("ids"), vocabulary=vocabulary)]

    def reference(self, ids: Any, weight: Any) -> Any:
        return weight[ids]

    def cases(self) -> Sequence[Case]:
        return [
            Case(((3, 5), (7, 4)), integers={"ids": 7}),
            Case(((33,), (65, 12)), integers={"ids": 65}),
            Case(((2, 1), (1, 3)), integers={"ids": 1}),
        ]


@declare
class EmbeddingGrad(Op):
    """dweight[v, :] = the sum of dy over the places whose id is v, accumulated in fp32 at least: dy [..., C]."""

    name = "embedding_grad"
    family = "embedding"
    inputs = ("dy", "ids")
    outputs = ("dweight",)
    differentiable = False

    def infer(self, dy: TensorSpec, ids: TensorSpec, vocabulary: int) -> TensorSpec:
        self.require(dy.shape[:-1] == ids.shape, f"dy {dy} and ids {ids}", "equal leading axes")
        return dy.with_shape(vocabulary, dy.shape[-1])

    def flops(self, node: Node) -> int:
        return node.input("dy").spec.size

    def reference(self, dy: Any, ids: Any, vocabulary: int) -> Any:
        import torch

        one_hot = torch.nn.functional.one_hot(ids.reshape(-1), vocabulary).to(dy.dtype)
        return one_hot.T @ dy.reshape(-1, dy.shape[-1])

    def cases(self) -> Sequence[Case]:
        return [
            Case(((3, 5, 4), (3, 5)), {"vocabulary": 7}, integers={"ids": 7}),
            Case(((33, 12), (33,)), {"vocabulary": 65}, integers={"ids": 65}),
            Case(((6, 3), (6,)), {"vocabulary": 1}, integers={"ids": 1}),
            Case(((5, 3), (5,)), {"vocabulary": 33}, integers={"ids": 3}),
        ]


def embedding(ids: Value, weight: Value) -> Value:
    """Rows of weight [V, C] by ids [...] -> [..., C]."""
    return op("embedding").record(ids, weight)
