"""Compiled products for engines that compile nothing else: a small library for each dtype, for any sizes.

They run on OpenMP's threads, like the kernels of torch around them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ttrain.core.errors import TtrainError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Launch
from ttrain.device.torch.kernels.common import DTYPES
from ttrain.device.torch.native.codegen import c_type, call, function_name, library_sources, template
from ttrain.device.torch.native.native import Sizing, address, launch
from ttrain.device.torch.native.products import scratch_size, threads_of
from ttrain.device.torch.native.threads import address_of, use_openmp
from ttrain.device.torch.native.toolchain import Toolchain, code_version


class _Form(NamedTuple):
    """A kind of product: A is stored [K, M], B is stored [N, K], there is a bias, A is one row."""

    turn_a: bool = False
    turn_b: bool = False
    bias: bool = False
    one_row: bool = False


_FORMS = [_Form(), _Form(turn_a=True), _Form(turn_b=True), _Form(turn_b=True, bias=True)]
_FORMS += [_Form(turn_b=True, bias=bias, one_row=True) for bias in (False, True)]


def _body(form: _Form, kind: str) -> str:
    """Return the C++ of a form. Its arguments: five tensors, six sizes, floats of scratch per thread, and threads."""
    sizes = ", ".join(f"number(a, {5 + index})" for index in range(6))
    tensors, after = [*(f"in<{kind}>(a, {index})" for index in range(3)), f"out<{kind}>(a, 3)"], "After::nothing"
    if form.one_row:
        name, scratch = template("few_rows", 1, form.turn_b, form.bias, after), []
    else:
        name = template("product", form.turn_a, form.turn_b, form.bias, False, after)
        scratch = ["out<float>(a, 4)", "number(a, 11)"]
    return call(name, f"Sizes{{{sizes}}}", *tensors, *scratch, "int(number(a, 12))")


@lru_cache(maxsize=2)
def _functions(dtype: torch.dtype) -> Mapping[_Form, int]:
    """Compile or load the library. Return addresses by form, or none if there is no compiler or it fails."""
    bodies = {form: _body(form, c_type(TensorSpec((), DTYPES[dtype]))) for form in _FORMS}
    try:
        library = Toolchain().load(library_sources([*bodies.values()], 1))
    except TtrainError as error:
        logging.getLogger(__name__).info("torch's libraries compute all matrix products: %s", error)
        return {}
    use_openmp(library, True)
    return {form: address_of(library, function_name(body)) for form, body in bodies.items()}


def version(dtype: torch.dtype) -> str | None:
    """Return a text that changes with the code of the products; None if they can't be compiled."""
    return code_version() if _functions(dtype) else None


def serves(k: int, plain_a: bool, plain_b: bool, dtype: torch.dtype) -> bool:
    """Return whether there is code for [M, k] and [k, N]: not if both are turned; rows of bf16 are whole pairs."""
    pairs = dtype is torch.float32 or k % 2 == 0 or (plain_b and not plain_a)
    return pairs and (plain_a or plain_b)


def scratch_shape(m: int, n: int, k: int, threads: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the scratch of a product of [m, k] and [k, n]: the threads that take part, and floats for each."""
    if m == 1:
        return Sizing(threads).threads_for(n * k), 1
    return threads_of(m, n, k, DTYPES[dtype], Sizing(threads)), scratch_size(k)


def product(out: Any, a: Any, b: Any, bias: Any, scratch: Any) -> Launch:
    """Return the launch of out [M, N] <- a [M, K] b [K, N] + bias.

    a or b may be a transposed view. With a bias, or if M is 1, b must be one.
    """
    (m, k), n, (threads, each) = a.shape, b.shape[1], scratch.shape
    turn_a, turn_b = not a.is_contiguous(), not b.is_contiguous()
    tensors, sizes = (a, b, bias, out, scratch), (m, n, k, m if turn_a else k, k if turn_b else n, n)
    function = _functions(a.dtype)[_Form(turn_a, turn_b, bias is not None, m == 1)]
    return launch(function, [*map(address, tensors), *sizes, each, threads], tensors)
