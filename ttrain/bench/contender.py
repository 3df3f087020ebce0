"""What takes part in a benchmark: something that can be built and then does one optimizer step after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class Contender(ABC):
    """One way to do the case. `build` is everything before the first step except what a first step does lazily."""

    name: str
    side: str  # "ttrain" or "PyTorch"
    description: str  # what exactly runs, for the result file

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def step(self, number: int) -> Any:
        """One optimizer step, numbered from 1. Returns a handle of its loss; may return before the device is done."""

    @abstractmethod
    def loss(self, handle: Any) -> float:
        """The loss behind a handle, waiting for it."""

    @abstractmethod
    def weight(self, path: str) -> np.ndarray:
        """A copy of one parameter by our path, fp32."""

    def synchronize(self) -> None:
        """Wait until all steps are done."""

    def rest(self) -> None:
        """Its turn is over."""

    def planned_bytes(self) -> int | None:
        """Peak memory that was planned; None for who plans nothing."""
        return None

    def facts(self) -> dict[str, Any]:
        """What else it tells about itself, such as counters."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""


def compiles(name: str) -> bool:
    """Whether a contender makes machine code that is cached on disk, so that a cold start differs from a warm one."""
    return name in ("traced", "compile", "compile_all")


def ranks_name(name: str, mode: str, count: int) -> str:
    """The contender that is an engine, or a way of PyTorch, in so many processes."""
    return f"{name} {mode} x{count}"
