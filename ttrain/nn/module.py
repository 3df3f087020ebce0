"""Parameters, and the tree of modules that names them. Neither holds numbers: those live in an engine's state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Value
from ttrain.nn.initialize import Initializer


@dataclass(eq=False, slots=True)
class Parameter:
    """A trained tensor: master values, fp32 unless the run says otherwise, and how they start.

    `follows_compute` tells that layers read it in the compute dtype: if that is not fp32, they read a rounded copy that
    is refreshed after every update. Whether it decays is the optimizer's decision. `padding` rows of zeros follow its
    own while running; they get no gradient, stay zero and are in no checkpoint.
    """

    shape: tuple[int, ...]
    initializer: Initializer
    follows_compute: bool = True
    path: str = ""  # place in the module tree, set once by the model that owns it
    master: DType = DType.FP32  # of the master values, and of the optimizer's tensors unless the run says otherwise
    padding: int = 0

    @property
    def spec(self) -> TensorSpec:
        """Spec of the master values, padding included."""
        rows = self.shape[:1] if not self.padding else (self.shape[0] + self.padding,)
        return TensorSpec((*rows, *self.shape[1:]), self.master)

    @property
    def stored_spec(self) -> TensorSpec:
        """Spec of the master values as checkpoints and files hold them, without padding."""
        return TensorSpec(self.shape, self.master)

    @property
    def count(self) -> int:
        """Number of trained elements."""
        return math.prod(self.shape)

    def read_spec(self, compute: DType) -> TensorSpec:
        """Spec of the values that layers read, and of their gradient."""
        return self.spec.with_dtype(compute) if self.follows_compute else self.spec

    def has_copy(self, compute: DType) -> bool:
        """Whether layers read a rounded copy instead of the master values."""
        return self.read_spec(compute) != self.spec

    @property
    def copy_name(self) -> str:
        """Name of the rounded copy in the state."""
        return f"{self.path}/compute"


class Module:
    """A node of the tree: its attributes that are parameters, modules or lists of modules are its children."""

    def _children(self) -> Iterator[tuple[str, Module | Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Module | Parameter):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Module))

    def parameters(self) -> dict[str, Parameter]:
        """Parameters by path in the order of declaration; one that is reachable by two paths only under the first."""
        found: dict[str, Parameter] = {}
        seen: set[int] = set()
        for path, parameter in self._walk(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[path] = parameter
        return found

    def _walk(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, child in self._children():
            if isinstance(child, Parameter):
                yield prefix + name, child
            else:
                yield from child._walk(f"{prefix}{name}.")

    def name_parameters(self) -> None:
        """Give every parameter its path. Called once, by the root at the end of its construction."""
        for path, parameter in self.parameters().items():
            parameter.path = path

    def follow_compute(self) -> None:
        """Let layers read every parameter in the compute dtype, for devices whose norms want that."""
        for parameter in self.parameters().values():
            parameter.follows_compute = True

    @property
    def parameter_count(self) -> int:
        """Number of trained elements; tied parameters count once."""
        return sum(parameter.count for parameter in self.parameters().values())


def use(graph: Graph, parameter: Parameter, compute: DType) -> Value:
    """A parameter as layers read it: the master values, or their copy rounded to the compute dtype.

    Raises GraphError for a parameter without a path: its model did not call `name_parameters`.
    """
    if not parameter.path:
        raise GraphError(f"a parameter of shape {parameter.shape} has no path: the model must call name_parameters().")
    if parameter.has_copy(compute):
        return graph.state_value(parameter.copy_name, parameter.read_spec(compute), Kind.COPY)
    return graph.state_value(parameter.path, parameter.spec, Kind.PARAMETER)
