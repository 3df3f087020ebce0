"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.tensors.device_tensor import Tensors


@row("matmul")
def _matmul(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (a, b), (y,) = ins, outs
    options = {"transpose_a": attributes["transpose_a"], "transpose_b": attributes["transpose_b"], **c.product}
    return lambda: c.tt.matmul(a.t, b.t, optional_output_tensor=y.t, **options)


@row("linear")
def _linear(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """relu fuses into the product; other activations follow in place."""
    (x, weight, bias), (y,), activation = ins, outs, attributes.get("activation")
    options: dict[str, Any] = {"transpose_b": True, **c.product}
    if activation == "relu":
        options |= {"activation": "relu", "core_grid": c.grid or c.whole_grid}

    def product() -> Any:
        row = None if bias is None else bias.t
        return c.tt.linear(x.t, weight.t, bias=row, optional_output_tensor=y.t, **options)

    return product if activation in (None, "relu") else _then(c, product, activation)


def _then(c: Context, product: Launch, activation: str) -> Launch:
    variants = {"gelu": c.tt.GeluVariant.Accurate, "gelu_tanh": c.tt.GeluVariant.Tanh}

    def run() -> None:
        y = product()
        if activation in variants:
            c.tt.gelu(y, variant=variants[activation], output_tensor=y)
        else:
            getattr(c.tt, activation)(y, output_tensor=y)

    return run
