"""What an optimizer is to the rest of ttrain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Value
from ttrain.graph.op import op
from ttrain.optim.settings import OptimizerConfig

SCALAR = TensorSpec((), DType.FP32)
STEP = "step"  # step input fp32 []: number of this update, counted from 1
ROUNDING_SEED = "rounding_seed"  # step input int64 []: what stochastic rounding draws from
STREAMS = 8  # of random bits that one update may use: one for each tensor it writes per parameter


@dataclass(frozen=True)
class Rounding:
    """That an update's results are rounded to bf16 where they are kept so: see ops/rounded.py.

    `seed` int64 [] is None where all is rounded to nearest. `stream` is a number of STREAMS that nobody else uses.
    """

    seed: Value | None
    stream: int
    parameters: bool  # whether parameters are rounded stochastically
    moments: bool  # whether the optimizer's tensors are


@dataclass(frozen=True)
class Group:
    """Parameters that are updated together, and what their update reads.

    `state` holds one list per slot. `lr`, `step` and `factor` (what gradients are multiplied by, such as the clip
    factor) are fp32 [] on the device. `decays` tells whether weight decay applies. `rounding` is None where parameters
    and state are all of one dtype and rounded to nearest.
    """

    parameters: Sequence[Value]
    gradients: Sequence[Value]
    state: Mapping[str, Sequence[Value]]
    lr: Value
    step: Value
    factor: Value | None
    decays: bool
    rounding: Rounding | None = None


class Optimizer(Protocol):
    """Records the update of a group of parameters. Holds no tensors.

    `slots` names the tensors kept per parameter. They lie in the state as `<parameter path>/<slot>`, start at zero and
    have the parameter's shape; they are fp32 unless the run keeps them in bf16. A true attribute `rounds` tells that
    `update` minds `Group.rounding`; without it a run that needs that is refused.
    """

    config: OptimizerConfig
    slots: tuple[str, ...]

    def update(self, group: Group) -> list[Value]:
        """New values of the parameters; the tensors of the state are overwritten."""
        ...


def record_update(
    name: str, group: Group, slots: Sequence[str], scalars: Sequence[Value | None], **settings: Any
) -> list[Value]:
    """The op `<name>_update` on a group, or `<name>_rounded` where it is rounded; new values of the parameters.

    `scalars` are what the op reads after its lists.
    """
    lists = [group.parameters, group.gradients, *(group.state[slot] for slot in slots)]
    inputs = [*(value for values in lists for value in values), *scalars]
    count, rounding = len(group.parameters), group.rounding
    if rounding is None:
        outputs = op(f"{name}_update").record(*inputs, count=count, **settings)
    else:
        operation = op(f"{name}_rounded")
        written = [declared.rstrip("*") for declared in operation.outputs]
        stochastic = written if rounding.moments else []
        stochastic = written[:1] * rounding.parameters + stochastic[1:]
        outputs = operation.record(
            *inputs, rounding.seed, count=count, stochastic=tuple(stochastic), stream=rounding.stream, **settings
        )
    return list(outputs[:count]) if isinstance(outputs, tuple) else [outputs]
