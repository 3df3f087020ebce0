"""Types that the folders of training share: arrays, inputs and outputs of a step, persistent tensors to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from ttrain.core.spec import TensorSpec
from ttrain.graph import Kind

# All else in the state derives from these, or from the config, or lives for one step.
SAVED_KINDS = (Kind.PARAMETER, Kind.FROZEN, Kind.OPTIMIZER, Kind.BUFFER)

Array = NDArray[Any]
Inputs = Mapping[str, Array | float | int]
Outputs = Mapping[str, Any]  # floats for scalars, arrays otherwise


class StateValues(Protocol):
    """Persistent tensors to read: parameters by module path, optimizer state by `<parameter path>/<name>`."""

    def names(self, *kinds: Kind) -> list[str]: ...
    def spec(self, name: str) -> TensorSpec: ...
    def read(self, name: str) -> Array: ...
