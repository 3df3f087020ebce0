"""Memory: its amount, the largest micro-batch and context that fit, and the keys that reduce the need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ttrain.core.files import text_of
from ttrain.core.units import format_bytes
from ttrain.optim.settings import OptimizerConfig
from ttrain.train.forecast.step_cost import state_bytes
from ttrain.train.settings import TrainConfig

TRIES = 14  # plans per limit, at most
CEILING = 2**20
CLOSE = 0.95  # of the memory: a plan above it has little room for what is in no plan


@dataclass(frozen=True)
class Limit:
    """The largest `value` of what was varied, and the bytes that its plan takes; 0 where not even the least fits."""

    value: int
    nbytes: int
    capped: bool = False  # more would fit


def largest(needed: Callable[[int], int], start: int, available: int, step: int = 1, ceiling: int = CEILING) -> Limit:
    """The largest multiple of `step` up to `ceiling` whose plan fits, to about 2 %.

    `needed(value)` plans it and gives its bytes, which grow with the value. Larger ones are planned until one does not
    fit, then the middle between the largest that fits and the least that does not.
    """
    fits, over, value = Limit(0, 0), ceiling + step, _multiple(start, step)
    for _ in range(TRIES):
        nbytes = needed(value)
        if nbytes <= available:
            fits = Limit(value, nbytes, capped=value >= ceiling)
        else:
            over = value
        if fits.capped or over - fits.value <= max(step, fits.value // 50):
            break
        if over > ceiling:
            grown = int(value * min(available / max(nbytes, 1), 16.0))
            value = min(_multiple(max(grown, 2 * value), step), ceiling)
        else:
            value = max(_multiple((fits.value + over) // 2, step), fits.value + step)
    return fits


def _multiple(value: int, step: int) -> int:
    return max(value // step, 1) * step


def device_memory(name: str, index: int = 0) -> tuple[int, str] | None:
    """(bytes, where the number is from) of this machine's own GPU number `index`, or CPU; None if it can't be told."""
    if name in ("cuda", "xpu"):
        import torch

        backend = getattr(torch, name)
        if index >= backend.device_count():
            return None
        return backend.get_device_properties(index).total_memory, "the driver"
    if name not in ("cpu", "mps"):  # a GPU of Apple's shares the memory of the machine
        return None
    limit, total = text_of(Path("/sys/fs/cgroup/memory.max")).strip(), int(psutil.virtual_memory().total)
    bound = limit.isdecimal() and int(limit) < total  # else it is `max`
    return (int(limit), "the limit of this container") if bound else (total, "this machine")


def fit_text(needed: int, available: int, source: str, keys: Sequence[str]) -> str:
    """Return a sentence for people: whether planned bytes fit, and if not, the keys that would take less."""
    room = f"{format_bytes(needed)} of {format_bytes(available)}, {source}"
    if needed <= CLOSE * available:
        return f"It fits: {room}."
    if needed <= available:
        return f"It may fit: {room}, and what the runtime itself takes comes on top. Less take: {', '.join(keys)}."
    return f"It does not fit: {room}. Less take: {', '.join(keys)}. plan.limits=true finds the largest that fits."


def limit_text(limit: Limit, what: str) -> str:
    """A limit for people."""
    if not limit.value:
        return f"none: not even the least {what} fits"
    return f"{limit.value}{' or more' if limit.capped else ''} ({format_bytes(limit.nbytes)})"


# What torch (CPU and CUDA), the runtimes of cards and C++ say where an allocation fails.
_SAYINGS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or an error that it was raised from, says that memory ran out."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError":
            return True
        if isinstance(seen, RuntimeError | OSError) and any(words in str(seen).lower() for words in _SAYINGS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def memory_message(error: BaseException, device: str, steps: Mapping[str, Any], keys: list[str]) -> str:
    """Return a message with the error, the plan's peak by class, and the `keys` that shrink it."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    need = plan_needs(steps) or "How much the step needs was not planned; task=plan tells it."
    return f"Out of memory on {device}: {said}. {need} To need less, give {', or '.join(keys)}."


def plan_needs(steps: Mapping[str, Any]) -> str:
    """A sentence with what the largest plan of the steps needs, by class; empty where nothing was planned."""
    plans = [step.plan for step in steps.values() if getattr(step, "plan", None) is not None]
    if not plans:
        return ""
    peak = max(plans, key=lambda plan: plan.arena_bytes)
    classes = {str(kind): size for kind, size in state_bytes(peak).items() if size}
    classes |= {"values of a step": peak.arena_bytes}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in classes.items())
    return f"The plan needs {format_bytes(sum(classes.values()))}: {listed}."


def shrinking_keys(
    train: TrainConfig, model: Any, precision: str, engine: str, optimizer: OptimizerConfig, chips: int = 1
) -> list[str]:
    """Overrides, the one that changes least first."""
    keys = []
    smaller = shrunk(train, chips)
    if smaller is not None:
        rows = smaller.batch_size // smaller.gradient_accumulation
        keys.append(f"train.gradient_accumulation={smaller.gradient_accumulation} (a micro-batch of {rows})")
    keeps = getattr(optimizer, "momentum", None) != 0  # plain SGD keeps nothing
    ways = {
        "engine=static": engine == "dynamic",
        "model.recompute=block": getattr(model, "recompute", None) == "none",
        "precision=bf16": precision == "fp32",
        "optimizer.state_dtype=bf16": keeps and optimizer.state_dtype is None and precision != "bf16_true",
        "a smaller model.context": getattr(model, "context", None),
    }
    return [*keys, *(key for key, helps in ways.items() if helps), "a smaller model"]


def shrunk(train: TrainConfig, chips: int = 1) -> TrainConfig | None:
    """Half the micro-batch and twice the accumulation: the same sum of gradients.

    None where it can't be halved, or shared by the chips or slices then.
    """
    gradient_accumulation = 2 * train.gradient_accumulation
    if train.batch_size % (gradient_accumulation * chips):
        return None
    return replace(train, gradient_accumulation=gradient_accumulation)
