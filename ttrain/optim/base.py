"""The interface of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ttrain.core.spec import TensorSpec
from ttrain.graph import Case, cases, op
from ttrain.nn.initialize import Constant
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule
from ttrain.optim.settings import OptimizerConfig

STEP = "step"  # step input fp32 []: number of this update, counted from 1
ROUNDING_SEED = "rounding_seed"  # step input int64 []: what stochastic rounding draws from
EXAMPLE = Parameter((4, 8), Constant(0.0))  # what the generated tests update
AVERAGE = "average"  # slot that evaluations read in the place of its parameter, see averages.py
STREAMS = 8  # of random bits that one update may use: one for each tensor it writes per parameter


Settings = TypeVar("Settings", bound=OptimizerConfig)


class Optimizer(ABC, Generic[Settings]):
    """Says by which rule each parameter is updated. Holds no tensors.

    A rule's slots lie in the state as `<parameter path>/<slot>`, start at zero and have the parameter's shape; they are
    fp32 unless the run keeps them in bf16. Parameters of one rule, learning rate and dtype share one update.
    """

    def __init__(self, config: Settings) -> None:
        self.config = config

    @abstractmethod
    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        """The rule of a parameter, with weight decay where it `decays`."""


def rule_cases(rule: Rule, positive: Sequence[int] = (), shape: tuple[int, ...] = EXAMPLE.shape) -> None:
    """Let the generated tests run a rule on every device; `positive` numbers slots that are never negative."""
    if not rule.whole:
        _update_cases(rule, positive)
    slots = [rule.slot_spec(slot, TensorSpec(shape)).shape for slot in rule.slots]
    above = (*(rule.body.inputs[2 + number] for number in positive), "lr", "step")
    cases(rule.body, Case((shape, shape, *slots, (), ()), dict(rule.settings), positive=above))


def _update_cases(rule: Rule, positive: Sequence[int]) -> None:
    """Op update with a rule, on two tensors: with and without factor, copies, and state in bf16.

    What is read and written so is the same for every rule, so that the first with that many slots is tested in each
    way, and the others in the fullest and in the plainest.
    """
    update, lists = op("update"), 2 + len(rule.slots)
    above = ("lr", "step", "factor", *(f"slots.{2 * slot + item}" for slot in positive for item in range(2)))
    slots = [f"slots.{number}" for number in range(2 * len(rule.slots) + 2)]
    state, copies = ("parameters.0", "parameters.1", *slots[:-2]), tuple(slots[-2:])
    every = tuple(range(len(rule.slots) + 1))
    ways: list[tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = [
        ((), None, {}, ()),
        (None, None, {}, ()),
        ((), None, {"copies": True}, copies),
        (None, None, {}, state),
        ((), (), {"stochastic": every, "stream": 8}, state),
        ((), (), {"stochastic": every, "stream": 16, "copies": True}, (*state, *copies)),
    ]
    tested = any(len(case.attributes["rule"].slots) == len(rule.slots) for case in update.cases)
    for factor, seed, more, narrow in (ways[0], ways[-1]) if tested else ways:
        given = (*((4, 8), (257,)) * (lists + more.get("copies", False)), (), (), factor, seed)
        cases(update, Case(given, {"rule": rule, "count": 2, **more}, {"seed": 2**62}, above, narrow=narrow))
