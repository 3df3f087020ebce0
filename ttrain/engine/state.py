"""Persistent tensors of a run: parameters, gradients, optimizer state, compute-dtype copies, a model's buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ttrain.core.errors import GraphError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType, TensorSpec, run_offsets
from ttrain.device.base import Arena, Buffer, Device
from ttrain.graph.graph import Graph
from ttrain.graph.kinds import Kind


@dataclass(frozen=True)
class StateTensor:
    """One persistent tensor. Tensors of one `run` lie side by side, so an update op may treat them as one.

    The last `padding` rows of `spec` are zeros that the host neither reads nor writes. `first` computes the values that
    it starts with, in the shape of `host_spec`; without it they are zeros.
    """

    name: str
    spec: TensorSpec
    kind: Kind
    run: str = ""
    padding: int = 0
    first: Callable[[], np.ndarray] | None = field(default=None, compare=False)

    @property
    def host_spec(self) -> TensorSpec:
        """The spec without padding."""
        shape = self.spec.shape
        return self.spec.with_shape(shape[0] - self.padding, *shape[1:]) if self.padding else self.spec


class State:
    """Places persistent tensors and moves their values to and from the host.

    Tensors of one (kind, dtype, run, slot) share an arena in list order at 64-element alignment, where the slot is what
    follows the last "/" of the name (such as first_moment). Lists that name the same parameters in the same order
    therefore get the same element offsets in every slot. Gaps stay zero.
    """

    def __init__(self, device: Device, tensors: Sequence[StateTensor]) -> None:
        self.device = device
        self._tensors = {tensor.name: tensor for tensor in tensors}
        if len(self._tensors) != len(tensors):
            raise GraphError("two persistent tensors have the same name")
        self._placed: dict[str, tuple[Arena, int, Buffer]] = {}
        groups: dict[tuple[Kind, DType, str, str, bool], list[StateTensor]] = {}
        for tensor in tensors:
            slot = tensor.name.rpartition("/")[2] if "/" in tensor.name else ""
            key = (tensor.kind, tensor.spec.dtype, tensor.run, slot, self.on_host(tensor.name))
            groups.setdefault(key, []).append(tensor)
        for (kind, dtype, run, slot, on_host), members in groups.items():
            offsets, end = run_offsets([member.spec.size for member in members])
            side = device.side(on_host)
            purpose = " ".join(filter(None, (kind.value, run, slot)))
            arena = side.allocate_arena(end * dtype.itemsize, purpose, copies=kind in (Kind.COPY, Kind.FROZEN))
            for member, offset in zip(members, offsets, strict=True):
                byte = offset * dtype.itemsize
                self._placed[member.name] = (arena, byte, side.place(arena, byte, member.spec))
        for tensor in tensors:
            if tensor.first is not None:
                self.write(tensor.name, tensor.first())

    def names(self, *kinds: Kind) -> list[str]:
        """Names of the tensors of these kinds (all kinds where none is given), in order of declaration."""
        return [name for name, tensor in self._tensors.items() if not kinds or tensor.kind in kinds]

    def tensor(self, name: str) -> StateTensor:
        """The declaration of one tensor."""
        if name not in self._tensors:
            raise GraphError(f"there is no persistent tensor {name!r}. {did_you_mean(name, self._tensors)}")
        return self._tensors[name]

    def on_host(self, name: str) -> bool:
        """Whether a tensor lies in host memory beside a device that has its own."""
        return self.device.offloaded(name)

    def spec(self, name: str) -> TensorSpec:
        """Of the values as `read` gives and `write` takes them."""
        return self.tensor(name).host_spec

    def placed(self, name: str) -> tuple[Arena, int, Buffer]:
        """Arena, byte offset and buffer of one tensor."""
        self.tensor(name)
        return self._placed[name]

    def read(self, name: str) -> np.ndarray:
        """A host copy; bf16 comes as fp32."""
        values = self.device.side(self.on_host(name)).download(self.placed(name)[2])
        return values[: len(values) - self.tensor(name).padding] if self.tensor(name).padding else values

    def write(self, name: str, array: np.ndarray) -> None:
        """Overwrite one tensor, and the compute-dtype copy that derives from it. Shapes must be equal."""
        spec = self.spec(name)
        if tuple(array.shape) != spec.shape:
            raise GraphError(f"{name}: got an array {list(array.shape)}, expected {spec}.")
        if padding := self.tensor(name).padding:
            array = np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)])
        side = self.device.side(self.on_host(name))
        side.upload(self.placed(name)[2], array)
        copy = f"{name}/compute"
        if copy in self._placed:
            side.upload(self._placed[copy][2], array)

    def nbytes(self, kind: Kind, on_host: bool | None = None) -> int:
        """Bytes of all tensors of one kind; with `on_host` only of those that lie, or do not lie, in host memory."""
        tensors = [tensor for tensor in self._tensors.values() if tensor.kind is kind]
        return sum(t.spec.nbytes for t in tensors if on_host is None or self.on_host(t.name) is on_host)

    def check(self, graph: Graph) -> None:
        """Raise GraphError where a graph uses state that was not declared, or declared otherwise."""
        for name, value in graph.state.items():
            tensor = self.tensor(name)
            if tensor.spec != value.spec or tensor.kind is not value.kind:
                placed, used = f"{tensor.kind.value} {tensor.spec}", f"{value.kind.value} {value.spec}"
                raise GraphError(f"{name} is placed as {placed}, the graph uses {used}.")
