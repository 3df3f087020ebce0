"""Requests -> C++: one function per distinct body, all sizes constants.

Functions take the addresses of inputs, outputs and workspace as one array `a`, in the order of the op's declaration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


def library_sources(bodies: Sequence[str], processes: int) -> list[str]:
    """Translation units with one function per body, at most one for each process that may compile them."""
    units = max(1, min(processes, len(bodies) // _FUNCTIONS))
    includes = "\n".join(f'#include "{path.name}"' for path in sorted(HEADERS.glob("*.h")))
    sources = []
    for unit in range(units):
        own = bodies[len(bodies) * unit // units : len(bodies) * (unit + 1) // units]
        functions = [f"EXPORT void {function_name(body)}(void* const* a) {{\n{body}\n}}" for body in own]
        parts = [_PRELUDE.format(includes=includes), *([] if unit else [_RUN]), *functions, ""]
        sources.append("\n\n".join(parts))
    return sources


def call(function: str, *arguments: str) -> str:
    """The body that calls one function of the headers."""
    return f"{function}({', '.join(arguments)});"


def addresses(types: Sequence[str], inputs: int) -> list[str]:
    """C++ of the pointers that a call passes on: `types` by position, the first `inputs` of them read only."""
    return [f"{'in' if index < inputs else 'out'}<{kind}>(a, {index})" for index, kind in enumerate(types)]
