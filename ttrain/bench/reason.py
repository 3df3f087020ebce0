"""Why a contender could not take part, as one line."""

from __future__ import annotations

from ttrain.core.errors import TtrainError

_LONGEST = 240
# Of torch's error classes: how they end, since their modules move between versions.
_NO_COMPILER = ("InvalidCxxCompiler", "CppCompileError", "CppWrapperCodeGenError")


def reason(error: BaseException) -> str:
    """The innermost cause that says something, shortened; a missing C++ compiler is named as such."""
    if isinstance(error, TtrainError):
        return _short(str(error))
    causes = [error]
    while (inner := causes[-1].__cause__ or getattr(causes[-1], "inner_exception", None)) is not None:
        if inner in causes:
            break
        causes.append(inner)
    text = " ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    if any(name in text for name in _NO_COMPILER):
        first = next(line for cause in reversed(causes) for line in str(cause).splitlines() if line.strip())
        return _short(f"no working C++ compiler: {first}")
    innermost = causes[-1]
    lines = [line for line in str(innermost).splitlines() if line.strip()]
    return _short(f"{type(innermost).__name__}: {lines[0] if lines else 'no message'}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
