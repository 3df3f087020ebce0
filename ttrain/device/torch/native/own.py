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

# Whether A is stored [K, M], B is stored [N, K], there is a bias, and A is one row.
_Form = tuple[bool, bool, bool, bool]
_SEVERAL = ((False, False, False), (False, True, False), (False, True, True), (True, False, False))
_AFTER = "After::nothing"
_FORMS: list[_Form] = [*((*form, False) for form in _SEVERAL), (False, True, False, True), (False, True, True, True)]


def _body(form: _Form) -> str:
    sizes = ", ".join(f"number(a, {5 + index})" for index in range(6))
    *kinds, one = form
    tensors = [*(f"in<float>(a, {index})" for index in range(3)), "out<float>(a, 3)"]
    name = template("few_rows", 1, *kinds[1:], _AFTER) if one else template("product", *kinds, False, _AFTER)
    scratch = [] if one else ["out<float>(a, 4)", "number(a, 11)"]
    return call(name, f"Sizes{{{sizes}}}", *tensors, *scratch, "int(number(a, 12))")


@lru_cache(maxsize=1)
def _functions() -> Mapping[_Form, int]:
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
    if m == 1:
        return Sizing(threads).threads_for(n * k), 1
    return threads_of(m, n, k, DType.FP32, Sizing(threads)), scratch_size(k)


def product(out: Any, a: Any, b: Any, bias: Any, scratch: Any) -> Launch:
    """Launch of out [M, N] <- a [M, K] b [K, N] + bias; a or b may be a transposed view, and b has to where bias is."""
    (m, k), n, (threads, each) = a.shape, b.shape[1], scratch.shape
    turn_a, turn_b = not a.is_contiguous(), not b.is_contiguous()
    tensors, sizes = (a, b, bias, out, scratch), (m, n, k, m if turn_a else k, k if turn_b else n, n)
    function = _functions()[turn_a, turn_b, bias is not None, m == 1]
    return launch(function, [*map(address, tensors), *sizes, each, threads], tensors)
