"""A GPT's training step in tinygrad, captured by TinyJit: `pip install tinygrad numpy`.

Its CPU backend wants clang. DEV=CPU:LLVM takes a libLLVM instead. BEAM=2 searches for faster kernels, for minutes.
"""

from __future__ import annotations

import os
from importlib.metadata import version

os.environ.setdefault("DEV", "CPU")

import numpy as np
from protocol import ADAMW, SIZES, arguments, serve
from tinygrad import Context, Tensor, TinyJit, dtypes, nn

given = arguments()
size = SIZES[given.size]
compute = dtypes.bfloat16 if given.precision == "bf16" else dtypes.float32
random = np.random.default_rng(0)


class Norm:
    def __init__(self) -> None:
        self.weight = Tensor.ones(size.width).contiguous()
        self.bias = Tensor.zeros(size.width).contiguous() if size.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.cast(dtypes.float32).layernorm() * self.weight
        return (y if self.bias is None else y + self.bias).cast(compute)


class Block:
    def __init__(self) -> None:
        width, bias = size.width, size.bias
        self.norm1, self.norm2 = Norm(), Norm()
        self.attend, self.join = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        parts = linear(self.attend, self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.reshape(rows, time, size.heads, -1).transpose(1, 2) for part in parts)
        y = q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + linear(self.join, y)
        return x + linear(self.narrow, linear(self.widen, self.norm2(x)).gelu())


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.cast(compute)
    return x.linear(layer.weight.cast(compute).transpose(), bias)


class GPT:
    def __init__(self) -> None:
        self.tokens, self.places = (nn.Embedding(n, size.width) for n in (size.vocabulary, size.context))
        self.blocks = [Block() for _ in range(size.layers)]
        self.norm = Norm()

    def __call__(self, tokens: Tensor) -> Tensor:
        x = (self.tokens(tokens) + self.places(Tensor.arange(size.context))).cast(compute)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.cast(compute).transpose()


model = GPT()
weights = nn.state.get_parameters(model)
optimizer = nn.optim.AdamW(weights, ADAMW["lr"], ADAMW["beta1"], ADAMW["beta2"], ADAMW["eps"], ADAMW["weight_decay"])


@TinyJit
@Context(TRAINING=1)
def update(tokens: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(tokens).cast(dtypes.float32).sparse_categorical_crossentropy(targets)
    loss.backward()
    gradients = [each.grad for each in weights]
    norm = sum((each.cast(dtypes.float32).square().sum() for each in gradients), Tensor(0.0)).sqrt()
    for each in weights:
        each.grad = each.grad * (ADAMW["clip"] / (norm + 1e-6)).minimum(1.0)
    return loss.realize(*optimizer.schedule_step())


def step() -> float:
    batch = random.integers(0, size.vocabulary, (2, size.rows, size.context)).astype(np.int32)
    return float(update(*(Tensor(each).contiguous().realize() for each in batch)).item())


serve(step, f"tinygrad {version('tinygrad')}")
