"""Out of memory: what a step needs by class, which keys shrink it, and the config with half the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttrain.core.units import format_bytes
from ttrain.optim.settings import OptimizerConfig
from ttrain.train.forecast.step_cost import state_bytes
from ttrain.train.settings import TrainConfig

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
    train: TrainConfig,
    model: Any,
    precision: str,
    engine: str,
    optimizer: OptimizerConfig | None = None,
    chips: int = 1,
) -> list[str]:
    """Overrides, the one that changes least first."""
    keys = []
    smaller = shrunk(train, chips)
    if smaller is not None:
        rows = smaller.batch_size // smaller.gradient_accumulation
        keys.append(f"train.gradient_accumulation={smaller.gradient_accumulation} (a micro-batch of {rows})")
    if engine == "dynamic":
        keys.append("engine=static")
    if getattr(model, "recompute", None) == "none":
        keys.append("model.recompute=block")
    if precision == "fp32":
        keys.append("precision=bf16")
    keeps = optimizer is not None and getattr(optimizer, "momentum", None) != 0  # plain SGD keeps nothing
    if optimizer is not None and keeps and optimizer.state_dtype is None and precision != "bf16_true":
        keys.append("optimizer.state_dtype=bf16")
    if getattr(model, "context", None):
        keys.append("a smaller model.context")
    return [*keys, "a smaller model"]


def shrunk(train: TrainConfig, chips: int = 1) -> TrainConfig | None:
    """Half the micro-batch and twice the accumulation: the same sum of gradients.

    None where it can't be halved, or shared by the chips then.
    """
    gradient_accumulation = 2 * train.gradient_accumulation
    if train.batch_size % (gradient_accumulation * chips):
        return None
    return replace(train, gradient_accumulation=gradient_accumulation)
