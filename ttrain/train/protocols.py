"""What the loop needs from the layers below, as structural types: an engine's step and state, a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ttrain.core.spec import TensorSpec

Inputs = Mapping[str, "np.ndarray | float | int"]
Outputs = Mapping[str, "float | np.ndarray"]


class Step(Protocol):
    """A built step: inputs by name to metrics and outputs by name."""

    def __call__(self, inputs: Inputs) -> Outputs: ...


class State(Protocol):
    """Parameters by module path, optimizer state by `<parameter path>/<name>`."""

    def names(self) -> list[str]: ...
    def spec(self, name: str) -> TensorSpec: ...
    def read(self, name: str) -> np.ndarray: ...
    def write(self, name: str, array: np.ndarray) -> None: ...
    def kind(self, name: str) -> str: ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocabulary: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Dataset(Protocol):
    """Batches as a pure function of (seed, index, rank)."""

    description: dict[str, Any]

    def batch(
        self, split: Literal["train", "val"], seed: int, index: int, rows: int, rank: int = 0, world: int = 1
    ) -> dict[str, np.ndarray]: ...
    def val_batches(self, rows: int) -> int: ...
