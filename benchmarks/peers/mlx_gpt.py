"""A GPT's training step in MLX on a CPU, compiled whole: `pip install mlx mlx-cpu numpy`."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_unflatten
from protocol import ADAMW, SIZES, arguments, serve

given = arguments()
size = SIZES[given.size]
mx.set_default_device(mx.cpu)
compute = mx.bfloat16 if given.precision == "bf16" else mx.float32
random = np.random.default_rng(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, bias = size.width, size.bias
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attend, self.join = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        rows, time, width = x.shape
        parts = mx.split(self.attend(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(rows, time, size.heads, -1).swapaxes(1, 2) for part in parts)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=(width // size.heads) ** -0.5, mask="causal")
        x = x + self.join(y.swapaxes(1, 2).reshape(x.shape))
        return x + self.narrow(nn.gelu_approx(self.widen(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, size.width) for n in (size.vocabulary, size.context))
        self.blocks = [Block() for _ in range(size.layers)]
        self.norm = nn.LayerNorm(size.width, bias=size.bias)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.tokens(tokens) + self.places(mx.arange(size.context))
        for block in self.blocks:
            x = block(x)
        return self.tokens.as_linear(self.norm(x))


model = GPT()
betas = [ADAMW["beta1"], ADAMW["beta2"]]
optimizer = AdamW(ADAMW["lr"], betas, ADAMW["eps"], ADAMW["weight_decay"], bias_correction=True)
optimizer.init(model.trainable_parameters())


def loss_of(weights: dict, tokens: mx.array, targets: mx.array) -> mx.array:
    """Compute in the precision, on copies of the fp32 weights."""
    model.update(tree_unflatten([(name, x.astype(compute)) for name, x in tree_flatten(weights)]))
    return nn.losses.cross_entropy(model(tokens).astype(mx.float32), targets, reduction="mean")


weights = model.trainable_parameters()


def update(weights: dict, tokens: mx.array, targets: mx.array) -> tuple[dict, mx.array]:
    loss, gradients = mx.value_and_grad(loss_of)(weights, tokens, targets)
    gradients, _ = clip_grad_norm(gradients, ADAMW["clip"])
    return optimizer.apply_gradients(gradients, weights), loss


compiled = partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)(update)


def step() -> float:
    global weights
    batch = random.integers(0, size.vocabulary, (2, size.rows, size.context)).astype(np.int32)
    weights, loss = compiled(weights, *map(mx.array, batch))
    mx.eval(weights, optimizer.state, loss)
    return float(loss.item())


serve(step, f"mlx {version('mlx')}")
