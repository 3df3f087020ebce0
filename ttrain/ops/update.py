"""Ops of the update stage: gradient accumulation, clipping and the optimizers. They overwrite state in place.

The optimizer ops take whole groups of tensors at once, so a device may run one kernel over a flat arena.
Learning rate, step number and clip factor are tensors: a captured step can be replayed while they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import add as add_values
from ttrain.ops.elementwise import cast, divide, full, multiply, scale, sqrt, subtract

_SCALAR = TensorSpec((), DType.FP32)


class _Update(Op):
    family = "update"
    differentiable = False


@declare
class Assign(_Update):
    """state <- value (rounded to the state's dtype). Plans usually let value's kernel write there directly."""

    name = "assign"
    inputs = ("state", "value")
    outputs = ("new_state",)
    wide = ("state",)
    mutates = {"new_state": "state"}

    def infer(self, state: TensorSpec, value: TensorSpec) -> TensorSpec:
        self.require(state.shape == value.shape, f"{state} and {value}", "equal shapes")
        return state

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, state: Any, value: Any) -> Any:
        return value.to(state.dtype)

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape)) for shape in ((4, 8), (257,), ())]


@declare
class Accumulate(_Update):
    """state <- state + value."""

    name = "accumulate"
    inputs = ("state", "value")
    outputs = ("new_state",)
    wide = ("state",)
    mutates = {"new_state": "state"}

    def infer(self, state: TensorSpec, value: TensorSpec) -> TensorSpec:
        self.require(state.shape == value.shape, f"{state} and {value}", "equal shapes")
        return state

    def reference(self, state: Any, value: Any) -> Any:
        return state + value

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape)) for shape in ((4, 8), (257,), ())]


@declare
class ClipFactor(_Update):
    """factor = min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ scales gradients."""

    name = "clip_factor"
    inputs = ("norm",)
    wide = ("norm",)
    outputs = ("factor",)

    def infer(self, norm: TensorSpec, limit: float) -> TensorSpec:
        self.require(norm.shape == () and norm.dtype.is_floating, str(norm), "a floating-point scalar")
        return norm

    def reference(self, norm: Any, limit: float) -> Any:
        return (limit / (norm + 1e-6)).clamp(max=1.0)

    def cases(self) -> Sequence[Case]:
        return [Case(((),), {"limit": limit}, positive=("norm",)) for limit in (1.0, 0.01, 1e4)]


class OptimizerUpdate(_Update):
    """inputs: `slots` lists of `count` tensors each, then scalars. Every list but the gradients is overwritten."""

    slots: tuple[str, ...]
    scalars: tuple[str, ...]

    def split(self, items: Sequence[Any], count: int) -> tuple[list[list[Any]], list[Any]]:
        """Items of all inputs -> one list per slot, and the scalars."""
        end = count * len(self.slots)
        return [list(items[start : start + count]) for start in range(0, end, count)], list(items[end:])

    def infer(self, *specs: TensorSpec, count: int, **attributes: Any) -> Sequence[TensorSpec]:
        lists, scalars = self.split(specs, count)
        self.require(len(scalars) == len(self.scalars), f"{len(scalars)} scalars", f"{len(self.scalars)}")
        for tensors in zip(*lists, strict=True):
            self.require(len({spec.shape for spec in tensors}) == 1, f"{tensors}", "one shape per parameter")
        written = [spec for name, slot in zip(self.slots, lists, strict=True) if name != "gradients" for spec in slot]
        return written

    def aliases(self, node: Node) -> dict[int, int]:
        count = node.attributes["count"]
        written = [index for index, name in enumerate(self.slots) if name != "gradients"]
        return {
            position * count + item: slot * count + item
            for position, slot in enumerate(written)
            for item in range(count)
        }

    def flops(self, node: Node) -> int:
        count = node.attributes["count"]
        return 12 * sum(value.spec.size for value in node.values[:count])

    def decompose_one(self, tensors: Sequence[Value], scalars: Sequence[Value | None], node: Node) -> Sequence[Value]:
        """New values of one parameter's written slots."""
        return ()

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        lists, scalars = self.split(inputs, node.attributes["count"])
        results = []
        for tensors in zip(*lists, strict=True):
            new = self.decompose_one(tensors, scalars, node)
            old = [t for t, name in zip(tensors, self.slots, strict=True) if name != "gradients"]
            results.append([op("assign").record(state, value) for state, value in zip(old, new, strict=True)])
        return [new for slot in zip(*results, strict=True) for new in slot]


@declare
class AdamWUpdate(OptimizerUpdate):
    """AdamW (Loshchilov and Hutter, 2019) in torch.optim.AdamW's form, on a group of tensors.

    g = factor * gradient;  p <- p (1 - lr weight_decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
    p <- p - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + eps).  `step` counts from 1.
    """

    name = "adamw_update"
    inputs = ("parameters*", "gradients*", "first_moments*", "second_moments*", "lr", "step", "factor?")
    outputs = ("parameters*", "first_moments*", "second_moments*")
    wide = ("parameters", "first_moments", "second_moments", "lr", "step", "factor")
    slots = ("parameters", "gradients", "first_moments", "second_moments")
    scalars = ("lr", "step", "factor")

    def reference(self, *tensors: Any, count: int, beta1: float, beta2: float, eps: float, weight_decay: float) -> Any:
        lists, (lr, step, factor) = self.split(tensors, count)
        new: list[list[Any]] = [[], [], []]
        for p, g, m, v in zip(*lists, strict=True):
            g = g if factor is None else g * factor
            p = p - lr * weight_decay * p
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = p - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
            for slot, value in zip(new, (p, m, v), strict=True):
                slot.append(value)
        return [value for slot in new for value in slot]

    def decompose_one(self, tensors: Sequence[Value], scalars: Sequence[Value | None], node: Node) -> Sequence[Value]:
        (p, g, m, v), (lr, step, factor) = tensors, scalars
        assert lr is not None and step is not None
        settings = node.attributes
        beta1, beta2 = settings["beta1"], settings["beta2"]
        g = cast(g, p.spec.dtype)
        g = g if factor is None else multiply(g, factor)
        m = add_values(scale(m, beta1), scale(g, 1 - beta1))
        v = add_values(scale(v, beta2), scale(multiply(g, g), 1 - beta2))
        corrected_m = divide(m, _bias_correction(beta1, step))
        corrected_v = divide(v, _bias_correction(beta2, step))
        denominator = add_values(sqrt(corrected_v), full(p.graph, _SCALAR, settings["eps"]))
        decay = multiply(p, scale(lr, settings["weight_decay"]))
        return [subtract(subtract(p, decay), multiply(divide(corrected_m, denominator), lr)), m, v]

    def cases(self) -> Sequence[Case]:
        settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        shapes = ((4, 8), (257,))
        return [
            Case((*shapes * 4, (), (), factor), {"count": 2, **settings}, positive=ADAMW_POSITIVE)
            for factor in ((), None)
        ]


# Names of the flattened inputs of a two-tensor case that must be positive: both second moments and the scalars.
ADAMW_POSITIVE = ("second_moments.0", "second_moments.1", "lr", "step", "factor")


def _bias_correction(beta: float, step: Value) -> Value:
    """1 - beta^step as a tensor."""
    from math import log

    from ttrain.ops.elementwise import exp

    return (
        subtract(full(step.graph, _SCALAR, 1.0), exp(scale(step, log(beta))))
        if beta
        else full(step.graph, _SCALAR, 1.0)
    )


@declare
class SGDUpdate(OptimizerUpdate):
    """Stochastic gradient descent in torch.optim.SGD's form (dampening 0), on a group of tensors.

    g = factor * gradient + weight_decay * p;  u <- momentum u + g;  p <- p - lr (g + momentum u if nesterov else u).
    Without momentum the velocities are absent and u is g.
    """

    name = "sgd_update"
    inputs = ("parameters*", "gradients*", "velocities*", "lr", "factor?")
    outputs = ("parameters*", "velocities*")
    wide = ("parameters", "velocities", "lr", "factor")
    slots = ("parameters", "gradients", "velocities")
    scalars = ("lr", "factor")

    def split(self, items: Sequence[Any], count: int) -> tuple[list[list[Any]], list[Any]]:
        plain = len(items) == 2 * count + len(self.scalars)
        end = count * (2 if plain else 3)
        return [list(items[start : start + count]) for start in range(0, end, count)], list(items[end:])

    def infer(self, *specs: TensorSpec, count: int, **attributes: Any) -> Sequence[TensorSpec]:
        lists, _ = self.split(specs, count)
        for tensors in zip(*lists, strict=True):
            self.require(len({spec.shape for spec in tensors}) == 1, f"{tensors}", "one shape per parameter")
        return [*lists[0], *(lists[2] if len(lists) == 3 else [])]

    def aliases(self, node: Node) -> dict[int, int]:
        count = node.attributes["count"]
        plain = {item: item for item in range(count)}
        return plain if len(node.outputs) == count else {**plain, **{count + i: 2 * count + i for i in range(count)}}

    def reference(self, *tensors: Any, count: int, momentum: float, nesterov: bool, weight_decay: float) -> Any:
        lists, (lr, factor) = self.split(tensors, count)
        parameters, velocities = [], []
        for index, (p, g) in enumerate(zip(lists[0], lists[1], strict=True)):
            g = (g if factor is None else g * factor) + weight_decay * p
            if len(lists) == 3:
                velocity = momentum * lists[2][index] + g
                velocities.append(velocity)
                g = g + momentum * velocity if nesterov else velocity
            parameters.append(p - lr * g)
        return parameters + velocities

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        settings = node.attributes
        lists, (lr, factor) = self.split(inputs, settings["count"])
        parameters, velocities = [], []
        for index, (p, g) in enumerate(zip(lists[0], lists[1], strict=True)):
            g = cast(g, p.spec.dtype)
            g = g if factor is None else multiply(g, factor)
            g = add_values(g, scale(p, settings["weight_decay"])) if settings["weight_decay"] else g
            if len(lists) == 3:
                velocity = add_values(scale(lists[2][index], settings["momentum"]), g)
                velocities.append(op("assign").record(lists[2][index], velocity))
                g = add_values(g, scale(velocity, settings["momentum"])) if settings["nesterov"] else velocity
            parameters.append(op("assign").record(p, subtract(p, multiply(g, lr))))
        return parameters + velocities

    def cases(self) -> Sequence[Case]:
        shapes = ((4, 8), (257,))
        cases = [
            Case((*shapes * 2, (), ()), _sgd(0.0, False, 0.1)),
            Case((*shapes * 2, (), None), _sgd(0.0, False, 0.0)),
        ]
        return cases + [Case((*shapes * 3, (), ()), _sgd(0.9, nesterov, 0.1)) for nesterov in (False, True)]


def _sgd(momentum: float, nesterov: bool, weight_decay: float) -> dict[str, Any]:
    return {"count": 2, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}


@declare
class Refresh(_Update):
    """copies <- parameters, rounded to the copies' dtype: the compute-dtype copies of fp32 master weights."""

    name = "refresh"
    inputs = ("copies*", "parameters*")
    outputs = ("copies*",)
    wide = ("parameters",)

    def infer(self, *specs: TensorSpec, count: int) -> Sequence[TensorSpec]:
        pairs = zip(specs[:count], specs[count:], strict=True)
        self.require(all(copy.shape == spec.shape for copy, spec in pairs), f"{specs}", "equal shapes in pairs")
        return specs[:count]

    def aliases(self, node: Node) -> dict[int, int]:
        return {index: index for index in range(node.attributes["count"])}

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, *tensors: Any, count: int) -> Any:
        return list(tensors[count:])

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        count = node.attributes["count"]
        new = []
        for copy, parameter in zip(inputs[:count], inputs[count:], strict=True):
            assert copy is not None and parameter is not None
            new.append(op("assign").record(copy, cast(parameter, copy.spec.dtype)))
        return new

    def cases(self) -> Sequence[Case]:
        return [Case(((4, 8), (257,), (4, 8), (257,)), {"count": 2}), Case(((3,), (3,)), {"count": 1})]


def assign(state: Value, value: Value) -> Value:
    """Overwrite a state value; returns the state's new value."""
    return op("assign").record(state, value)


def accumulate(state: Value, value: Value) -> Value:
    """Add to a state value in place; returns the state's new value."""
    return op("accumulate").record(state, value)


def clip_factor(norm: Value, limit: float) -> Value:
    """The factor that brings a global norm down to `limit`, at most 1."""
    return op("clip_factor").record(norm, limit=float(limit))
