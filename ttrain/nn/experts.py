"""Linear layers with a matrix for each expert, and what the choices of experts add to the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

from ttrain import ops
from ttrain.graph import Value
from ttrain.nn.initialize import Initializer, Uniform
from ttrain.nn.layers import Linear
from ttrain.nn.module import Parameter, use

SHARES = "expert_shares"  # step input fp32 [E]: share of each expert in the pairs of a slice
MOST_TOLD = 1024  # experts whose loads are told: each is an output of the step


class ExpertLinear(Linear):
    """y[j] = W_e x[j] for the expert e of row j: x [M, inputs] -> y [M, outputs], W [experts, outputs, inputs].

    Rows are sorted by expert, see ops/experts.py. Starts as Linear does.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, weight_initializer: Initializer | None = None) -> None:
        initializer = weight_initializer or Uniform(1 / math.sqrt(inputs))
        self.weight, self.bias, self.lora = Parameter((experts, outputs, inputs), initializer), None, None

    def __call__(self, x: Value, *offsets: Value) -> Value:
        y = ops.grouped_matmul(x, use(x.graph, self.weight, x.spec.dtype), offsets[0], True)
        return y if self.lora is None else y + self.lora(x, *offsets)


class Routed(NamedTuple):
    """The choice of K of E experts for N tokens in one layer."""

    logits: Value  # fp32 [N, E]
    probabilities: Value  # scores that add up to 1, fp32 [N, E]
    ids: Value  # int64 [N, K]
    bias: Value | None  # of the choice, [E]


def loads(routed: Sequence[Routed], valid: Value) -> Value:
    """Count the pairs of each expert, all layers together: valid fp32 [rows, T] -> [rows, E].

    `valid` is 1 where a token counts, else 0.
    """
    logits, ids = routed[0].logits, routed[0].ids
    ones = ops.full(logits.graph, logits.spec.with_shape(*ids.shape), 1.0)
    chosen = reduce(ops.add, (ops.scatter(ones, each.ids, logits.shape[1]) for each in routed))  # [N, E]
    counted = ops.reshape(chosen, (*valid.shape, logits.shape[1])) * ops.reshape(valid, (*valid.shape, 1))
    return ops.reduce_sum(counted, [1])


def routing_loss(
    routed: Sequence[Routed], valid: Value, weight: Value, balance: float, z: float, tells_loads: bool = False
) -> tuple[list[Value], dict[str, Value]]:
    """Return what routers add to the loss, and sums to log: valid fp32 [rows, T], weight fp32 [] -> fp32 [] each.

    Means are over tokens that are `valid`, all layers together.

    - `router/balance` = E sum_e f_e p_e, as in Transformers (Fedus et al., 2022). Expert e has f_e pairs per token, and
      the mean probability p_e. The step input `SHARES` is f / K where it is declared.
    - `router/z` is the mean square of the log-sum-exp of logits (Zoph et al., 2022).
    - `router/entropy` is that of the probabilities, in nats.
    - `router/dropped` is the share of pairs without a row, which is 0.
    - `load/<expert>`, with `tells_loads`, is the share of each of at most `MOST_TOLD` experts in all pairs.

    A bias gets the excess load of its expert as gradient; Wang et al. (2024) take its sign.
    """
    graph, (tokens, experts), count = weight.graph, routed[0].logits.shape, routed[0].ids.shape[1]
    mask, each = ops.reshape(valid, (tokens, 1)), weight * (1 / len(routed))

    def mean(values: Iterable[Value]) -> Value:
        """The mean of values [N, ...] over tokens and layers, added up over the second axis."""
        return ops.reduce_sum(reduce(ops.add, values) * mask, [0, 1]) * each

    own = ops.reduce_sum(loads(routed, valid), [0])  # [E]
    pairs = ops.reduce_sum(own, [0])
    probabilities = [layer.probabilities for layer in routed]
    found = {"router/entropy": mean(-(p * ops.log(ops.at_least(p, 1e-30))) for p in probabilities)}
    found["router/dropped"] = ops.reduce_sum(mask, [0, 1]) * weight - pairs * each * (1 / count)
    terms = []
    if balance:
        f = (graph.inputs.get(SHARES) or own / ops.at_least(pairs, 1.0)) * float(count)
        found["router/balance"] = mean(p * f for p in probabilities) * float(experts)
        terms.append(balance * found["router/balance"])
    if z:
        found["router/z"] = mean(_squared_log_sum_exp(r.logits) for r in routed)
        terms.append(z * found["router/z"])
    for layer in routed:
        if layer.bias is not None:
            chosen = ops.reduce_sum(loads([layer], valid), [0])
            excess = chosen - ops.reduce_sum(chosen, [0]) * (1 / experts)
            terms.append(ops.reduce_sum(layer.bias * excess, [0]) * weight)
    if tells_loads and experts <= MOST_TOLD:
        columns = ops.reshape(own * (each * (1 / count)), (1, experts, 1))
        found |= {f"load/{e}": ops.reshape(ops.index_select(columns, [e]), ()) for e in range(experts)}
    return terms, found


def _squared_log_sum_exp(logits: Value) -> Value:
    """[N, E] -> [N, 1]."""
    most = ops.amax(logits, -1)
    total = ops.log(ops.reshape(ops.reduce_sum(ops.exp(logits - most), [1]), most.shape)) + most
    return total * total
