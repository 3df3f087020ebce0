"""Buffers of the device: tensors that are made on first use, views, step inputs, and stacks.

State tensors lie side by side in a stack of tiles, so that an optimizer needs a few launches for all of them. A
buffer in DRAM is a row of tiles, dealt out to the banks in turn. A run of tiles that starts at the first bank can be
seen as a tensor of its own without a copy (`ttnn.narrow`), so every member has a view that kernels read and write,
and an elementwise launch over the whole buffer updates all members at once. Members are padded with zeros, and only
tensors that fill their tiles take part, or vectors, which lie in the first row of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.ttnn.tensors.store import TILE, TILES, Store, TileLayout, default_layout, device_shape


class DeviceTensor:
    """One tensor on the device, made when it is first needed.

    Until then `upload` only keeps the values on the host, so that whoever needs the tensor first may decide how it is
    held. `t` is the ttnn tensor; it can change between launches where a kernel returns a tensor of its own.
    """

    def __init__(self, store: Store, spec: TensorSpec) -> None:
        self.store, self.spec = store, spec
        self.layout: TileLayout = default_layout(spec)
        self.tensor: Any = None
        self.pending: np.ndarray | None = None
        self.value: Any = None  # of a scalar, or of integers, that were uploaded
        self.watchers: list[Derived] = []
        self.stack: Stack | None = None  # whose view the tensor is, where it is one
        self._views: list[View] = []

    @property
    def t(self) -> Any:
        """The ttnn tensor."""
        if self.tensor is None:
            given, self.pending = self.pending, None
            store, layout = self.store, self.layout
            self.tensor = store.empty(layout) if given is None else store.filled(layout, lambda: given)
        return self.tensor

    def hold_as(self, layout: TileLayout) -> None:
        """Decide the layout; only before the tensor exists."""
        if layout != self.layout and self.tensor is not None:
            raise GraphError(f"{self.spec} is already held as {self.layout}, now asked for as {layout}.")
        self.layout = layout

    def upload(self, array: np.ndarray) -> None:
        """Host values, now or when the tensor is made."""
        if tuple(array.shape) != self.spec.shape and array.size != self.spec.size * self.store.chips:
            raise ShapeError(f"upload: got {list(array.shape)}, expected {self.spec}")
        if self.spec.size == 1 and array.size == 1:
            self.value = float(array.reshape(()))
        if self.tensor is None:
            self.pending = array.copy()
        else:
            self.store.write(self.tensor, self.layout, array)
        self.store.stale.update(self.watchers)

    def download(self) -> np.ndarray:
        """The values, as the spec's shape."""
        if self.tensor is None:
            values = np.zeros(self.spec.shape, np.float32) if self.pending is None else self.pending
            return values.reshape(self.spec.shape).copy()
        return self.store.read(self.t).reshape(self.spec.shape)

    def release(self) -> None:
        """Let the tensor go; the next one comes from a kernel, or when it is needed."""
        self.tensor = None
        for view in self._views:
            view.forget()

    @property
    def adopts(self) -> bool:
        """True if the buffer may take another tensor than the one it has."""
        return self.stack is None

    def adopt(self, tensor: Any) -> None:
        """Take the tensor that a kernel has returned."""
        self.tensor = tensor

    def view(self, spec: TensorSpec) -> DeviceTensor:
        """Return the tensor under another shape."""
        view = View(self, spec)
        self._views.append(view)
        return view


Tensors = Sequence[DeviceTensor]


def deliver(results: Sequence[Any], outputs: Tensors) -> None:
    """Bring what a kernel returned into its outputs; None stands for an output that it has written itself."""
    for result, output in zip(results, outputs, strict=True):
        if result is None:
            continue
        tt = output.store.tt
        if output.adopts and result.dtype == getattr(tt, output.layout.dtype):
            output.adopt(result)
        else:
            tt.copy(result, output.t)


class View(DeviceTensor):
    """Another shape over a buffer's tensor."""

    def __init__(self, base: DeviceTensor, spec: TensorSpec) -> None:
        super().__init__(base.store, spec)
        self.base = base
        self._of: Any = None

    @property
    def t(self) -> Any:
        whole = self.base.t
        if self._of is not whole:
            self.tensor, self._of = self.store.tt.reshape(whole, device_shape(self.spec.shape)), whole
        return self.tensor

    def forget(self) -> None:
        self.tensor = self._of = None

    def upload(self, array: np.ndarray) -> None:
        self.base.upload(array.reshape(self.base.spec.shape))

    def download(self) -> np.ndarray:
        return self.base.download().reshape(self.spec.shape)

    def release(self) -> None:
        self.base.release()

    @property
    def adopts(self) -> bool:
        return False


class IntegerInput(DeviceTensor):
    """Token ids, targets, positions or a seed: the host lays them out for every reader. Or numbers from a kernel."""

    def __init__(self, store: Store, spec: TensorSpec, source: IntegerInput | None = None) -> None:
        super().__init__(store, spec)
        self.source = source or self  # whose numbers this shows under another shape
        self.made: dict[Any, Derived] = {}

    def derived(self, key: Any, layout: TileLayout, function: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Return the tensor of what the host makes of the numbers, which exists from the first call on."""
        made = self.source.made
        if key not in made:
            made[key] = Derived(self.store, layout, [self.source], function)
        return made[key].t

    def in_layout(self, layout: TileLayout) -> Any:
        """Return the tensor in a layout; in a floating-point one it is 1 where the number is 0 or more, else 0."""
        if self.source.tensor is not None:
            return self._cast(layout)
        if layout.dtype == "float32":
            return self.derived(layout, layout, lambda numbers: (numbers >= 0).astype(np.float32))
        return self.derived(layout, layout, lambda numbers: numbers)

    def _cast(self, layout: TileLayout) -> Any:
        """Lay out, on the card, what a kernel has made."""
        tt = self.store.tt
        numbers = tt.reshape(self.source.tensor, layout.shape)
        if layout.dtype == "float32":
            return tt.ge(tt.typecast(numbers, tt.float32), 0.0)
        numbers = numbers if layout.dtype == "int32" else tt.typecast(numbers, getattr(tt, layout.dtype))
        return numbers if layout.order == TILES else tt.to_layout(numbers, getattr(tt, layout.order))

    def adopt(self, tensor: Any) -> None:
        self.source.tensor = tensor

    def upload(self, array: np.ndarray) -> None:
        self.value = array.copy()
        self.store.stale.update(self.watchers)

    def download(self) -> np.ndarray:
        made = self.source.tensor
        return (self.source.value if made is None else self.store.read(made)).reshape(self.spec.shape)

    def view(self, spec: TensorSpec) -> IntegerInput:
        return IntegerInput(self.store, spec, self.source)


class Derived(DeviceTensor):
    """A tensor that the host works out from step inputs, scalars or integers, when one of them changes.

    It has to be a tensor: a number given to a kernel would be frozen into a captured step.
    """

    def __init__(self, store: Store, layout: TileLayout, sources: Tensors, function: Callable[..., np.ndarray]) -> None:
        super().__init__(store, TensorSpec(layout.shape, DType.FP32))
        self.layout, self._sources, self._function = layout, sources, function
        self.ready = False  # whether the sources turned out to be step inputs
        for source in sources:
            source.watchers.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Work it out again."""
        values = [source.value for source in self._sources]
        if all(value is not None for value in values):
            self.ready, array = True, self._function(*values)
            if self.tensor is None:
                self.pending = array
            else:
                self.store.write(self.tensor, self.layout, array)


def joinable(shape: tuple[int, ...]) -> bool:
    """True if a tensor of this shape may be a member of a stack."""
    return len(shape) in (1, 2) and all(size % TILE == 0 for size in shape)


class Stack:
    """One buffer that holds the values of several tensors, which become views of it."""

    def __init__(self, store: Store, members: Tensors) -> None:
        self.store, self.members = store, list(members)
        unwritten = [member.tensor is None and member.pending is None for member in members]
        values = [None if zeros else member.download() for member, zeros in zip(members, unwritten, strict=True)]
        starts, end = [], 0
        for member in members:
            starts.append(end)
            tiles = member.layout.tiles
            end += -(-tiles // store.banks) * store.banks
        self.layout = TileLayout((end * TILE, TILE), members[0].layout.dtype)
        for member in members:
            member.release()
            member.stack = self
        self.t = store.empty(self.layout)  # views do not keep their buffer alive, so nobody may let it go
        for member, start, array in zip(members, starts, values, strict=True):
            member.tensor = self._view(member.layout, start)
            if array is not None and np.any(array):
                store.write(member.tensor, member.layout, array)

    def _view(self, layout: TileLayout, start: int) -> Any:
        tt, padded = self.store.tt, layout.padded
        run = tt.experimental.view(tt.narrow(self.t, 0, start * TILE, layout.tiles * TILE), padded)
        return run if padded == layout.shape else tt.reshape(run, layout.shape, padded)


def stacked(store: Store, tensors: Tensors) -> list[Stack | DeviceTensor]:
    """Matrices as one stack and vectors as another, made at the first call; then those that can't be joined."""
    groups: dict[int, list[DeviceTensor]] = {2: [], 1: [], 0: []}
    for tensor in tensors:
        groups[tensor.spec.rank if joinable(tensor.spec.shape) else 0].append(tensor)
    found: list[Stack | DeviceTensor] = []
    for rank in (2, 1):
        members = groups[rank]
        if len(members) < 2:
            found += members
            continue
        stack = members[0].stack
        found.append(stack if stack is not None and stack.members == members else Stack(store, members))
    return found + groups[0]


def wholes(tensors: Tensors) -> list[Stack | DeviceTensor]:
    """Tensors as the stacks that they make up; those whose stack has other members too stay single."""
    given, found = set(tensors), dict[Stack | DeviceTensor, None]()
    for tensor in tensors:
        stack = tensor.stack
        found[stack if stack is not None and given.issuperset(stack.members) else tensor] = None
    return list(found)
