"""Layers. Each records its ops into the graph of its input and computes in its input's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

from ttrain import ops
from ttrain.core.spec import DType
from ttrain.graph import Value
from ttrain.nn.initialize import Constant, Initializer, Normal, Uniform
from ttrain.nn.module import Module, Parameter, Role, use, use_pieces


class Linear(Module):
    """y = x W^T + b: x [..., inputs] -> y [..., outputs], W [outputs, inputs], b [outputs].

    Without initializers both start uniform in +-1/sqrt(inputs), torch.nn.Linear's rule. The output of a `lora`, see
    lora.py, is added to y.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        role: Role = Role.HIDDEN,
    ) -> None:
        default = Uniform(1 / math.sqrt(inputs))
        self.weight = Parameter((outputs, inputs), weight_initializer or default, role=role)
        self.bias = Parameter((outputs,), bias_initializer or default) if bias else None
        self.lora: Callable[..., Value] | None = None

    def __call__(self, x: Value, *offsets: Value) -> Value:
        compute = x.spec.dtype
        bias = None if self.bias is None else use(x.graph, self.bias, compute)
        if self.weight.code is None:
            y = ops.linear(x, use(x.graph, self.weight, compute), bias)
        else:
            y = ops.quantized_linear(x, use_pieces(x.graph, self.weight, compute), self.weight.code, bias)
        return y if self.lora is None else y + self.lora(x)


class LayerNorm(Module):
    """Layer norm over the last axis of x [..., width].

    Statistics are fp32. Weight and bias are fp32 too, unless the parameters follow the compute dtype.
    """

    def __init__(self, width: int, bias: bool = True, eps: float = 1e-5) -> None:
        self.weight = Parameter((width,), Constant(1.0), follows_compute=False)
        self.bias = Parameter((width,), Constant(0.0), follows_compute=False) if bias else None
        self._eps = eps

    def __call__(self, x: Value) -> Value:
        graph, compute = x.graph, x.spec.dtype
        bias = None if self.bias is None else use(graph, self.bias, compute)
        return ops.layer_norm(x, use(graph, self.weight, compute), bias, self._eps)


class RMSNorm(Module):
    """RMS norm over the last axis of x [..., width]. The weight has the dtype of that of LayerNorm."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = Parameter((width,), Constant(1.0), follows_compute=False)
        self._eps = eps

    def __call__(self, x: Value) -> Value:
        return ops.rms_norm(x, use(x.graph, self.weight, x.spec.dtype), self._eps)


class Embedding(Module):
    """y[..., :] = weight[ids[...], :]: ids int64 [...] -> y [..., width], weight [count, width]."""

    def __init__(self, count: int, width: int, initializer: Initializer | None = None) -> None:
        self.weight = Parameter((count, width), initializer or Normal(1.0), role=Role.INPUT)

    def __call__(self, ids: Value, compute: DType) -> Value:
        return ops.embedding(ids, use(ids.graph, self.weight, compute))


class Dropout(Module):
    """Zeroes a share p of the elements and multiplies the others by 1/(1-p).

    `stream` numbers the masks of a model. Two dropouts of a model must have different streams.
    """

    def __init__(self, p: float, stream: int) -> None:
        self._p, self._stream = p, stream

    def __call__(self, x: Value, seed: Value | None) -> Value:
        """`seed` int64 [] of the step; without one, as in evaluation, x itself."""
        return x if seed is None else ops.dropout(x, seed, self._p, self._stream)
