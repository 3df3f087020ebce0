"""Parameters, buffers, and the tree of modules that names them. None holds numbers: those live in an engine's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, Part, TensorSpec, part_name, part_spec
from ttrain.device.base import NUMPY_DTYPES
from ttrain.device.quantized import part_specs
from ttrain.graph import Graph, Kind, Value
from ttrain.nn.initialize import Initializer
from ttrain.ops.collective import Owners, all_gather

ADAPTER = ".lora."  # part of the path of every parameter that LoRA adds, see lora.py


class Role(str, Enum):
    """The role of a parameter in the model. Optimizers and parametrisations treat roles apart."""

    INPUT = "input"  # ids or features to the model's width, as an embedding; a tied head's weight is one
    HIDDEN = "hidden"  # width to width
    OUTPUT = "output"  # width to scores, as a head
    VECTOR = "vector"  # no matrix, as a bias or a norm's weight


@dataclass(eq=False, slots=True)
class Parameter:
    """A tensor of the model, trained or frozen: master values, fp32 unless the run says otherwise, and how they start.

    `follows_compute` tells that layers read it in the compute dtype: if that is not fp32, they read a rounded copy that
    is refreshed after every update. Whether it decays is the optimizer's decision. `padding` rows of zeros follow its
    own while running; they get no gradient, stay zero and are in no checkpoint. One that is not `trainable` has no
    gradient and no optimizer state either; unless it is `saved` it is in no checkpoint. Such a matrix may be kept in
    fewer bits by a `code`, see device/quantized.py. What is no matrix has the role of a vector whatever is given.
    """

    shape: tuple[int, ...]
    initializer: Initializer
    follows_compute: bool = True
    path: str = ""  # place in the module tree, set once by the model that owns it
    master: DType = DType.FP32  # of the master values, and of the optimizer's tensors unless the run says otherwise
    padding: int = 0
    trainable: bool = True
    saved: bool = True
    role: Role = Role.HIDDEN
    parts: int = 1  # matrices that lie one below the other in it, as of queries, keys and values; of equal size
    width_ratio: float = 1.0  # of the model's width to that at which learning rates were tuned
    divided: Divided | None = None  # where this rank has only parts of it; set before steps are recorded
    code: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) < 2:
            self.role = Role.VECTOR

    @property
    def kind(self) -> Kind:
        return Kind.PARAMETER if self.trainable else Kind.FROZEN if self.saved else Kind.CONSTANT

    @property
    def spec(self) -> TensorSpec:
        """Spec of the master values, padding included."""
        rows = self.shape[:1] if not self.padding else (self.shape[0] + self.padding,)
        return TensorSpec((*rows, *self.shape[1:]), self.master)

    @property
    def pieces(self) -> dict[str, TensorSpec]:
        """Specs of the tensors of the state that hold it, by name: its path, or the parts of a code."""
        if self.code is None:
            return {self.path: self.spec}
        return {f"{self.path}/{name}": spec for name, spec in part_specs(self.code, self.shape).items()}

    @property
    def stored_spec(self) -> TensorSpec:
        """Spec of the master values as checkpoints and files hold them, without padding."""
        return TensorSpec(self.shape, self.master)

    @property
    def count(self) -> int:
        """Number of elements, padding left out."""
        return math.prod(self.shape)

    def read_spec(self, compute: DType) -> TensorSpec:
        """Spec of the values that layers read, and of their gradient."""
        return self.spec.with_dtype(compute) if self.follows_compute else self.spec

    def has_copy(self, compute: DType) -> bool:
        """True if layers read a rounded copy instead of the master values."""
        return self.code is None and self.read_spec(compute) != self.spec

    def read_from(self, compute: DType) -> list[tuple[str, TensorSpec, Kind]]:
        """Names, specs and kinds of the tensors of the state that layers read, as many as there are `pieces`."""
        if self.has_copy(compute):
            return [(f"{self.path}/compute", self.read_spec(compute), Kind.COPY)]
        return [(name, spec, self.kind) for name, spec in self.pieces.items()]

    @property
    def own_parts(self) -> list[tuple[Part, ...]]:
        """Return the parts of each of the `pieces` that this rank has; none where it has all."""
        block = self.divided
        return [()] * len(self.pieces) if block is None else [parts[block.rank] for parts in block.owners_of(self)]


@dataclass(eq=False)
class Divided:
    """Parameters of which every rank has parts, and which it gathers together: those of a block of the model.

    `owners` are the parts by rank, of all pieces of all parameters. `ahead` is the number of blocks before, see the op
    all_gather.
    """

    parameters: tuple[Parameter, ...]
    owners: Owners
    rank: int
    ahead: int

    def __post_init__(self) -> None:
        self._places, end = dict[Parameter, slice](), 0
        for parameter in self.parameters:
            self._places[parameter] = slice(end, end := end + len(parameter.pieces))
            parameter.divided = self

    def owners_of(self, parameter: Parameter) -> Owners:
        return self.owners[self._places[parameter]]

    def whole(self, graph: Graph, parameter: Parameter, compute: DType) -> Sequence[Value]:
        """The pieces that layers read. The gather of all is recorded once, outside of what is computed again."""
        if self not in graph.gathered:
            read = [tensor for each in self.parameters for tensor in each.read_from(compute)]
            own = [
                graph.state_value(part_name(name, part), part_spec(spec, part), kind)
                for (name, spec, kind), by_rank in zip(read, self.owners, strict=True) for part in by_rank[self.rank]
            ]  # fmt: skip
            specs, facts = tuple(spec for _, spec, _ in read), {"owners": self.owners, "rank": self.rank}
            with graph.within(segment=None, copy=0):
                gathered = all_gather.record(*own, graph=graph, specs=specs, ahead=self.ahead, key="", **facts)
            for (name, _, _), value in zip(read, gathered, strict=True):
                value.name = name
            graph.gathered[self] = tuple(gathered)
        return graph.gathered[self][self._places[parameter]]


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor that is not trained: it has no gradient, never decays and counts for no parameter.

    `values(shape)` makes the values that it starts with, such as `numpy.zeros`. Without `saved` it is derived: computed
    from the model's config whenever a run starts, never written by a step and in no checkpoint, as a table of angles or
    a mask. A `saved` one may be overwritten by training steps (`ops.assign`), as a running mean; checkpoints hold it, a
    resumed run goes on with it, exports have it. Raises GraphError for a saved one that is not floating-point.
    """

    shape: tuple[int, ...]
    values: Callable[[tuple[int, ...]], Any]
    saved: bool = False
    dtype: DType = DType.FP32
    path: str = ""  # place in the module tree, like a parameter's

    def __post_init__(self) -> None:
        if self.saved and not self.dtype.is_floating:
            raise GraphError(f"a saved buffer of {self.dtype}: checkpoints hold floating-point numbers, such as fp32.")

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)

    stored_spec = spec  # of the values as checkpoints and files hold them

    @property
    def kind(self) -> Kind:
        return Kind.BUFFER if self.saved else Kind.CONSTANT

    def first_values(self) -> NDArray[Any]:
        """Raises GraphError where `values` makes another shape."""
        made = np.asarray(self.values(self.shape), NUMPY_DTYPES[self.dtype])
        if made.shape != self.shape:
            raise GraphError(f"buffer {self.path}: got values {list(made.shape)}, expected {list(self.shape)}.")
        return made


class Module:
    """A node of the tree: its attributes that are parameters, buffers, modules or lists of modules are its children."""

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, Module | Parameter | Buffer]]:
        """Yield all that is below this module with its path, in the order of declaration, outer modules first."""
        for name, value in vars(self).items():
            named = [(name, value)]
            if isinstance(value, list):
                named = [(f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Module)]
            for place, child in named:
                if isinstance(child, Module | Parameter | Buffer):
                    yield prefix + place, child
                if isinstance(child, Module):
                    yield from child._walk(f"{prefix}{place}.")

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Every module below this one with its path, outer ones first."""
        return ((path, child) for path, child in self._walk() if isinstance(child, Module))

    def parameters(self, adapters: bool = True) -> dict[str, Parameter]:
        """Parameters by path in the order of declaration; one that is reachable by two paths only under the first.

        Without `adapters` only those that the model is built with.
        """
        found = {path: tensor for path, tensor in self._tensors().items() if isinstance(tensor, Parameter)}
        return {path: tensor for path, tensor in found.items() if adapters or ADAPTER not in path}

    def buffers(self) -> dict[str, Buffer]:
        """Buffers by path, likewise."""
        return {path: tensor for path, tensor in self._tensors().items() if isinstance(tensor, Buffer)}

    def persistent(self) -> dict[str, Parameter | Buffer]:
        """Return the tensors that files of weights hold, by path: parameters, and buffers that are saved."""
        return {**self.parameters(), **{path: buffer for path, buffer in self.buffers().items() if buffer.saved}}

    def _tensors(self) -> dict[str, Parameter | Buffer]:
        paths: dict[int, tuple[str, Parameter | Buffer]] = {}
        for path, child in self._walk():
            if not isinstance(child, Module):
                paths.setdefault(id(child), (path, child))
        return dict(paths.values())

    def name_parameters(self) -> None:
        """Give every parameter and buffer its path. Called once, by the root at the end of its construction."""
        for path, tensor in self._tensors().items():
            tensor.path = path

    def follow_compute(self) -> None:
        """Let layers read every parameter in the compute dtype, for devices whose norms want that."""
        for parameter in self.parameters().values():
            parameter.follows_compute = True

    @property
    def parameter_count(self) -> int:
        """Number of elements, frozen ones and adapters included; tied parameters count once."""
        return sum(parameter.count for parameter in self.parameters().values())


def use(graph: Graph, parameter: Parameter, compute: DType) -> Value:
    """A parameter as layers read it: the master values, or their copy rounded to the compute dtype; whole.

    Raises GraphError for a parameter without a path: its model did not call `name_parameters`.
    """
    (value,) = use_pieces(graph, parameter, compute)
    return value


def use_pieces(graph: Graph, parameter: Parameter, compute: DType) -> Sequence[Value]:
    """The tensors that layers read of a parameter, likewise: one, or the parts of its code."""
    _require_path(parameter)
    if parameter.divided is not None:
        return parameter.divided.whole(graph, parameter, compute)
    return [graph.state_value(*tensor) for tensor in parameter.read_from(compute)]


def use_buffer(graph: Graph, buffer: Buffer) -> Value:
    """A buffer in its own dtype, as it is when the step starts. Raises GraphError for one without a path, likewise."""
    _require_path(buffer)
    return graph.state_value(buffer.path, buffer.spec, buffer.kind)


def _require_path(tensor: Parameter | Buffer) -> None:
    if not tensor.path:
        what = type(tensor).__name__.lower()
        raise GraphError(f"a {what} of shape {tensor.shape} has no path: the model must call name_parameters().")
