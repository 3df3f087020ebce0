"""Tests of your own ops, models and devices: every case against PyTorch in fp64, as `task=verify` holds ours.

The names in `__all__` are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttrain.testing.cases import cases_of
    from ttrain.testing.compare import Comparison, Tolerance, VerifyError, verdict
    from ttrain.testing.verifier import Verifier, check_model, check_ops

_PLACES = {"cases_of": "cases", "Verifier": "verifier", "check_model": "verifier", "check_ops": "verifier"}
__all__ = ["Comparison", "Tolerance", "Verifier", "VerifyError", "cases_of", "check_model", "check_ops", "verdict"]


def __getattr__(name: str) -> Any:
    """A public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ttrain.testing' has no attribute {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(f"ttrain.testing.{_PLACES.get(name, 'compare')}"), name)
