"""Tensors of one update joined into one, so that an optimizer needs a few launches for all of them.

Matrices with rows of equal length lie below one another, vectors side by side. Only whole tiles are joined: a slice of a
stack then needs no shifting.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrain.device.ttnn.form import TILE, TileForm, device_shape

if TYPE_CHECKING:
    from ttrain.device.ttnn.store import Store
    from ttrain.device.ttnn.tensors import Held

CONCAT_LIMIT = 48  # tensors that ttnn.concat takes in one launch


def stackable(shapes: Sequence[tuple[int, ...]], least: int) -> list[list[int]]:
    """Positions of the shapes in groups that may be joined; a group of fewer than `least` is taken apart."""
    groups: dict[object, list[int]] = {}
    for position, shape in enumerate(shapes):
        rows, columns = device_shape(shape)[-2:]
        if len(shape) <= 1 and columns % TILE == 0:
            key: object = "vectors"
        elif len(shape) == 2 and rows % TILE == 0:
            key = columns
        else:
            key = (position,)
        groups.setdefault(key, []).append(position)
    found: list[list[int]] = []
    for members in groups.values():
        parts = [members[i : i + CONCAT_LIMIT] for i in range(0, len(members), CONCAT_LIMIT)]
        for part in parts:
            found += [part] if len(part) >= least else [[position] for position in part]
    return found


class Stack:
    """One tensor that holds the values of several buffers, which become parts of it."""

    def __init__(self, store: Store, members: Sequence[Held]) -> None:
        self.store, self.members = store, list(members)
        shapes = [device_shape(member.spec.shape) for member in members]
        self.axis = 1 if len(members[0].spec.shape) <= 1 and len(members) > 1 else 0
        self.ends = list(accumulate(shape[self.axis] for shape in shapes))
        other = shapes[0][1 - self.axis]
        shape = (self.ends[-1], other) if self.axis == 0 else (other, self.ends[-1])
        self.form = TileForm(shape, members[0].form.dtype)
        self._staged = [member.download() for member in members]
        self._dirty, self._tensor = True, None
        self._published: list[Held] = []
        self._read_at, self._copy = -1, np.empty(0)
        for member in members:
            member.release()
            member.stack = self

    @property
    def t(self) -> Any:
        """The joined tensor."""
        if self._dirty:
            self._flush()
        return self._tensor

    def _flush(self) -> None:
        rows = [array.reshape(device_shape(array.shape)) for array in self._staged]
        joined = np.concatenate(rows, self.axis)
        if self._tensor is None:
            self._tensor = self.store.filled(self.form, joined)
        else:
            self.store.write(self._tensor, self.form, joined)
        self._dirty, self._staged = False, []
        self._read_at = -1
        self.publish()

    def bounds(self, member: Held) -> tuple[list[int], list[int]]:
        """Start and end of a member's slice."""
        index = self.members.index(member)
        start, end = [0, 0], list(self.form.shape)
        start[self.axis] = self.ends[index - 1] if index else 0
        end[self.axis] = self.ends[index]
        return start, end

    def read(self, member: Held) -> np.ndarray:
        """A member's values on the host. The whole stack is read once a step and kept."""
        if self._dirty:
            return self._staged[self.members.index(member)].copy()
        if self._read_at != self.store.generation:
            self._copy, self._read_at = self.store.read(self._tensor), self.store.generation
        (top, left), (bottom, right) = self.bounds(member)
        return self._copy.reshape(self.form.shape)[top:bottom, left:right].reshape(member.spec.shape).copy()

    def write(self, member: Held, array: np.ndarray) -> None:
        """A member's values from the host; they reach the device with the next launch that needs the stack."""
        if not self._dirty:
            self._staged = [self.read(other) for other in self.members]
            self._dirty = True
        self._staged[self.members.index(member)] = array.copy()
        self.store.unflushed.add(self)

    def flush(self) -> None:
        """Bring staged values onto the device."""
        if self._dirty:
            self._flush()

    def publish_to(self, member: Held) -> Any:
        """A tensor with a member's values, kept up to date by `publish`."""
        if len(self.members) == 1 and member.form.dtype == self.form.dtype:
            return self.t
        whole, tensor = self.t, self.store.empty(member.form)
        self._slice(whole, member, tensor)
        self._published.append(member)
        return tensor

    def publish(self) -> None:
        """Bring the tensors that kernels read up to date with the stack."""
        for member in self._published:
            self._slice(self._tensor, member, member.tensor)

    def spread(self, source: Any, targets: Sequence[Held]) -> None:
        """The slices of a tensor of the stack's shape, one into each target."""
        for member, target in zip(self.members, targets, strict=True):
            if len(self.members) == 1:
                self.store.tt.copy(source, target.t)
            else:
                self._slice(source, member, target.t)

    def _slice(self, source: Any, member: Held, target: Any) -> None:
        start, end = self.bounds(member)
        self.store.tt.slice(source, start, end, output_tensor=target)
