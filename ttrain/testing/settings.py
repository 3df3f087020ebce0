"""Small config of task=verify."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class VerifyConfig:
    """Settings of task=verify, which compares ops and models with PyTorch in fp64."""

    ops: list[str] = option([], "names or families of ops; empty takes all, none takes no op", one=True)
    model: bool = option(True, "verify the gradients of the configured model too")
    rows: int = option(2, "sequences or examples of the model's batch", minimum=1)
    engines: str = option(
        "one", "one is the configured engine; all compares every engine",
        choices=("one", "all"),
    )  # fmt: skip
    tolerance: float = option(1.0, "factor on every allowed error", above=0)
    json: str | None = option(None, "file to write every comparison into", path=True)
