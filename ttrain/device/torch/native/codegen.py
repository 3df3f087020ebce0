"""Generate C++ for requests. A request is one op on tensors of known shape and dtype; all sizes are constants.

Functions take the addresses of inputs, outputs and workspace as one array `a`, in the order of the op's declaration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.native.toolchain import HEADERS

_PRELUDE = """\
{includes}

#define EXPORT extern "C" VISIBLE

// Several launches in one call.
struct Call {{
    void (*function)(void* const*);
    void* const* arguments;
}};
"""
_RUN = """\
EXPORT void ttrain_run(const Call* calls, i64 count) {
    for (i64 k = 0; k < count; ++k) calls[k].function(calls[k].arguments);
}"""
_FUNCTIONS = 12  # in one translation unit, where there are cores to compile several at once


def function_name(body: str) -> str:
    """The symbol of the function with this body."""
    return f"ttrain_{hashlib.sha256(body.encode()).hexdigest()[:16]}"


def library_sources(bodies: Sequence[str], processes: int, opening: str = "") -> list[str]:
    """Translation units with one function per body, at most one for each process that may compile them.

    Each begins with the lines of `opening`.
    """
    units = max(1, min(processes, len(bodies) // _FUNCTIONS))
    includes = "\n".join(f'#include "{path.name}"' for path in sorted(HEADERS.glob("*.h")))
    sources = []
    for unit in range(units):
        own = bodies[len(bodies) * unit // units : len(bodies) * (unit + 1) // units]
        functions = [f"EXPORT void {function_name(body)}(void* const* a) {{\n{body}\n}}" for body in own]
        parts = [opening + _PRELUDE.format(includes=includes), *([] if unit else [_RUN]), *functions, ""]
        sources.append("\n\n".join(parts))
    return sources


def call(function: str, *arguments: str) -> str:
    """The body that calls one function of the headers."""
    return f"{function}({', '.join(arguments)});"


def addresses(specs: Sequence[TensorSpec | None], inputs: int) -> list[str]:
    """Return C++ of the pointers to tensors that a call passes on, the first `inputs` of them read only.

    An absent tensor is a null pointer.
    """
    return [
        "nullptr" if spec is None else f"{'in' if index < inputs else 'out'}<{c_type(spec)}>(a, {index})"
        for index, spec in enumerate(specs)
    ]


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
        inputs, outputs = node.specs
        return Request.make(node.op.name, inputs, outputs, node.attributes)

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
_C_TYPES = {DType.FP32: "float", DType.BF16: "bf16", DType.INT64: "i64", DType.INT32: "i32", DType.INT16: "half16"}
_C_TYPES |= {DType.INT8: "int8_t", DType.UINT8: "uint8_t"}


def c_type(spec: TensorSpec) -> str:
    """The element type in C++."""
    return _C_TYPES[spec.dtype]


def c_float(value: float) -> str:
    """A number as an exact fp32 literal."""
    rounded = float(np.float32(value))
    if rounded != rounded or rounded in (float("inf"), float("-inf")):
        text = '__builtin_nanf("")' if rounded != rounded else "__builtin_inff()"
        return f"-{text}" if rounded < 0 else text
    return f"{rounded.hex()}f"


def template(name: str, *arguments: Any) -> str:
    """name<arguments>, booleans as C++ spells them."""
    spelled = (str(item).lower() if isinstance(item, bool) else str(item) for item in arguments)
    return f"{name}<{', '.join(spelled)}>"
