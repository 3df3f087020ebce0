"""Matrix products: of two tensors, of a layer with its bias and activation, and of every head with one matrix.

A frozen weight may be kept in fewer bits, see device/quantized.py. Then only x has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from ttrain.core.spec import TensorSpec
from ttrain.device.quantized import PARTS, Quantized, part_specs
from ttrain.graph import Case, Node, Value, cases, composite, op, primitive, require
from ttrain.ops.activation import activation as activated
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import reduce_sum


def _product_flops(node: Node) -> int:
    a = node.input("a").shape
    return 2 * node.outputs[0].spec.size * (a[-2] if node.attributes["transpose_a"] else a[-1])


@primitive(
    "a [..., M, K], b [..., L, N]",
    outputs=("c",),
    flops=_product_flops,
    reference=lambda a, b, transpose_a, transpose_b: (a.mT if transpose_a else a) @ (b.mT if transpose_b else b),
)
def matmul(a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> TensorSpec:
    """c = op(a) op(b) over equal leading axes, where op transposes the last two axes if asked.

    Accumulates in fp32 at least; the result has a's dtype.
    """
    m, inner_a = (a.shape[-1], a.shape[-2]) if transpose_a else a.shape[-2:]
    inner_b, n = (b.shape[-1], b.shape[-2]) if transpose_b else b.shape[-2:]
    fits = inner_a == inner_b
    require(fits, "matmul", f"{a.spec} and {b.spec}", f"equal inner sizes, not {inner_a} and {inner_b}")
    return a.spec.with_shape(*a.shape[:-2], m, n)


@matmul.gradient
def _(node: Node, dc: Value) -> Sequence[Value]:
    a, b = node.input("a"), node.input("b")
    ta, tb = node.attributes["transpose_a"], node.attributes["transpose_b"]
    # C = A B: dA = dC B^T, dB = A^T dC; with a transposed operand the product is transposed as a whole.
    da = matmul(b, dc, tb, True) if ta else matmul(dc, b, False, not tb)
    db = matmul(dc, a, True, ta) if tb else matmul(a, dc, not ta, False)
    return [da, db]


for _ta, _tb in product((False, True), repeat=2):
    for _lead in ((), (2, 3)):
        _a, _b = ((7, 5) if _ta else (5, 7)), ((33, 7) if _tb else (7, 33))
        cases(matmul, Case(((*_lead, *_a), (*_lead, *_b)), {"transpose_a": _ta, "transpose_b": _tb}))


@composite("x [..., I], weight [O, I], bias [O]")
def linear(x: Value, weight: Value, bias: Value | None = None, activation: str | None = None) -> Value:
    """y = f(x W^T + b): x [..., I], W [O, I], b [O] -> y [..., O]; f is `activation` or the identity.

    An activation is joined to its product by a pass, where backward does not read the sum itself.
    """
    y = reshape(matmul(_flat(x), weight, transpose_b=True), (*x.shape[:-1], weight.shape[0]))
    y = y if bias is None else y + bias
    return y if activation is None else activated(y, activation)


@linear.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    x, weight, activation = node.input("x"), node.input("weight"), node.attributes.get("activation")
    if activation is not None:
        known = activation in ("relu", "tanh")
        require(known, "linear", activation, "relu or tanh where a gradient is needed: theirs reads y")
        dy = dy.graph.apply(f"{activation}_grad", dy, node.outputs[0])
    dy = _flat(dy)  # [N, O]
    # The gradients of weight and bias come first: x is free before dx needs memory.
    dweight = matmul(dy, _flat(x), transpose_a=True)  # [O, I]
    dbias = None if node.inputs[2] is None else reduce_sum(dy, (0,))
    return [reshape(matmul(dy, weight), x.shape), dweight, dbias]


def _flat(x: Value) -> Value:
    """[..., C] as [N, C]."""
    return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


cases(linear, Case(), Case(((40, 32), (48, 32), (48,))))
cases(linear, *(Case(((5, 7), (33, 7), (33,)), {"activation": name}) for name in ("relu", "tanh")))


@composite("x [B, T, F], matrix [D, E]")
def head_matmul(x: Value, matrix: Value, heads: int, transpose: bool = False) -> Value:
    """y_h = x_h M for every head h, or x_h M^T with `transpose`: x [B, T, H*D], M [D, E] -> y [B, T, H*E]."""
    inner, outer = matrix.shape[::-1] if transpose else matrix.shape
    require(x.shape[2] == heads * inner, "head_matmul", f"{x.shape[2]} features", f"{heads} heads of {inner}")
    return reshape(matmul(_head_rows(x, heads), matrix, transpose_b=transpose), (*x.shape[:2], heads * outer))


@head_matmul.gradient
def _(node: Node, dy: Value) -> Sequence[Value]:
    x, matrix, given = node.input("x"), node.input("matrix"), node.attributes
    heads, transpose = given["heads"], given["transpose"]
    dmatrix = head_product(dy, x, heads) if transpose else head_product(x, dy, heads)
    return [head_matmul(dy, matrix, heads, not transpose), dmatrix]


@composite("a [B, T, D], b [B, T, E]", differentiable=False)
def head_product(a: Value, b: Value, heads: int) -> Value:
    """y = the sum over rows and heads of a_h^T b_h: a [B, T, H*D], b [B, T, H*E] -> y [D, E]."""
    fits, given = a.shape[2] % heads == b.shape[2] % heads == 0, f"{a.spec} and {b.spec}"
    require(fits, "head_product", given, f"multiples of {heads} heads")
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


def attention_scale(head_width: int) -> float:
    """1 / sqrt(D) (Vaswani et al., 2017)."""
    return 1 / math.sqrt(head_width)


def _of_code(code: str) -> dict[str, Any]:
    def reference(x: Any, *parts: Any, transpose_b: bool) -> Any:
        named = dict(zip(PARTS[code], (part.numpy() for part in parts), strict=True))
        weight = x.new_tensor(np.asarray(Quantized(code, named), np.float64))
        return x @ (weight.mT if transpose_b else weight)

    def vjp(node: Node, dy: Value) -> list[Value | None]:
        dx = op(node.op.name).record(dy, *node.inputs[1:], transpose_b=not node.attributes["transpose_b"])
        return [dx, *[None] * (len(node.inputs) - 1)]

    facts = {"vjp": vjp, "reference": reference, "constants": ("absmax", "absmax_absmax", "absmax_mean")}
    return {**facts, "flops": lambda node: 2 * node.outputs[0].spec.size * node.input("x").shape[-1]}


def _coded_spec(code: str, x: Value, parts: Sequence[Value], shape: tuple[int, int], transpose_b: bool) -> TensorSpec:
    """The spec of x W^T with `transpose_b`, else of x W, for W of a shape [O, I] in the parts of a code."""
    read, made = reversed(shape) if transpose_b else shape
    wanted, given = [spec.shape for spec in part_specs(code, shape).values()], [part.shape for part in parts]
    require(given == wanted, f"{code}_matmul", given, f"parts {wanted}")
    require(x.shape[-1] == read, f"{code}_matmul", x.spec, f"[..., {read}] for a weight {list(shape)}")
    return x.spec.with_shape(*x.shape[:-1], made)


@primitive("x [..., K], codes int8 [O, I], absmax accumulation [O]", **_of_code("int8"))
def int8_matmul(x: Value, codes: Value, absmax: Value, transpose_b: bool = True) -> TensorSpec:
    """y = x W^T with `transpose_b`, else x W: W = codes absmax / 127 [O, I], absmax [O]; x [..., I] or [..., O].

    W has the dtype of x, and sums are formed in fp32 at least.
    """
    return _coded_spec("int8", x, (codes, absmax), codes.shape, transpose_b)  # type: ignore[arg-type]


_SCALES = "absmax uint8 [O, B], absmax_absmax accumulation [G], absmax_mean accumulation [M]"


@primitive(f"x [..., K], codes uint8 [O, H], {_SCALES}", **_of_code("nf4"))
def nf4_matmul(
    x: Value, codes: Value, absmax: Value, absmax_absmax: Value, absmax_mean: Value, transpose_b: bool = True
) -> TensorSpec:
    """y = x W^T with `transpose_b`, else x W: codes of W [O, I], two in a byte, absmax [O, I/64]; x [..., I or O].

    W has the dtype of x, and sums are formed in fp32 at least.
    """
    shape = codes.shape[0], 2 * codes.shape[1]
    return _coded_spec("nf4", x, (codes, absmax, absmax_absmax, absmax_mean), shape, transpose_b)


def quantized_linear(x: Value, parts: Sequence[Value], code: str, bias: Value | None = None) -> Value:
    """y = x W^T + b: x [..., I], W [O, I] as the `parts` of a code, b [O] -> y [..., O]."""
    y: Value = op(f"{code}_matmul").record(x, *parts, transpose_b=True)
    return y if bias is None else y + bias


for _code, _bounds in {"int8": {"codes": 128}, "nf4": {"codes": 256, "absmax": 256}}.items():
    for _rows, _shape in (((5,), (33, 64)), ((2, 3), (7, 128)), ((1, 4), (130, 128))):
        for _turned in (True, False):
            _specs = ((*_rows, _shape[_turned]), *(spec.shape for spec in part_specs(_code, _shape).values()))
            cases(op(f"{_code}_matmul"), Case(_specs, {"transpose_b": _turned}, integers=_bounds))
