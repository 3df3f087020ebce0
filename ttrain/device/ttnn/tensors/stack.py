"""State tensors side by side in one buffer of tiles, so that an optimizer needs a few launches for all of them.

A buffer in DRAM is a row of tiles, dealt out to the banks in turn. A run of tiles that starts at the first bank can be
seen as a tensor of its own without a copy (`ttnn.narrow`), so every member has a view that kernels read and write, and
an elementwise launch over the whole buffer updates all members at once. Members are padded with zeros, and only tensors
that fill their tiles take part, or vectors, which lie in the first row of theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.store import TILE, Store, TileLayout


def joinable(shape: tuple[int, ...]) -> bool:
    """True if a tensor of this shape may be a member of a stack."""
    if len(shape) == 1:
        return shape[0] % TILE == 0
    return len(shape) == 2 and shape[0] % TILE == 0 and shape[1] % TILE == 0


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
        found.append(stack if isinstance(stack, Stack) and stack.members == members else Stack(store, members))
    return found + groups[0]


def wholes(tensors: Tensors) -> list[Stack | DeviceTensor]:
    """Tensors as the stacks that they make up; those whose stack has other members too stay single."""
    given = set(map(id, tensors))
    found: dict[int, Stack | DeviceTensor] = {}
    for tensor in tensors:
        stack = tensor.stack
        whole: Stack | DeviceTensor = tensor
        if isinstance(stack, Stack) and all(id(member) in given for member in stack.members):
            whole = stack
        found[id(whole)] = whole
    return list(found.values())
