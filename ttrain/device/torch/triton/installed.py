"""Tells if kernels of Triton can run, before any is made."""

from __future__ import annotations

from importlib.util import find_spec

_LEAST_CAPABILITY = (7, 5)


def has_triton() -> bool:
    """Return True if Triton is installed, as it is beside a torch that is built with CUDA."""
    return find_spec("triton") is not None


def lacking_triton(capability: tuple[int, int]) -> str | None:
    """Return why kernels of Triton can't run on a GPU of this compute capability; None where they can.

    Triton compiles what calls the driver with the machine's C compiler when it is first used: so it is used here.
    """
    if not has_triton():
        return "Triton is not installed"
    if capability < _LEAST_CAPABILITY:
        return f"Triton wants compute capability {'.'.join(map(str, _LEAST_CAPABILITY))}"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # whatever a compiler, a linker or a driver may say
        return f"Triton can't be used: {[*str(error).splitlines(), type(error).__name__][0]}"
    return None
