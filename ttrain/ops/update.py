"""Ops of the update stage: gradient accumulation, clipping, and one op that applies the rule of any optimizer.

Learning rate, step number, clip factor and seed are tensors: a captured step can be replayed while they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import split_update
from ttrain.graph import REGISTRY, Case, Node, Op, RecordSide, Value, cases, composite, declare, op, primitive, require
from ttrain.graph.composite import Composite, Probe, specs_of
from ttrain.ops.elementwise import at_least, cast, free
from ttrain.ops.program import Program, program_of, record

P = ParamSpec("P")
R = TypeVar("R")
_SCALAR = TensorSpec((), DType.FP32)
_STREAMS_OF_HOST = 1 << 20  # more than the updates of a step have: the sides of one draw different bits
_PROBED = 2  # elements that a rule is recorded on, to see what it is made of


_INTO_STATE: Mapping[str, Any] = {
    "shapes": "state any [...], value any [...]",
    "outputs": ("new_state",),
    "accumulation": ("state",),
    "mutates": {"new_state": "state"},
}


@primitive(**_INTO_STATE, flops=free, reference=lambda state, value: value.to(state.dtype))
def assign(state: Value, value: Value) -> TensorSpec:
    """state <- value (rounded to the state's dtype). Plans usually let value's kernel write there directly."""
    return state.spec


@primitive(**_INTO_STATE, reference=lambda state, value: state + value)
def accumulate(state: Value, value: Value) -> TensorSpec:
    """state <- state + value."""
    return state.spec


cases(assign, Case())
cases(accumulate, Case())


@composite("norm accumulation []", outputs=("factor",), differentiable=False)
def clip_factor(norm: Value, limit: float) -> Value:
    """factor = min(1, limit / (norm + 1e-6)) as of torch.nn.utils.clip_grad_norm_; norm and factor []."""
    return limit / at_least(norm + 1e-6, limit)


cases(clip_factor, *(Case(((),), {"limit": limit}, positive=("norm",)) for limit in (1.0, 0.01, 1e4)))


def update_rule(body: Callable[P, R]) -> Composite[P, R]:
    """Decorator of an optimizer's rule; see Rule.

    The function takes (parameter, gradient, one value per slot, lr, step, settings) and returns the new parameter and
    slots.
    """
    made: Composite[P, R] = Composite(body, family="rule", differentiable=False)
    made.accumulation, slots = made.inputs, made.inputs[2:-2]
    made.outputs = ("parameter", *slots)
    return declare(made)


@dataclass(frozen=True)
class Rule:
    """The rule by which one optimizer updates one kind of parameter.

    `name` is a composite (parameter, gradient, one value per slot, lr, step) -> (new parameter, new slots): elementwise
    over tensors of one shape, with lr and step fp32 [], the step counted from 1. It computes in fp32, and turns zeros
    into zeros. `slots` names the tensors that it keeps for a parameter, which start at zero; `settings` are the
    composite's attributes as (name, value) pairs.

    With `apply` it is no loop over elements but for whole tensors: any ops, on the gradient in the dtype that layers
    compute in, and what it returns first is a direction. That rule, elementwise and without slots, takes that in place
    of the gradient. `fp32_slots` stay fp32, each with the axis along which it has size 1 (None: no axis).
    """

    name: str
    slots: tuple[str, ...] = ()
    settings: tuple[tuple[str, float], ...] = ()
    apply: Rule | None = None
    fp32_slots: tuple[tuple[str, int | None], ...] = ()

    @property
    def whole(self) -> bool:
        """True if it needs whole tensors, so that a flat parameter can't be cut anywhere."""
        return self.apply is not None

    def slot_spec(self, slot: str, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a slot; `spec` is that of a slot which follows the parameter."""
        axes = dict(self.fp32_slots)
        if slot not in axes:
            return spec
        along = axes[slot]
        dropped = None if along is None else along % spec.rank
        return TensorSpec(tuple(1 if axis == dropped else size for axis, size in enumerate(spec.shape)))

    @property
    def body(self) -> Composite[..., Any]:
        """The composite. Raises GraphError where none has that name, or one that is no rule for these slots."""
        found = REGISTRY.get(self.name)
        if not isinstance(found, Composite) or len(found.inputs) != len(self.slots) + 4:
            slots = f"{len(self.slots)} slots"
            raise GraphError(f"rule {self.name!r}: expected a composite of parameter, gradient, {slots}, lr and step.")
        return found

    @cached_property
    def program(self) -> tuple[Program, tuple[int, ...]]:
        """Primitives on (parameter, gradient, slots, lr, step), and which steps make the new parameter and slots."""
        return program_of(self.body, self._specs(), dict(self.settings))

    @cached_property
    def alone(self) -> list[bool]:
        """True for each input and step of the program that is made of lr and step alone."""
        found = [False] * (2 + len(self.slots)) + [True] * 2
        for name, operands, _ in self.program[0]:
            found.append(name == "full" or all(found[item] for item in operands))
        return found

    @cached_property
    def flops(self) -> int:
        """Floating-point operations per element, the clip factor's with them."""
        nodes = self.body.probe(self._specs(), dict(self.settings)).graph.nodes
        return 1 + sum(node.op.flops(node) // _PROBED for node in nodes if node.outputs[0].shape)

    def _specs(self) -> list[TensorSpec]:
        return [TensorSpec((_PROBED,))] * (2 + len(self.slots)) + [_SCALAR] * 2

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.settings)})"


class Update(Op):
    """One rule on a list of parameters, so that a device may run one kernel over all of them.

    inputs: `count` parameters, their gradients, `count` tensors for each slot, with `copies` also the parameters'
    copies in the compute dtype; then lr and step, fp32 []; factor fp32 [] that gradients are multiplied by; seed
    int64 []. All but gradients and scalars is overwritten.

    Parameters of int16 are low bits, what fp32 weights have beyond their bf16 copies: a weight's bits are its copy's
    times 2^16 plus the low bits, which are the weight's lower half, read with a sign. So copies take no memory of their
    own. The copy is the nearest bf16 number, of two as near the one of greater magnitude. (The even one it can't be:
    then 65,537 weights would have the same copy, half a unit below it to half a unit above, and 16 bits tell fewer
    apart.)

    State that is kept in bf16 is updated in fp32 and rounded: to nearest, or where `stochastic` numbers its list (0 the
    parameters, 1 the first slot) up or down at random. A bf16 number has 8 significant bits. Rounded to nearest, a
    change smaller than 2^-9 of a number is lost every time: a second moment with beta2 = 0.999 shrinks by at most 2^-10
    of itself in a step, so it would never decay again. Stochastic rounding goes up with the probability of the part
    that is cut off: its mean is the exact number (Gupta et al., "Deep Learning with Limited Numerical Precision",
    2015). The random bits are a hash of (seed, stream, element), as a dropout mask's are: 16 of them are added to the
    16 that bf16 has no room for, so they are the same on every engine and after a resume. An element's number counts
    the tensors of a list side by side, as core.spec.flat_offsets lays them, or from `numbers[i]` on for tensor i; a
    list's stream is `stream` plus its number.
    """

    name = "update"
    family = "update"
    inputs = ("parameters*", "gradients*", "slots*", "lr", "step", "factor?", "seed?")
    outputs = ("written*",)
    accumulation = ("parameters", "slots", "lr", "step", "factor")
    differentiable = False

    def infer(self, *specs: TensorSpec, rule: Rule, count: int, **attributes: Any) -> Sequence[TensorSpec]:
        written = 1 + len(rule.slots)
        lists = written + 1 + attributes.get("copies", False)
        complete = len(specs) == lists * count + 4
        require(complete, "update", f"{len(specs)} inputs", f"{lists} lists of {count} and 4 scalars")
        whole = attributes.get("copies", False) or specs[0].dtype is not DType.INT16
        require(whole, "update", "low bits without copies", "copies=True")
        for position in range(count):
            tensors = specs[position : lists * count : count]
            require(len({spec.shape for spec in tensors}) == 1, "update", f"{tensors}", "one shape per parameter")
        stochastic = attributes.get("stochastic", ())
        require(set(stochastic) <= set(range(written)), "update", f"{stochastic=}", f"numbers below {written}")
        wanted = TensorSpec((), DType.INT64) if stochastic else None
        require(specs[-1] == wanted, "update", f"seed {specs[-1]} for {stochastic=}", "int64[] where a list is named")
        return [*specs[:count], *specs[2 * count : -4]]

    def aliases(self, node: Node) -> dict[int, int]:
        count = node.attributes["count"]
        return {index: index if index < count else index + count for index in range(len(node.outputs))}

    def flops(self, node: Node) -> int:
        count, rule = node.attributes["count"], node.attributes["rule"]
        each = rule.flops + 12 * len(node.attributes.get("stochastic", ()))
        return each * sum(value.spec.size for value in node.values[:count])

    def by_side(
        self, inputs: Sequence[Value | None], attributes: Mapping[str, Any], record: RecordSide
    ) -> Sequence[Value] | None:
        """The parameters of each side with what belongs to them."""
        count, (*lists, scalars) = attributes["count"], split_update(inputs, attributes["count"])
        on_host = [parameter is not None and parameter.on_host for parameter in lists[0]]
        if len(set(on_host)) == 1:
            return None
        written: list[Value | None] = [None] * (count * (len(lists) - 1))
        for side in (False, True):
            members = [index for index, there in enumerate(on_host) if there is side]
            own = {**attributes, "count": len(members)}
            if side and attributes.get("stochastic"):
                own["stream"] = attributes.get("stream", 0) + _STREAMS_OF_HOST
            made = record([values[index] for values in lists for index in members] + [*scalars], own, side)
            for number, value in enumerate(made):
                written[number // len(members) * count + members[number % len(members)]] = value
        return [value for value in written if value is not None]

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        """Not rounded: a result is one of the two bf16 numbers beside it."""
        return Probe.of(partial(self._steps, attributes), specs_of(tensors)).run(tensors)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        rounds = node.attributes.get("stochastic") or node.values[0].spec.dtype is DType.INT16
        return None if rounds else self._steps(node.attributes, inputs)

    def _steps(self, attributes: Mapping[str, Any], inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        """Record the update, without stochastic rounding."""
        rule, (*lists, (lr, step, factor, _)) = attributes["rule"], split_update(inputs, attributes["count"])
        assert lr is not None and step is not None
        program, results = rule.program
        new = []
        for parameter, gradient, *states in zip(*lists, strict=True):
            assert parameter is not None and gradient is not None
            gradient = cast(gradient, DType.FP32)
            gradient = gradient if factor is None else gradient * factor
            slots = [cast(slot, DType.FP32) for slot in states[: len(rule.slots)] if slot is not None]
            written = record(program, results, [cast(parameter, DType.FP32), gradient, *slots, lr, step])
            written = [*written, *([written[0]] if attributes.get("copies") else [])]
            pairs = zip([parameter, *states], written, strict=True)
            new.append([assign(state, cast(value, state.spec.dtype)) for state, value in pairs if state is not None])
        return [value for written in zip(*new, strict=True) for value in written]


declare(Update())


def update(
    rule: Rule,
    lists: Sequence[Sequence[Value]],
    lr: Value,
    step: Value,
    factor: Value | None = None,
    seed: Value | None = None,
    **attributes: Any,
) -> list[Value]:
    """Apply a rule to lists of equal length: parameters, gradients, each slot, and perhaps copies. See the op.

    Returns the new parameters.
    """
    count = len(lists[0])
    chosen = {name: value for name, value in attributes.items() if value}
    inputs = [*(value for values in lists for value in values), lr, step, factor, seed]
    return list(op("update").record(*inputs, rule=rule, count=count, **chosen)[:count])
