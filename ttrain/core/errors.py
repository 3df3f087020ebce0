"""Every error that ttrain raises on purpose, with the exit code that the command line turns it into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_DEVICE_BUSY = 75  # EX_TEMPFAIL of sysexits.h: try again later
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class TtrainError(Exception):
    """Base of all our errors. The message alone must tell what was given, what was expected and how to fix it."""

    exit_code = EXIT_FAILURE
    shared = False  # whether the other ranks know of it, where there are several


class UserError(TtrainError):
    """The user's input is wrong: a config value, a file, a checkpoint. Raised before any step runs."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """One or several problems of a config, reported together."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            message = f"{len(self.problems)} problems in the config:\n{listed}"
        super().__init__(message)


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the model that wants to load it."""


class DataError(UserError):
    """A corpus, token file or tokenizer can't be used."""


class DeviceUnavailable(UserError):
    """The device that was asked for is not on this machine."""


class DeviceBusy(TtrainError):
    """The device is held by another process; trying again later can help."""

    exit_code = EXIT_DEVICE_BUSY


class DeviceHang(TtrainError):
    """A call into the device's runtime did not return in time; starting again, from the newest checkpoint, can help."""

    exit_code = EXIT_DEVICE_BUSY


class NonFiniteError(TtrainError):
    """A loss, gradient or activation became NaN or infinite, at `step` where that is known."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class OutOfMemory(TtrainError):
    """The device or the host has no memory left for what a step needs.

    `train` is the section of the config that did not fit, `run` the folder of the run that it belongs to.
    """

    def __init__(self, message: str, train: Any = None, run: Path | None = None) -> None:
        super().__init__(message)
        self.train, self.run = train, run


class Interrupted(TtrainError):
    """The user or the system asked the run to stop; its state has been saved."""

    exit_code = EXIT_INTERRUPTED


class RankFailed(TtrainError):
    """Another rank ended the run, or is gone. `reported` says that its own process tells the user."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE, reported: bool = True) -> None:
        super().__init__(message)
        self.exit_code, self.reported = exit_code, reported


class ShapeError(TtrainError, ValueError):
    """An op or a step was given a tensor of another shape or dtype than it takes."""


class GraphError(TtrainError):
    """A graph breaks a rule of its stage. Always a fault in ttrain or in a plugin, never of the data."""


class PlanError(TtrainError):
    """A plan breaks one of its invariants, such as two live buffers that share bytes."""


class CaptureError(TtrainError):
    """Something happened inside or after a capture that a replay could not repeat."""


@contextmanager
def raised_as(
    kind: Callable[[str], Exception],
    what: str,
    advice: str = "",
    of: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> Iterator[None]:
    """Raise `kind` in the place of errors `of` other kinds: it says what failed, the reason, and what to do."""
    try:
        yield
    except of as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(getattr(error, "strerror", None) or error)
        stop = "" if reason.endswith((".", "?")) else "."
        raise kind(f"{what}: {reason}{stop} {advice}".rstrip()) from error
