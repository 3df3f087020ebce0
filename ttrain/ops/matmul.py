"""Matrix products: matmul, and linear = a product with a weight, its bias and its activation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Op, declare, op
from ttrain.ops.activation import activation as activated
from ttrain.ops.common import rows
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import reduce_sum


@declare
class Matmul(Op):
    """c = op(a) op(b) over equal leading axes, where op transposes the last two axes if asked.

    Accumulates in fp32 at least; the result has a's dtype.
    """

    name = "matmul"
    family = "matmul"
    inputs = ("a", "b")
    outputs = ("c",)

    def infer(self, a: TensorSpec, b: TensorSpec, transpose_a: bool, transpose_b: bool) -> TensorSpec:
        self.require(a.rank >= 2 and b.rank == a.rank, f"{a} and {b}", "two tensors of equal rank, 2 or more")
        self.require(a.dtype is b.dtype, f"{a} and {b}", "equal dtypes", "Cast one of them.")
        self.require(a.shape[:-2] == b.shape[:-2], f"{a} and {b}", "equal leading axes")
        m, inner_a = (a.shape[-1], a.shape[-2]) if transpose_a else a.shape[-2:]
        inner_b, n = (b.shape[-1], b.shape[-2]) if transpose_b else b.shape[-2:]
        self.require(inner_a == inner_b, f"{a} and {b}", f"equal inner sizes, not {inner_a} and {inner_b}")
        return TensorSpec((*a.shape[:-2], m, n), a.dtype)

    def flops(self, node: Node) -> int:
        a = node.input("a").spec
        inner = a.shape[-2] if node.attributes["transpose_a"] else a.shape[-1]
        return 2 * node.outputs[0].spec.size * inner

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dc,) = gradients
        assert dc is not None
        a, b = node.input("a"), node.input("b")
        ta, tb = node.attributes["transpose_a"], node.attributes["transpose_b"]
        # C = A B: dA = dC B^T, dB = A^T dC; with a transposed operand the product is transposed as a whole.
        da = matmul(b, dc, tb, True) if ta else matmul(dc, b, False, not tb)
        db = matmul(dc, a, True, ta) if tb else matmul(a, dc, not ta, False)
        return [da, db]

    def reference(self, a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
        return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)

    def cases(self) -> Sequence[Case]:
        cases = []
        for ta in (False, True):
            for tb in (False, True):
                attributes = {"transpose_a": ta, "transpose_b": tb}
                for lead in ((), (2, 3)):
                    a, b = ((7, 5) if ta else (5, 7)), ((33, 7) if tb else (7, 33))
                    cases.append(Case(((*lead, *a), (*lead, *b)), attributes))
        return cases


@composite(family="matmul")
def linear(x: Value, weight: Value, bias: Value | None = None, activation: str | None = None) -> Value:
    """y = f(x W^T + b): x [..., I], W [O, I], b [O] -> y [..., O]; f is `activation` or the identity.

    An activation is joined to its product by a pass, where backward does not read the sum itself.
    """
    require(weight.spec.rank == 2, "linear", weight.spec, "a weight [outputs, inputs]")
    outputs, inputs = weight.shape
    fits = x.spec.rank >= 1 and x.shape[-1] == inputs
    require(fits, "linear", f"x {x.spec}", f"{inputs} features, as the weight {weight.spec} has")
    same = x.spec.dtype is weight.spec.dtype
    require(same, "linear", f"{x.spec} and {weight.spec}", "equal dtypes", "Cast one of them.")
    if bias is not None:
        wanted = TensorSpec((outputs,), x.spec.dtype)
        require(bias.spec == wanted, "linear", f"bias {bias.spec}", str(wanted))
    y = reshape(matmul(_flat(x), weight, transpose_b=True), (*x.shape[:-1], outputs))
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
    return reshape(x, (rows(x.spec), x.shape[-1]))


cases(
    linear,
    Case(((5, 7), (33, 7), (33,))),
    Case(((2, 3, 8), (4, 8), None)),
    Case(((1, 1, 16), (1, 16), (1,))),
    Case(((40, 32), (48, 32), (48,))),
    *(Case(((5, 7), (33, 7), (33,)), {"activation": name}) for name in ("relu", "tanh")),
)


def matmul(a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """op(a) op(b) over equal leading axes."""
    return op("matmul").record(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def attention_scale(head_width: int) -> float:
    """1 / sqrt(D) (Vaswani et al., 2017)."""
    return 1 / math.sqrt(head_width)
