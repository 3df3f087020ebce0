"""Match the tensors of a checkpoint with those of a state, and settle what only one of the two has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.core.names import listed
from ttrain.engine.state import State
from ttrain.graph.kinds import Kind
from ttrain.optim.base import AVERAGE
from ttrain.optim.groups import frozen

Shapes = Mapping[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class StateMatch:
    """`problem` tells what does not fit, or is None.

    Then `zeros` are tensors of the state that the checkpoint has no values for, `averages` those that start as their
    parameters are, and `notes` what to tell of them.
    """

    problem: str | None
    zeros: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def match(stored: Shapes, wanted: Shapes, state: State, config: Mapping[str, Any]) -> StateMatch:
    """Names and shapes have to be equal, but for the optimizer's tensors of parameters that are frozen on one side.

    A parameter that was frozen when the checkpoint was written (`config` is that run's) starts with zeros, as it would
    in a new run; what is stored for one that is frozen now is left out. Averages may begin and end with any attempt.
    """
    optimizer = {name for name in state.names(Kind.OPTIMIZER) if name in wanted}
    before = {key: _strings(config.get("optimizer"), key) for key in ("freeze", "unfreeze")}
    missing, kept = sorted(optimizer - stored.keys()), {name for name in stored if _averages(name)}
    averages = [name for name in missing if _averages(name)]
    zeros = [name for name in missing if name not in averages and frozen(_parameter(name), **before)]
    trained = {_parameter(name) for name in state.names(Kind.GRADIENT)}
    idle = set(state.names(Kind.PARAMETER)) - trained if trained else set()
    unused = [name for name in sorted(stored.keys() - wanted.keys()) if _parameter(name) in idle or name in kept]
    rest = {name: shape for name, shape in stored.items() if name not in unused}
    needed = {name: shape for name, shape in wanted.items() if name not in zeros and name not in averages}
    if rest != needed:
        return StateMatch(_difference(rest, needed))
    notes = []
    if zeros:
        notes.append(
            f"Frozen until now, so their optimizer state starts from zero: {listed(_parameters(zeros))}. Optimizers "
            "that correct moments by the step's number, such as AdamW, make their first updates larger than usual."
        )
    if averages:
        notes.append("No averages of the weights were kept until now, so they start as the weights are.")
    if kept and not kept & wanted.keys():
        notes.append("Averages of the weights are kept no more; those of the checkpoint are dropped.")
    if unused := [name for name in unused if name not in kept]:
        notes.append(f"Frozen from now on, so what the optimizer kept is dropped: {listed(_parameters(unused))}.")
    return StateMatch(None, tuple(zeros), tuple(averages), tuple(notes))


def _averages(name: str) -> bool:
    return name.endswith(f"/{AVERAGE}")


def _strings(section: Any, key: str) -> list[str]:
    """A list of texts of a config that may be anything."""
    given = section.get(key) if isinstance(section, dict) else None
    return [item for item in given if isinstance(item, str)] if isinstance(given, list) else []


def _parameter(name: str) -> str:
    """The parameter that a tensor of the optimizer or a gradient belongs to."""
    return name.rpartition("/")[0]


def _parameters(names: list[str]) -> list[str]:
    return list(dict.fromkeys(map(_parameter, names)))


def _difference(stored: Shapes, wanted: Shapes) -> str:
    parts = []
    if missing := sorted(wanted.keys() - stored.keys()):
        parts.append(f"it lacks {listed(missing)}")
    if extra := sorted(stored.keys() - wanted.keys()):
        parts.append(f"it also holds {listed(extra)}")
    reshaped = [
        f"{n} {stored[n]} instead of {wanted[n]}" for n in sorted(wanted) if n in stored and stored[n] != wanted[n]
    ]
    if reshaped:
        parts.append(f"other shapes: {listed(reshaped)}")
    return "; ".join(parts) + "."
