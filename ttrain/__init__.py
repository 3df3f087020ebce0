"""ttrain trains language models from a config: a step is derived once, planned into buffers, and replayed.

Programs use the names in `__all__`, which `ttrain/api.py` holds; they are loaded when first used, so `import ttrain`
takes no time. Models are made of `ttrain.nn` and `ttrain.ops`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttrain.api import Config, StepResult, Training, TtrainError, UserError, load_config, option, register, run

__version__ = "0.2.0"
__all__ = ["Config", "StepResult", "Training", "TtrainError", "UserError", "load_config", "option", "register", "run"]


def __getattr__(name: str) -> Any:
    """A public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ttrain' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module("ttrain.api"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
