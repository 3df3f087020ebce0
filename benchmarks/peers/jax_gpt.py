"""A GPT's training step in JAX, compiled whole, with donated buffers: `pip install jax optax`."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from protocol import ADAMW, SIZES, arguments, serve

given = arguments()
size = SIZES[given.size]
compute = jnp.bfloat16 if given.precision == "bf16" else jnp.float32
random = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> jax.Array:
    return jnp.asarray(0.02 * random.standard_normal((rows, columns)), jnp.float32)


def layer(inner: int, outer: int) -> dict[str, jax.Array]:
    return {"weight": matrix(inner, outer), **({"bias": jnp.zeros(outer)} if size.bias else {})}


def norm() -> dict[str, jax.Array]:
    return {"weight": jnp.ones(size.width), **({"bias": jnp.zeros(size.width)} if size.bias else {})}


def first_weights() -> dict:
    width = size.width
    names = {"attend": (width, 3 * width), "join": (width, width)}
    names |= {"widen": (width, 4 * width), "narrow": (4 * width, width)}
    blocks = [
        {"norm1": norm(), "norm2": norm(), **{name: layer(*shape) for name, shape in names.items()}}
        for _ in range(size.layers)
    ]
    tables = {"tokens": matrix(size.vocabulary, width), "places": matrix(size.context, width)}
    return {**tables, "blocks": blocks, "norm": norm()}


def linear(p: dict, x: jax.Array) -> jax.Array:
    y = x @ p["weight"].astype(compute)
    return y + p["bias"].astype(compute) if size.bias else y


def normalized(p: dict, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    y = jax.nn.standardize(x, axis=-1, epsilon=1e-5) * p["weight"]
    return (y + p["bias"] if size.bias else y).astype(compute)


def block(p: dict, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], size.heads, size.width // size.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(linear(p["attend"], normalized(p["norm1"], x)), 3, axis=-1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + linear(p["join"], y)
    wide = jax.nn.gelu(linear(p["widen"], normalized(p["norm2"], x)), approximate=True)
    return x + linear(p["narrow"], wide)


def loss_of(weights: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = (weights["tokens"][tokens] + weights["places"]).astype(compute)
    for p in weights["blocks"]:
        x = block(p, x)
    logits = normalized(weights["norm"], x) @ weights["tokens"].astype(compute).T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


adamw = optax.adamw(
    ADAMW["lr"], ADAMW["beta1"], ADAMW["beta2"], ADAMW["eps"], weight_decay=ADAMW["weight_decay"],
    mask=lambda weights: jax.tree.map(lambda each: each.ndim > 1, weights),
)  # fmt: skip
optimizer = optax.chain(optax.clip_by_global_norm(ADAMW["clip"]), adamw)


def update(weights: dict, state: optax.OptState, tokens: jax.Array, targets: jax.Array) -> tuple:
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, targets)
    changes, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, changes), state, loss


compiled = jax.jit(update, donate_argnums=(0, 1))
weights = first_weights()
state = optimizer.init(weights)


def step() -> float:
    global weights, state
    batch = random.integers(0, size.vocabulary, (2, size.rows, size.context), np.int32)
    weights, state, loss = compiled(weights, state, *batch)
    jax.block_until_ready(weights)
    return float(loss)


serve(step, f"jax {jax.__version__}")
