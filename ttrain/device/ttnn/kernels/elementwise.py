"""Rows that treat every element alike, and random bits: the hash of core/random_bits.py in int32, keyed by a tensor.

ttnn's own dropout takes its seed as a number, which a captured step would repeat for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, SIGN, keep_threshold, signed, stream_key
from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, Tensor, row
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput
from ttrain.device.ttnn.tensors.store import TileLayout, device_shape, dtype_name

SAME_NAMES = (
    "add", "subtract", "multiply", "maximum", "exp", "expm1", "log", "sqrt", "sin", "cos", "sigmoid", "relu", "tanh",
    "sign", "erf", "silu",
)  # fmt: skip


def _silu_grad(tt: Any, dy: Any, x: Any, **into: Any) -> None:
    """dx = t + t (x - silu(x)) with t = dy sigmoid(x)."""
    scaled = tt.multiply(dy, x, input_tensor_b_activations=[tt.UnaryOpType.SIGMOID])
    rest = tt.subtract(x, x, input_tensor_b_activations=[tt.UnaryOpType.SILU])
    tt.addcmul(scaled, scaled, rest, value=1.0, **into)


def _variant(tt: Any, attributes: Attributes) -> Any:
    return tt.GeluVariant.Tanh if attributes["approximate"] == "tanh" else tt.GeluVariant.Accurate


def _named(name: str, tt: Any, attributes: Attributes) -> Callable[..., Any]:
    return getattr(tt, name)


# By the name of an op: (ttnn, attributes) -> a function of the inputs that writes `output_tensor`.
CALLS: dict[str, Callable[[Any, Attributes], Callable[..., Any]]] = {
    "divide": partial(_named, "div"),
    "greater": partial(_named, "gt"),
    "scale": lambda tt, given: lambda x, **into: tt.multiply(x, given["factor"], **into),
    "cast": lambda tt, given: lambda x, **into: tt.typecast(x, getattr(tt, dtype_name(given["dtype"])), **into),
    "full": lambda tt, given: lambda output_tensor: tt.fill(output_tensor, given["value"], output_tensor=output_tensor),
    "relu_grad": lambda tt, _: partial(tt.multiply, input_tensor_b_activations=[tt.UnaryOpType.GTZ]),
    # dx = dy - (dy y) y
    "tanh_grad": lambda tt, _: lambda dy, y, **into: tt.addcmul(dy, tt.multiply(dy, y), y, value=-1.0, **into),
    "silu_grad": lambda tt, _: partial(_silu_grad, tt),
    "gelu": lambda tt, given: partial(tt.gelu, variant=_variant(tt, given)),
    "gelu_grad": lambda tt, given: (
        lambda dy, x, output_tensor: tt.gelu_bw(dy, x, variant=_variant(tt, given), input_grad=output_tensor)
    ),
    # SwiGLU; ttnn's gelu within a product is off by a percent, so that GeGLU takes two launches.
    "gated_activation": lambda tt, _: partial(tt.multiply, input_tensor_a_activations=[tt.UnaryOpType.SILU]),
    **{name: partial(_named, name) for name in SAME_NAMES},
}


def _elementwise(op: str, c: Context, *tensors: Tensor, **attributes: Any) -> Launch:
    call, (*ins, y) = CALLS[op](c.tt, attributes), tensors
    return lambda: call(*(x.t for x in ins), output_tensor=y.t)


for _op in CALLS:
    _supports = (lambda _, given: given["function"] == "silu") if _op == "gated_activation" else None
    row(_op, bound=True, supports=_supports)(partial(_elementwise, _op))


def key_of(c: Context, seed: IntegerInput, stream: int, per_chip: bool = True) -> Any:
    """Return the key of a stream of random bits, int32, which follows the seed; another on every chip if `per_chip`."""

    def keys(number: np.ndarray) -> np.ndarray:
        numbers = [int(number) + chip * per_chip for chip in range(c.store.chips)]
        return np.asarray([[signed(stream_key(each, stream))] for each in numbers], np.int32)

    return seed.derived(stream, TileLayout((1, 1), "int32"), keys)


@row("dropout_mask")
def _dropout_mask(c: Context, seed: IntegerInput, mask: Tensor, stream: int, p: float, **_: Any) -> None:
    shape, size, tt = device_shape(mask.spec.shape), mask.spec.size, c.tt
    index = c.constant("index", TileLayout(shape, "int32"), lambda: np.arange(size, dtype=np.int32).reshape(shape))
    x = tt.add(index.t, key_of(c, seed, stream))
    mix_into(tt, x)
    # With the top bit flipped, the signed comparison orders the hash as unsigned.
    tt.bitwise_xor(x, -SIGN, output_tensor=x)
    kept = tt.ge(x, signed(keep_threshold(p) ^ SIGN), dtype=getattr(tt, dtype_name(mask.spec.dtype)))
    tt.multiply(kept, 1 / (1 - p), output_tensor=mask.t)


def mix_into(tt: Any, x: Any) -> None:
    """x <- mix(x), int32."""
    for shift, factor in zip(MIX_SHIFTS, (*map(signed, MIX_MULTIPLIERS), None), strict=True):
        tt.bitwise_xor(x, tt.logical_right_shift(x, shift), output_tensor=x)
        if factor is not None:
            tt.multiply(x, factor, output_tensor=x)
