"""Products of every head with one matrix, and rows picked out of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul


@declare
class HeadMatmul(Op):
    """y_h = x_h M for every head h, or x_h M^T with `transpose`: x [B, T, H*D], M [D, E] -> y [B, T, H*E]."""

    name = "head_matmul"
    family = "matmul"
    inputs = ("x", "matrix")

    def infer(self, x: TensorSpec, matrix: TensorSpec, heads: int, transpose: bool) -> TensorSpec:
        self.require(x.rank == 3 and matrix.rank == 2, f"{x} and {matrix}", "[batch, time, features] and a matrix")
        self.require(x.dtype is matrix.dtype, f"{x} and {matrix}", "equal dtypes", "Cast one of them.")
        inner, outer = matrix.shape[::-1] if transpose else matrix.shape
        self.require(x.shape[2] == heads * inner, f"{x.shape[2]} features", f"{heads} heads of {inner}")
        return x.with_shape(*x.shape[:2], heads * outer)

    def flops(self, node: Node) -> int:
        return 2 * node.input("x").spec.size * node.outputs[0].shape[2] // node.attributes["heads"]

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        x, matrix, heads = node.input("x"), node.input("matrix"), node.attributes["heads"]
        transpose = node.attributes["transpose"]
        pair = (dy, x) if transpose else (x, dy)
        dmatrix = op("head_product").record(*pair, heads=heads)
        return [head_matmul(dy, matrix, heads, transpose=not transpose), dmatrix]

    def reference(self, x: Any, matrix: Any, heads: int, transpose: bool) -> Any:
        split = x.reshape(*x.shape[:2], heads, -1)
        return (split @ (matrix.T if transpose else matrix)).reshape(*x.shape[:2], -1)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        x, matrix = inputs
        assert x is not None and matrix is not None
        rows = _head_rows(x, node.attributes["heads"])
        y = matmul(rows, matrix, transpose_b=node.attributes["transpose"])
        return [reshape(y, node.outputs[0].shape)]

    def cases(self) -> Sequence[Case]:
        return [
            Case((x, matrix), {"heads": heads, "transpose": transpose})
            for x, matrix, heads, transpose in (
                ((2, 5, 12), (4, 6), 3, False),
                ((2, 5, 12), (6, 4), 3, True),
                ((1, 33, 32), (16, 16), 2, False),
                ((1, 4, 64), (32, 64), 2, False),
                ((2, 3, 5), (5, 1), 1, False),
            )
        ]


@declare
class HeadProduct(Op):
    """y = the sum over rows and heads of a_h^T b_h: a [B, T, H*D], b [B, T, H*E] -> y [D, E]."""

    name = "head_product"
    family = "matmul"
    inputs = ("a", "b")
    differentiable = False

    def infer(self, a: TensorSpec, b: TensorSpec, heads: int) -> TensorSpec:
        self.require(a.rank == 3 and a.shape[:2] == b.shape[:2], f"{a} and {b}", "equal [batch, time]")
        self.require(a.shape[2] % heads == 0 and b.shape[2] % heads == 0, f"{a} and {b}", f"multiples of {heads} heads")
        return TensorSpec((a.shape[2] // heads, b.shape[2] // heads), a.dtype)

    def flops(self, node: Node) -> int:
        return 2 * node.input("a").spec.size * node.outputs[0].shape[1]

    def reference(self, a: Any, b: Any, heads: int) -> Any:
        a, b = (x.reshape(-1, x.shape[2] // heads) for x in (a, b))
        return a.T @ b

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        a, b = inputs
        assert a is not None and b is not None
        heads = node.attributes["heads"]
        return [matmul(_head_rows(a, heads), _head_rows(b, heads), transpose_a=True)]

    def cases(self) -> Sequence[Case]:
        return [
            Case((a, b), {"heads": heads})
            for a, b, heads in (
                ((2, 5, 12), (2, 5, 18), 3),
                ((1, 33, 32), (1, 33, 32), 2),
                ((1, 4, 64), (1, 4, 32), 2),
                ((2, 3, 5), (2, 3, 1), 1),
            )
        ]


def _head_rows(x: Value, heads: int) -> Value:
    """[B, T, H*D] as [B*T*H, D]."""
    width = x.shape[2] // heads
    return reshape(x, (x.spec.size // width, width))


@declare
class PickRows(Op):
    """y[b, i] = x[b, rows[i]]: x [B, T, C] -> y [B, len(rows), C]; the rows are different ones."""

    name = "pick_rows"
    family = "layout"
    inputs = ("x",)

    def infer(self, x: TensorSpec, rows: tuple[int, ...]) -> TensorSpec:
        self.require(x.rank == 3, str(x), "[batch, time, features]")
        inside = len(rows) == len(set(rows)) > 0 and min(rows) >= 0 and max(rows) < x.shape[1]
        self.require(inside, f"rows {rows}", f"different ones from 0 to {x.shape[1] - 1}")
        return x.with_shape(x.shape[0], len(rows), x.shape[2])

    def flops(self, node: Node) -> int:
        return 0

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("put_rows").record(dy, rows=node.attributes["rows"], time=node.input("x").shape[1])]

    def reference(self, x: Any, rows: tuple[int, ...]) -> Any:
        return x[:, list(rows)]

    def cases(self) -> Sequence[Case]:
        return [Case(((2, 7, 4),), {"rows": (0, 3, 4)}), Case(((1, 33, 3),), {"rows": (32,)})]


@declare
class PutRows(Op):
    """y[b, rows[i]] = x[b, i], and zero elsewhere: x [B, len(rows), C] -> y [B, time, C]."""

    name = "put_rows"
    family = "layout"
    inputs = ("x",)
    differentiable = False

    def infer(self, x: TensorSpec, rows: tuple[int, ...], time: int) -> TensorSpec:
        self.require(x.rank == 3 and x.shape[1] == len(rows), str(x), f"[batch, {len(rows)}, features]")
        return x.with_shape(x.shape[0], time, x.shape[2])

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, x: Any, rows: tuple[int, ...], time: int) -> Any:
        y = x.new_zeros(x.shape[0], time, x.shape[2])
        y[:, list(rows)] = x
        return y

    def cases(self) -> Sequence[Case]:
        return [
            Case(((2, 3, 4),), {"rows": (0, 3, 4), "time": 7}),
            Case(((1, 1, 3),), {"rows": (32,), "time": 33}),
        ]


def head_matmul(x: Value, matrix: Value, heads: int, *, transpose: bool = False) -> Value:
    """Every head of x [B, T, H*D] times one matrix [D, E], or its transpose -> [B, T, H*E]."""
    return op("head_matmul").record(x, matrix, heads=heads, transpose=transpose)


def pick_rows(x: Value, rows: Sequence[int]) -> Value:
    """Some rows of every sequence: x [B, T, C] -> [B, len(rows), C]; x itself where these are all rows in order."""
    rows = tuple(rows)
    return x if rows == tuple(range(x.shape[1])) else op("pick_rows").record(x, rows=rows)
