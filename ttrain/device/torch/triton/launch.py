"""Launches of Triton's kernels, as one operator of torch: it writes into given tensors and allocates nothing.

A kernel is a function of kernels.py, or generated text. That text is made here from names in a closed table and from
numbers; it never comes from a file.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

import torch

from ttrain.device.torch.kernels.common import Call, Tensor


@dataclass(frozen=True)
class Work:
    """A kernel with everything but its tensors: their names, its constants, how many programs and warps run it."""

    kernel: str
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    warps: int


WORKS: list[Work] = []  # by the number that the operator takes
Tensors = Mapping[str, Tensor | None]  # by their names in a kernel

_LIBRARY = torch.library.Library("ttrain", "DEF")
_LIBRARY.define("triton(int work, Tensor[] read, Tensor(a!)[] written) -> ()")


def emit(
    call: Call, kernel: str, read: Tensors, written: Tensors, grid: Sequence[int], warps: int = 4, **constants: Any
) -> None:
    """Add the launch of a kernel on these tensors by name; an absent one is None to it."""
    call.begin()
    sides = [{name: x for name, x in side.items() if x is not None} for side in (read, written)]
    absent = dict.fromkeys([*read, *written]).keys() - {*sides[0], *sides[1]}
    settings = {**dict.fromkeys(sorted(absent)), **constants}
    number = _number(Work(kernel, (*sides[0], *sides[1]), tuple(settings.items()), tuple(grid), warps))
    call.emit(torch.ops.ttrain.triton.default, number, *(list(side.values()) for side in sides))


@cache
def _number(work: Work) -> int:
    WORKS.append(work)
    return len(WORKS) - 1


@cache
def function(kernel: str) -> Any:
    """Return what Triton makes of a kernel; it compiles one at its first launch."""
    import triton

    from ttrain.device.torch.triton import kernels

    if hasattr(kernels, kernel):
        return getattr(kernels, kernel)
    # Triton asks for the text of a function by its file, for which the lines here stand.
    file = f"<ttrain {sha256(kernel.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(kernel), None, kernel.splitlines(keepends=True), file)
    names = dict(vars(kernels))
    exec(compile(kernel, file, "exec"), names)
    return triton.jit(names["generated"])


def _launch(number: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    work = WORKS[number]
    tensors = dict(zip(work.names, (*read, *written), strict=True))
    # Triton means to fuse products and sums no longer by default: bits would change with its version.
    function(work.kernel)[work.grid](**tensors, **dict(work.constants), num_warps=work.warps, enable_fp_fusion=True)


def _check(number: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand in for a launch where tensors have no values: kernels index memory as if rows followed one another."""
    assert len(WORKS[number].names) == len(read) + len(written) and all(x.is_contiguous() for x in (*read, *written))


_LIBRARY.impl("triton", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("ttrain::triton", _check, lib=_LIBRARY)
