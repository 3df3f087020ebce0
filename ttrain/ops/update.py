"""Ops of the update stage: gradient accumulation, clipping and the optimizers. They overwrite state in place.

The optimizer ops take whole groups of tensors at once, so a device may run one kernel over a flat arena.
Learning rate, step number and clip factor are tensors: a captured step can be replayed while they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import add as add_values
from ttrain.ops.elementwise import cast, divide, full, multiply, scale, sqrt, subtract

_SCALAR = TensorSpec((), DType.FP32)


class _Update(Op):
    family = "update"
    differentiable = False


class _ToState(_Update):
    """Overwrites one state tensor with something made of a value of its shape."""

    inputs = ("state", "value")
    outputs = ("new_state",)
    wide = ("state",)
    mutates = {"new_state": "state"}

    def infer(self, state: TensorSpec, value: TensorSpec) -> TensorSpec:
        self.require(state.shape == value.shape, f"{state} and {value}", "equal shapes")
        return state

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape)) for shape in ((4, 8), (257,), ())]


@declare
class Assign(_ToState):
    """state <- value (rounded to the state's dtype). Plans usually let value's kernel write there directly."""

    name = "assign"

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, state: Any, value: Any) -> Any:
        return value.to(state.dtype)


@declare
class Accumulate(_ToState):
    """state <- state + value."""

    name = "accumulate"

    def reference(self, state: Any, value: Any) -> Any:
        return state + value


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
    """inputs: `slots` lists of `count` tensors each, then scalars. Every list but the gradients is overwritten.

    The last `optional` slots may be absent.
    """

    slots: ClassVar[tuple[str, ...]]
    scalars: ClassVar[tuple[str, ...]]
    optional = 0

    def split(self, items: Sequence[Any], count: int) -> tuple[list[list[Any]], list[Any]]:
        """Items of all inputs -> one list per slot that is there, and the scalars."""
        end = len(items) - len(self.scalars)
        return [list(items[start : start + count]) for start in range(0, end, count)], list(items[end:])

    def written(self, lists: Sequence[Any]) -> list[int]:
        """Numbers of the slots that are overwritten, of those that are there."""
        return [index for index, name in enumerate(self.slots[: len(lists)]) if name != "gradients"]

    def infer(self, *specs: TensorSpec, count: int, **attributes: Any) -> Sequence[TensorSpec]:
        scalars, most = len(self.scalars), len(self.slots)
        fits = [lists * count + scalars for lists in range(most - self.optional, most + 1)]
        self.require(len(specs) in fits, f"{len(specs)} inputs", f"{most} lists of {count} and {scalars} scalars")
        lists, _ = self.split(specs, count)
        for tensors in zip(*lists, strict=True):
            self.require(len({spec.shape for spec in tensors}) == 1, f"{tensors}", "one shape per parameter")
        return [spec for index in self.written(lists) for spec in lists[index]]

    def aliases(self, node: Node) -> dict[int, int]:
        count = node.attributes["count"]
        lists, _ = self.split(node.inputs, count)
        return {
            position * count + item: slot * count + item
            for position, slot in enumerate(self.written(lists))
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
            old = [tensors[index] for index in self.written(tensors)]
            results.append([op("assign").record(state, value) for state, value in zip(old, new, strict=True)])
        return [new for slot in zip(*results, strict=True) for new in slot]


@declare
class AdamWUpdate(OptimizerUpdate):
    """AdamW (Loshchilov and Hutter, 2019) in torch.optim.AdamW's form, on a group of tensors.

    g = factor * gradient;  p <- p (1 - lr weight_decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
    p <- p - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + eps).  `step` counts from 1.
    """

    name = "adamw_update"
    inputs: ClassVar[tuple[str, ...]] = (
        "parameters*",
        "gradients*",
        "first_moments*",
        "second_moments*",
        "lr",
        "step",
        "factor?",
    )
    outputs = ("parameters*", "first_moments*", "second_moments*")
    wide: ClassVar[tuple[str, ...]] = ("parameters", "first_moments", "second_moments", "lr", "step", "factor")
    slots = ("parameters", "gradients", "first_moments", "second_moments")
    scalars: ClassVar[tuple[str, ...]] = ("lr", "step", "factor")

    def reference(self, *tensors: Any, count: int, **settings: Any) -> Any:
        beta1, beta2, eps, weight_decay = (settings[key] for key in ("beta1", "beta2", "eps", "weight_decay"))
        lists, (lr, step, factor, *_) = self.split(tensors, count)
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
    inputs: ClassVar[tuple[str, ...]] = ("parameters*", "gradients*", "velocities*", "lr", "factor?")
    outputs = ("parameters*", "velocities*")
    wide: ClassVar[tuple[str, ...]] = ("parameters", "velocities", "lr", "factor")
    slots = ("parameters", "gradients", "velocities")
    scalars: ClassVar[tuple[str, ...]] = ("lr", "factor")
    optional = 1

    def reference(self, *tensors: Any, count: int, **settings: Any) -> Any:
        momentum, nesterov, weight_decay = (settings[key] for key in ("momentum", "nesterov", "weight_decay"))
        lists, (lr, factor, *_) = self.split(tensors, count)
        parameters, velocities = [], []
        for p, g, *u in zip(*lists, strict=True):
            g = (g if factor is None else g * factor) + weight_decay * p
            if u:
                velocities.append(momentum * u[0] + g)
                g = g + momentum * velocities[-1] if nesterov else velocities[-1]
            parameters.append(p - lr * g)
        return parameters + velocities

    def decompose_one(self, tensors: Sequence[Value], scalars: Sequence[Value | None], node: Node) -> Sequence[Value]:
        (p, g, *u), (lr, factor), settings = tensors, scalars, node.attributes
        assert lr is not None
        g = cast(g, p.spec.dtype)
        g = g if factor is None else multiply(g, factor)
        g = add_values(g, scale(p, settings["weight_decay"])) if settings["weight_decay"] else g
        velocity = [add_values(scale(old, settings["momentum"]), g) for old in u]
        for new in velocity:
            g = add_values(g, scale(new, settings["momentum"])) if settings["nesterov"] else new
        return [subtract(p, multiply(g, lr)), *velocity]

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
