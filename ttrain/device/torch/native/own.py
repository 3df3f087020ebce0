"""Compiled fp32 products for engines that compile nothing else: one small library, whose functions take all sizes.

They run on the threads of OpenMP's runtime, as the kernels of torch around them do.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ttrain.core.errors import TtrainError
from ttrain.core.spec import DType
from ttrain.device.base import Launch
from ttrain.device.torch.native.codegen import call, function_name, library_sources, template
from ttrain.device.torch.native.native import Sizing, address, launch
from ttrain.device.torch.native.products import scratch_size, threads_of
from ttrain.device.torch.native.threads import use_openmp
from ttrain.device.torch.native.toolchain import Toolchain, code_version

# Whether A is stored [K, M], B is stored [N, K], and there is a bias.
_FORMS = ((False, False, False), (False, True, False), (False, True, True), (True, False, False))


def _body(form: tuple[bool, bool, bool]) -> str:
    sizes = ", ".join(f"number(a, {5 + index})" for index in range(6))
    tensors = [f"in<float>(a, {index})" for index in range(3)] + [f"out<float>(a, {index})" for index in (3, 4)]
    name = template("product", *form, False, "After::nothing")
    return call(name, f"Sizes{{{sizes}}}", *tensors, "number(a, 11)", "int(number(a, 12))")


@lru_cache(maxsize=1)
def _functions() -> Mapping[tuple[bool, bool, bool], int]:
    """Compile or load the library; return addresses by form, none where there is no compiler or it fails."""
    try:
        library = Toolchain().load(library_sources([_body(form) for form in _FORMS], 1))
    except TtrainError as error:
        logging.getLogger(__name__).info("the libraries of torch form all matrix products: %s", error)
        return {}
    use_openmp(library, True)
    found = {form: getattr(library, function_name(_body(form))) for form in _FORMS}
    return {form: ctypes.cast(function, ctypes.c_void_p).value or 0 for form, function in found.items()}


def version() -> str | None:
    """Return a text that changes with the code of the products; None where there is none."""
    return code_version() if _functions() else None


def room(m: int, n: int, k: int, threads: int) -> tuple[int, int]:
    """Return the shape of the scratch of a product of [m, k] and [k, n]: threads that take part, and floats of each."""
    return threads_of(m, n, k, DType.FP32, Sizing(threads)), scratch_size(k)


def product(out: Any, a: Any, b: Any, bias: Any, scratch: Any) -> Launch:
    """Launch of out [M, N] <- a [M, K] b [K, N] + bias; a or b may be a transposed view, and b has to where bias is."""
    (m, k), n, (threads, each) = a.shape, b.shape[1], scratch.shape
    turn_a, turn_b = not a.is_contiguous(), not b.is_contiguous()
    tensors, sizes = (a, b, bias, out, scratch), (m, n, k, m if turn_a else k, k if turn_b else n, n)
    function = _functions()[turn_a, turn_b, bias is not None]
    return launch(function, [*map(address, tensors), *sizes, each, threads], tensors)
