"""What the loop needs from the layers below, as structural types: an engine's step and state, a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from ttrain.core.spec import Part, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.kinds import Kind

# All else in the state derives from these, or from the config, or lives for one step.
SAVED_KINDS = (Kind.PARAMETER, Kind.FROZEN, Kind.OPTIMIZER, Kind.BUFFER)

Array = NDArray[Any]
Inputs = Mapping[str, Array | float | int]
Outputs = Mapping[str, Any]  # floats for scalars, arrays otherwise
Look = Callable[[Node, Callable[[Value], Array]], bool]  # see engine.base.Step.inspect


class Step(Protocol):
    """A built step: inputs by name to metrics and outputs by name."""

    @property
    def inputs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def uploads(self) -> Mapping[str, TensorSpec]: ...  # those inputs that are read

    def __call__(self, inputs: Inputs) -> Outputs: ...
    def start(self, inputs: Inputs) -> Callable[[], Outputs]: ...
    def prefetch(self, inputs: Inputs) -> None: ...
    def inspect(self, inputs: Inputs, look: Look, ready: Callable[[], object] | None = None) -> bool: ...


class StateValues(Protocol):
    """Persistent tensors to read: parameters by module path, optimizer state by `<parameter path>/<name>`."""

    def names(self, *kinds: Kind) -> list[str]: ...
    def spec(self, name: str) -> TensorSpec: ...
    def read(self, name: str) -> Array: ...


class DividedState(StateValues, Protocol):
    """Persistent tensors of which ranks may have parts; see engine.state.State."""

    def own_parts(self, name: str) -> list[Part] | None: ...
    def read_part(self, name: str, part: Part) -> Array: ...


class State(StateValues, Protocol):
    """Persistent tensors to read and to write."""

    def write(self, name: str, array: Array) -> None: ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocabulary: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Dataset(Protocol):
    """Batches as a pure function of the seed and the number of their first sample."""

    description: dict[str, Any]

    def batch(self, split: Literal["train", "val"], seed: int, first: int, rows: int) -> dict[str, Array]: ...
    @property
    def val_samples(self) -> int: ...
