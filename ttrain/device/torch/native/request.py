"""Request to the generator: one op on tensors of known shape and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.core.spec import DType, TensorSpec

Node = Any  # of a graph, which lies above devices


@dataclass(frozen=True)
class Request:
    """One op with everything that its kernel is specialised for."""

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[tuple[str, Any], ...]

    @staticmethod
    def make(
        op: str, inputs: Iterable[TensorSpec | None], outputs: Iterable[TensorSpec], attributes: Mapping[str, Any]
    ) -> Request:
        return Request(op, tuple(inputs), tuple(outputs), tuple(sorted(attributes.items())))

    @staticmethod
    def of_node(node: Node) -> Request:
        return Request.make(node.op.name, *node.specs, node.attributes)

    def __str__(self) -> str:
        inputs = ", ".join("-" if spec is None else str(spec) for spec in self.inputs)
        settings = (f"{name}={value}" for name, value in self.attributes)
        return " ".join([f"{self.op}({inputs}) ->", *map(str, self.outputs), *settings])

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes by name."""
        return dict(self.attributes)

    def input(self, index: int) -> TensorSpec:
        """The spec of an input that is present."""
        spec = self.inputs[index]
        assert spec is not None
        return spec

    def has(self, index: int) -> bool:
        """Return whether an optional input is present."""
        return index < len(self.inputs) and self.inputs[index] is not None


STORED = (DType.FP32, DType.BF16)  # dtypes that kernels read and write


def stored(specs: Iterable[TensorSpec | None]) -> bool:
    """Return whether kernels can read and write all of these."""
    return all(spec is None or spec.dtype in STORED for spec in specs)


def c_type(spec: TensorSpec) -> str:
    """The element type in C++."""
    return {DType.FP32: "float", DType.BF16: "bf16", DType.INT64: "i64", DType.INT16: "half16"}[spec.dtype]


def c_float(value: float) -> str:
    """A number as an exact fp32 literal."""
    from numpy import float32

    rounded = float(float32(value))
    if rounded != rounded or rounded in (float("inf"), float("-inf")):
        text = '__builtin_nanf("")' if rounded != rounded else "__builtin_inff()"
        return f"-{text}" if rounded < 0 else text
    return f"{rounded.hex()}f"


def c_double(value: float) -> str:
    """Return a number as an exact C++ literal."""
    return float(value).hex()


def c_bool(value: bool) -> str:
    """Return a truth value as a C++ literal."""
    return "true" if value else "false"


def template(name: str, *arguments: Any) -> str:
    """name<arguments>, booleans as C++ spells them."""
    spelled = (c_bool(item) if isinstance(item, bool) else str(item) for item in arguments)
    return f"{name}<{', '.join(spelled)}>"


def rows_and_width(shape: Sequence[int]) -> tuple[int, int]:
    """[..., C] as (rows, C)."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]
