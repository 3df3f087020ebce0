"""Products of every head with one matrix."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Value
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul


@composite(family="matmul")
def head_matmul(x: Value, matrix: Value, heads: int, transpose: bool = False) -> Value:
    """y_h = x_h M for every head h, or x_h M^T with `transpose`: x [B, T, H*D], M [D, E] -> y [B, T, H*E]."""
    shaped, given = x.spec.rank == 3 and matrix.spec.rank == 2, f"{x.spec} and {matrix.spec}"
    require(shaped, "head_matmul", given, "[batch, time, features] and a matrix")
    require(x.spec.dtype is matrix.spec.dtype, "head_matmul", given, "equal dtypes", "Cast one of them.")
    inner, outer = matrix.shape[::-1] if transpose else matrix.shape
    require(x.shape[2] == heads * inner, "head_matmul", f"{x.shape[2]} features", f"{heads} heads of {inner}")
    return reshape(matmul(_head_rows(x, heads), matrix, transpose_b=transpose), (*x.shape[:2], heads * outer))


@head_matmul.gradient
def _(node: Node, dy: Value) -> Sequence[Value]:
    x, matrix, heads, transpose = node.input("x"), node.input("matrix"), *_settings(node)
    dmatrix = head_product(dy, x, heads) if transpose else head_product(x, dy, heads)
    return [head_matmul(dy, matrix, heads, not transpose), dmatrix]


def _settings(node: Node) -> tuple[int, bool]:
    return node.attributes["heads"], node.attributes["transpose"]


@composite(family="matmul", differentiable=False)
def head_product(a: Value, b: Value, heads: int) -> Value:
    """y = the sum over rows and heads of a_h^T b_h: a [B, T, H*D], b [B, T, H*E] -> y [D, E]."""
    given = f"{a.spec} and {b.spec}"
    require(a.spec.rank == 3 and a.shape[:2] == b.shape[:2], "head_product", given, "equal [batch, time]")
    require(a.shape[2] % heads == b.shape[2] % heads == 0, "head_product", given, f"multiples of {heads} heads")
    return matmul(_head_rows(a, heads), _head_rows(b, heads), transpose_a=True)


def _head_rows(x: Value, heads: int) -> Value:
    """[B, T, H*D] as [B*T*H, D]."""
    width = x.shape[2] // heads
    return reshape(x, (x.spec.size // width, width))


for _x, _matrix, _heads, _transpose in (
    ((2, 5, 12), (4, 6), 3, False),
    ((2, 5, 12), (6, 4), 3, True),
    ((1, 33, 32), (16, 16), 2, False),
    ((1, 4, 64), (32, 64), 2, False),
    ((2, 3, 5), (5, 1), 1, False),
):
    cases(head_matmul, Case((_x, _matrix), {"heads": _heads, "transpose": _transpose}))
for _a, _b, _heads in (
    ((2, 5, 12), (2, 5, 18), 3),
    ((1, 33, 32), (1, 33, 32), 2),
    ((1, 4, 64), (1, 4, 32), 2),
    ((2, 3, 5), (2, 3, 1), 1),
):
    cases(head_product, Case((_a, _b), {"heads": _heads}))
