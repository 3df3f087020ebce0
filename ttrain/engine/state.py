"""Persistent tensors of a run: parameters, gradients, optimizer state, compute-dtype copies, a model's buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import FLAT_ALIGNMENT, DType, Part, TensorSpec, flat_offsets, part_name, part_spec
from ttrain.device.base import NUMPY_DTYPES, Arena, Buffer, Device
from ttrain.device.quantized import PARTS, Quantized, code_of
from ttrain.graph import Graph, Kind
from ttrain.plan.arena import GradientReuse

_BETWEEN = FLAT_ALIGNMENT * DType.FP64.itemsize  # bytes between flat tensors in one arena, lest they are taken for one
_AT_ONCE = 2**20  # elements
Placed = tuple[Arena, int, Buffer]  # the byte in the arena, and the tensor that lies there
_Flat = tuple[Kind, DType, str, str]  # kind, dtype, flat parameter and slot of tensors that lie side by side
_Piece = tuple[str, TensorSpec, Part]  # name, spec and elements of a tensor, or of a part of one


@dataclass(frozen=True)
class StateTensor:
    """One persistent tensor. Those of one flat parameter, `flat`, lie side by side: an update may treat them as one.

    The last `padding` rows of `spec` are zeros that the host neither reads nor writes. `first` computes the values that
    it starts with, in the shape of `host_spec`; without it they are zeros.

    One of int16 holds low bits of fp32 numbers, whose upper halves are its copy `<name>/compute` (see op update); the
    host reads and writes the numbers.

    `parts` are those that this rank owns, each a vector under a name of its own (core.spec.part_name), or all of it in
    its shape. Where all ranks hold the tensor, `everywhere`, they lie in its memory; else no more of it is here. One
    without either takes no memory and reads as zeros: a gradient that is freed within the step.
    """

    name: str
    spec: TensorSpec
    kind: Kind
    flat: str = ""
    padding: int = 0
    first: Callable[[], np.ndarray] | None = field(default=None, compare=False)
    parts: tuple[Part, ...] = ()
    everywhere: bool = True

    @property
    def placed(self) -> list[_Piece]:
        """The pieces that take memory on this rank."""
        return [(self.name, self.spec, (0, self.spec.size))] if self.everywhere else self.pieces

    @property
    def pieces(self) -> list[_Piece]:
        """Its parts."""
        return [(part_name(self.name, part), part_spec(self.spec, part), part) for part in self.parts]

    @property
    def host_spec(self) -> TensorSpec:
        """The spec of the values, without padding."""
        shape, spec = self.spec.shape, self.spec.with_dtype(DType.FP32) if self.low_bits else self.spec
        return spec.with_shape(shape[0] - self.padding, *shape[1:]) if self.padding else spec

    @property
    def low_bits(self) -> bool:
        return self.spec.dtype is DType.INT16


class State:
    """Places persistent tensors and moves their values to and from the host.

    Tensors of one (kind, dtype, flat, slot) share an arena in list order at 64-element alignment, where the slot is
    what follows the last "/" of the name (such as first_moment). Lists that name the same parameters in the same order
    therefore get the same element offsets in every slot. Gaps stay zero. Where a device has arenas, all gradients share
    one, which steps may use until backward writes them: the `reuse`.

    Whole tensors are read and written by their names, also those of which other ranks hold parts: then all ranks have
    to call `read` for the same tensors in the same order.
    """

    def __init__(self, device: Device, tensors: Sequence[StateTensor]) -> None:
        self.device = device
        self._tensors: dict[str, StateTensor] = {}
        self._placed: dict[str, Placed] = {}
        self._declared: dict[str, tuple[TensorSpec, Kind]] = {}  # of whole tensors and parts, as graphs use them
        self.reuse: GradientReuse | None = None
        self.reuse_arena: Arena = None
        self.add(tensors)

    def add(self, tensors: Sequence[StateTensor]) -> None:
        """Place further tensors in memory of their own. Raises GraphError for a name that is taken."""
        lending, before = self.device.arenas and self.device.host is None, len(self._tensors)
        self._tensors |= {tensor.name: tensor for tensor in tensors}
        if len(self._tensors) != before + len(tensors):
            raise GraphError("two persistent tensors have the same name")
        arenas: dict[tuple[Any, ...], dict[_Flat, list[_Piece]]] = {}
        for tensor in tensors:
            slot = tensor.name.rpartition("/")[2] if "/" in tensor.name else ""
            flat = (tensor.kind, tensor.spec.dtype, tensor.flat, slot)
            key = (tensor.kind,) if lending and tensor.kind is Kind.GRADIENT else (*flat, self.on_host(tensor.name))
            arenas.setdefault(key, {}).setdefault(flat, []).extend(tensor.placed)
            self._declared |= {name: (spec, tensor.kind) for name, spec, _ in (*tensor.placed, *tensor.pieces)}
        for key, flats in arenas.items():
            self._allocate(flats, self.device.side(key[-1] is True), aliased=len(key) == 1)
        for tensor in tensors:
            if tensor.everywhere and tensor.parts:
                self._place_parts(tensor)
            if tensor.first is not None:
                self.write(tensor.name, tensor.first())

    def drop(self, names: Sequence[str]) -> None:
        """Forget whole tensors. Their memory is free once no step is bound to it."""
        for name in names:
            del self._tensors[name], self._placed[name], self._declared[name]

    def _allocate(self, flats: Mapping[_Flat, Sequence[_Piece]], side: Device, aliased: bool) -> None:
        """One arena for tensors side by side, or with room between them for all whose memory is lent."""
        places: dict[str, tuple[int, TensorSpec]] = {}
        total = 0
        for (_, dtype, _, _), members in flats.items():
            offsets, end = flat_offsets([spec.size for _, spec, _ in members])
            starts = (total + offset * dtype.itemsize for offset in offsets)
            places |= {name: (start, spec) for start, (name, spec, _) in zip(starts, members, strict=True)}
            total += end * dtype.itemsize + (_BETWEEN if aliased else 0)
        kind, _, flat, slot = next(iter(flats))
        purpose = "gradients" if aliased else " ".join(filter(None, (kind.value, flat, slot)))
        arena = side.allocate_arena(total, purpose, copies=kind in (Kind.COPY, Kind.FROZEN))
        self._placed |= {name: (arena, start, side.place(arena, start, spec)) for name, (start, spec) in places.items()}
        if aliased:
            whole = {name: (start, spec.nbytes) for name, (start, spec) in places.items() if name in self._tensors}
            own = {name: place for name, place in whole.items() if not self._tensors[name].parts}
            self.reuse_arena, self.reuse = arena, GradientReuse(total, own)

    def _place_parts(self, tensor: StateTensor) -> None:
        """Place the parts of a tensor in the memory of the whole."""
        arena, byte, _ = self._placed[tensor.name]
        side = self.device.side(self.on_host(tensor.name))
        for name, spec, (start, _) in tensor.pieces:
            place = byte + start * spec.dtype.itemsize
            self._placed[name] = (arena, place, side.place(arena, place, spec))

    def names(self, *kinds: Kind) -> list[str]:
        """Names of the tensors of these kinds (all kinds where none is given), in order of declaration."""
        return [name for name, tensor in self._tensors.items() if not kinds or tensor.kind in kinds]

    def tensor(self, name: str) -> StateTensor:
        """The declaration of one tensor."""
        if name not in self._tensors:
            raise GraphError(f"there is no persistent tensor {name!r}. {did_you_mean(name, self._tensors)}")
        return self._tensors[name]

    def on_host(self, name: str) -> bool:
        """True if a tensor lies in host memory beside a device that has its own."""
        return self.device.offloaded(name)

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of the values as `read` gives and `write` takes them."""
        return self.tensor(name).host_spec

    def placed(self, name: str) -> Placed:
        """Arena, byte offset and buffer of one tensor or part."""
        if name not in self._placed:
            self.tensor(name)
        return self._placed[name]

    def read(self, name: str) -> np.ndarray:
        """A host copy; bf16 and weights in fewer bits come as fp32."""
        if (code := code_of(name, self._tensors)) is not None:
            return np.asarray(Quantized(code, {part: self.read(f"{name}/{part}") for part in PARTS[code]}))
        return self._every(name, 1).reshape(self.spec(name).shape)

    def sample(self, name: str, most: int) -> np.ndarray:
        """Return up to `most` values in a row, spread evenly over a tensor; at every call of the same elements.

        A copy as from `read`, and like there all ranks have to call it. The device brings no others to the host, where
        it can.
        """
        return self._every(name, -(-self.spec(name).size // most) | 1)  # odd, lest it goes down one column

    def _every(self, name: str, stride: int) -> np.ndarray:
        """Return every so many values of a tensor, in a row."""
        tensor, size = self.tensor(name), self.spec(name).size
        if tensor.everywhere:
            return self._values(tensor, name, 0, stride)[: -(-size // stride)]
        values = np.zeros(-(-size // stride), np.float32)
        for piece, _, (start, stop) in tensor.placed:
            first, end = -(-start // stride), -(-min(stop, size) // stride)
            values[first:end] = self._values(tensor, piece, first * stride - start, stride)[: max(end - first, 0)]
        if self.device.group is not None:
            self.device.group.join(values)
        return values.astype(NUMPY_DTYPES[self.spec(name).dtype], copy=False)

    def _values(self, tensor: StateTensor, name: str, first: int = 0, stride: int = 1) -> np.ndarray:
        """Return values of a tensor, or of its part of that name: every so many from the first on, in a row."""
        side = self.device.side(self.on_host(tensor.name))
        values = side.sample(self._placed[name][2], first, stride)
        if not tensor.low_bits:
            return values
        arena, byte, _ = self._placed[f"{tensor.name}/compute{name.removeprefix(tensor.name)}"]
        bits = side.sample(side.place(arena, byte, self._declared[name][0]), first, stride).astype(np.int32)
        bits <<= 16
        return np.add(bits, values, out=bits).view(np.float32)

    def keeps(self, name: str) -> bool:
        """Return whether any rank has memory for a tensor. Only one that is alone frees gradients within a step."""
        return self.device.group is not None or bool(self.tensor(name).placed)

    def own_parts(self, name: str) -> list[Part] | None:
        """The parts of a tensor's values that this rank alone has; None where all ranks have them all."""
        tensor, size = self.tensor(name), self.spec(name).size
        return None if tensor.everywhere else [(start, min(stop, size)) for start, stop in tensor.parts if start < size]

    def read_part(self, name: str, part: Part) -> np.ndarray:
        """The values of one of `own_parts`, in a row; asks no other rank."""
        held = next(own for own in self.tensor(name).parts if own[0] == part[0])
        return self._values(self.tensor(name), part_name(name, held))[: part[1] - part[0]]

    def write(self, name: str, array: np.ndarray | Quantized) -> None:
        """Overwrite one tensor, and the compute-dtype copy that derives from it. Shapes must be equal.

        A weight in fewer bits is rounded to them, unless it comes as Quantized.
        """
        if (code := code_of(name, self._tensors)) is not None:
            if not (isinstance(array, Quantized) and array.code == code):
                array = Quantized.of(code, np.asarray(array))
            for part, each in array.parts.items():
                self.write(f"{name}/{part}", each)
            return
        self._write(self.tensor(name), np.asarray(array))

    def _write(self, tensor: StateTensor, array: np.ndarray) -> None:
        name = tensor.name
        if tuple(array.shape) != tensor.host_spec.shape:
            raise GraphError(f"{name}: got an array {list(array.shape)}, expected {tensor.host_spec}.")
        if padding := tensor.padding:
            array = np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)])
        side, values = self.device.side(self.on_host(name)), array.reshape(-1)
        copied = [self._tensors[each] for each in (f"{name}/compute",) if each in self._tensors]
        for piece, spec, (start, stop) in (piece for each in (tensor, *copied) for piece in each.placed):
            if tensor.low_bits:
                self._write_half(side, piece, values[start:stop], upper=spec.dtype is DType.BF16)
            else:
                side.upload(self._placed[piece][2], values[start:stop].reshape(spec.shape))

    def write_rows(self, name: str, start: int, array: np.ndarray) -> None:
        """Overwrite rows of one tensor, from number `start` on.

        Some rows only where the device has arenas, and of a tensor that is neither padded nor copied.
        """
        spec, (arena, byte, _) = self.spec(name), self.placed(name)
        if array.shape == spec.shape:
            self.write(name, array)
        elif array.shape[1:] != spec.shape[1:] or not 0 <= start <= spec.shape[0] - len(array):
            raise GraphError(f"{name}: got rows {list(array.shape)} from number {start} on, expected rows of {spec}.")
        else:
            side, place = self.device.side(self.on_host(name)), byte + start * (spec.nbytes // spec.shape[0])
            side.upload(side.place(arena, place, spec.with_shape(*array.shape)), array)

    def _write_half(self, side: Device, name: str, values: np.ndarray, upper: bool) -> None:
        """The copy or the low bits of fp32 numbers, some at a time to save memory."""
        arena, byte, _ = self._placed[name]
        for start in range(0, values.size, _AT_ONCE):
            some = np.array(values[start : start + _AT_ONCE], np.float32)
            some[np.isnan(some)] = np.nan
            bits = some.view(np.int32)
            place = side.place(arena, byte + 2 * start, TensorSpec(some.shape, DType.INT16))
            side.upload(place, (bits + 0x8000 >> 16 if upper else bits).astype(np.int16))

    def nbytes(self, kind: Kind, on_host: bool | None = None) -> int:
        """Bytes here of all tensors of one kind; with `on_host` only of those that are, or are not, in host memory."""
        sides = (True, False) if on_host is None else (on_host,)
        tensors = [self._tensors[name] for name in self.names(kind) if self.on_host(name) in sides]
        return sum(spec.nbytes for tensor in tensors for _, spec, _ in tensor.placed)

    def check(self, graph: Graph) -> None:
        """Raise GraphError where a graph uses state that was not declared, or declared otherwise."""
        for name, value in graph.state.items():
            if name not in self._declared:
                self.tensor(name)
            spec, kind = self._declared[name]
            if spec != value.spec or kind is not value.kind:
                placed, used = f"{kind.value} {spec}", f"{value.kind.value} {value.spec}"
                raise GraphError(f"{name} is placed as {placed}, the graph uses {used}.")
