"""Shapes of an op's inputs as it declares them: `x [..., I], weight [O, I], bias [O], targets int64 [N]`.

A letter stands for the same size wherever it occurs, `...` for the same axes. An input has the dtype of the first one,
or that which is named: `int64`, `accumulation` (fp32 at least), `any`. Where one of two shapes will do, `or` is
between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ttrain.core.errors import ShapeError
from ttrain.core.spec import DType, TensorSpec

_KINDS = ("", "accumulation", "any", *(dtype.label for dtype in DType))
_INPUT = re.compile(r"(\w+) (\w*) ?(\[.*?\](?: or \[.*?\])*)")


Sizes = dict[str, tuple[int, ...]]  # of a letter one, of `...` those of all its axes


class Shapes:
    """Shapes as a text declares them. The inputs that `accumulation` names are fp32 at least, even in a bf16 step."""

    def __init__(self, text: str, inputs: Sequence[str]) -> None:
        """Raises ShapeError for a text that can't be read, or that names others than an op's `inputs`."""
        self.text = text
        self._inputs = [
            (name, kind, [axes.split(", ") if axes else [] for axes in re.findall(r"\[(.*?)\]", choices)])
            for name, kind, choices in _INPUT.findall(text)
        ]
        known = all(name in inputs and kind in _KINDS for name, kind, _ in self._inputs)
        if not known or ", ".join(found[0] for found in _INPUT.finditer(text)) != text:
            raise ShapeError(
                f"shapes: got {text!r}, expected as in 'x [..., I], weight any [O, I], ids int64 [N] or []', of "
                f"the inputs {', '.join(inputs)}."
            )
        self.accumulation = tuple(name for name, kind, _ in self._inputs if kind == "accumulation")
        known_as = {dtype.label: dtype for dtype in DType if not dtype.is_floating}
        self.integers = {name: known_as[kind] for name, kind, _ in self._inputs if kind in known_as}

    @property
    def axes(self) -> list[str]:
        """Letters, and `...`, in the order in which they occur first."""
        return list(dict.fromkeys(axis for _, _, choices in self._inputs for axis in choices[0]))

    def of_sizes(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shape of each input where the axes are these, the first where two will do."""
        return {name: tuple(part for axis in axes[0] for part in sizes[axis]) for name, _, axes in self._inputs}

    def check(self, owner: str, given: Mapping[str, Sequence[TensorSpec]]) -> None:
        """Raise ShapeError unless inputs are as declared: by name, none where one is absent, several of a list."""
        sizes: Sizes = {}
        plain: DType | None = None  # the dtype of inputs of which none is named
        for name, kind, choices in self._inputs:
            for spec in given[name]:
                plain = plain or (None if kind else spec.dtype)
                first = plain or spec.dtype
                kinds = {"": first, "accumulation": first.accumulation, "any": spec.dtype}
                dtype = kinds.get(kind) or DType.parse(kind)
                known = [found for axes in choices if (found := _bound(axes, spec.shape, sizes)) is not None]
                if spec.dtype is not dtype or not known:
                    got = ", ".join(f"{name} {spec}" for name, specs in given.items() for spec in specs)
                    wanted = " or ".join(_written(axes, sizes) for axes in choices)
                    raise ShapeError(f"{owner}: got {got}, expected {name} {dtype}{wanted}. It takes {self.text}.")
                sizes = known[0]


def _bound(axes: Sequence[str], shape: tuple[int, ...], known: Sizes) -> Sizes | None:
    """Return the known sizes with those of further axes; None where a shape does not match the axes."""
    parts: list[tuple[int, ...]] = [(size,) for size in shape]
    if axes[:1] == ["..."]:
        lead = max(len(shape) - len(axes) + 1, 0)
        parts = [shape[:lead], *parts[lead:]]
    found = dict(known)
    same = len(parts) == len(axes) and all(found.setdefault(*pair) == pair[1] for pair in zip(axes, parts, strict=True))
    return found if same else None


def _written(axes: Sequence[str], known: Mapping[str, tuple[int, ...]]) -> str:
    """The axes, numbers in the place of those that are known."""
    return f"[{', '.join(str(part) for axis in axes for part in known.get(axis, (axis,)))}]"
