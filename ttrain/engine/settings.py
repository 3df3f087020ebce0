"""Small config of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule
from ttrain.device.info import info_of


@dataclass
class EngineConfig:
    """Settings of the engine, which runs the steps."""

    name: str = option("auto", "name of the engine; auto is traced where the device compiles or captures, else static")
    rematerialize: bool = option(True, "static and traced: recompute cheap elementwise activations in backward")

    def lacks_invariance(self, device: Any) -> str | None:
        """Return what device.batch_invariant needs and is not there; None where all is."""
        lacking: str | None = info_of(device).lacks_invariance(device)
        if lacking is None and self.name != "traced":
            lacking = f"engine=traced and a compiler (g++ or clang++), not engine={self.name}"
        if lacking is None and device.matmul not in ("auto", "own"):
            lacking = f"device.matmul=own, not {device.matmul}"
        return lacking

    @rule
    def _invariant(self, others: Any) -> Iterator[str]:
        if others.device.batch_invariant and (lacking := self.lacks_invariance(others.device)) is not None:
            yield f"device.batch_invariant=true: needs {lacking}. Leave the key out, or give that."
