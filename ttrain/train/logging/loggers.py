"""Views of metrics.jsonl: the progress bar, and the list of loggers that a run has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ttrain.core.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED
from ttrain.core.units import format_count
from ttrain.train.logging.metrics import EVAL, Event, Metrics, MetricsFile


class Logger(Protocol):
    """Receives every line of metrics.jsonl, and where it has `tell(event)`, every event of events.jsonl."""

    @property
    def run_id(self) -> str | None:
        """Return the id that a later attempt continues by; None where there is nothing to continue."""
        ...

    def log(self, metrics: Metrics) -> None: ...
    def close(self, exit_code: int) -> None: ...


class Console:
    """Messages on stderr for the user, above a bar with loss, learning rate, tokens/s and time left."""

    run_id = None

    def __init__(self, *, bar: bool = True, name: str | None = None) -> None:
        """`name` marks every message, where several runs share the terminal."""
        self._wanted, self._mark = bar, "" if name is None else f"{name}: "
        self.unit = "tokens"  # what steps count
        self.flag: str | None = None  # a word before the bar: what the numbers in it are
        self._bar: Any = None
        self._gone = False  # whether the stream can't be written any more
        self._shown: dict[str, str] = {}

    def start(self, step: int, steps: int) -> None:
        """Open the bar at `step` of `steps`."""
        if self._wanted:
            from tqdm import tqdm

            # Into a file or pipe, a bar that is redrawn often would fill it.
            interval = 0.1 if sys.stderr.isatty() else 5.0
            bar = partial(
                tqdm, desc=self.flag, total=steps, initial=step, unit="step", dynamic_ncols=True, mininterval=interval
            )
            self._show(lambda: setattr(self, "_bar", bar()))

    def advance(self) -> None:
        self._show(lambda: self._bar is None or self._bar.update(1))

    def say(self, message: str) -> None:
        """Print a line, above the bar where there is one."""
        message = self._mark + message
        if self._bar is not None:
            self._show(lambda: self._bar.write(message, file=sys.stderr))
        else:
            self._show(lambda: print(message, file=sys.stderr, flush=True))

    def _show(self, write: Callable[[], object]) -> None:
        """Print the bar. A closed terminal or a full disk must not end a run, which continues in silence."""
        if self._gone:
            return
        try:
            write()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._gone, self._wanted = True, False
            if self._bar is not None:
                self._bar.disable, self._bar = True, None

    def log(self, metrics: Metrics) -> None:
        if found := [f"{key} {value:.4f}" for key, value in metrics.items() if key.startswith(EVAL)]:
            self.say(f"Step {metrics['step']}: {', '.join(found)}.")
        if self._bar is None:
            return
        formats = {"train/loss": ("loss", "{:.4f}"), "val/loss": ("val", "{:.4f}"), "lr": ("lr", "{:.2e}")}
        for key, (label, form) in formats.items():
            if key in metrics:
                self._shown[label] = "none" if metrics[key] is None else form.format(metrics[key])
        for key, value in metrics.items():
            if "/" in key and not key.startswith(("train/", "val/", "lr/", EVAL)) and value is not None:
                self._shown[key] = f"{value:.3f}"
        if metrics.get("tokens_per_s"):
            speed = "tok/s" if self.unit == "tokens" else f"{self.unit}/s"
            self._shown[speed] = format_count(float(metrics["tokens_per_s"] or 0))
        self._bar.set_postfix(self._shown, refresh=False)

    def close(self, exit_code: int = 0) -> None:
        self._show(lambda: self._bar is None or self._bar.close())
        self._bar = None


class Loggers:
    """Writes metrics.jsonl first, then tells the views. A view that fails is dropped: it must not end a run."""

    def __init__(self, file: MetricsFile, console: Console, views: list[Logger]) -> None:
        self.file, self.console = file, console
        self._views: list[Logger] = [console, *views]
        self.draws = bool(views)  # whether a view draws every metric as a curve

    def log(self, metrics: Metrics) -> None:
        self.file.append(metrics)
        self._each(lambda view: view.log(metrics))

    def tell(self, event: Event) -> None:
        """Pass an event on to the views that receive events."""
        self._each(lambda view: view.tell(event) if hasattr(view, "tell") else None)

    def _each(self, act: Callable[[Any], object]) -> None:
        for view in list(self._views):
            try:
                act(view)
            except Exception as error:
                self._views.remove(view)
                self.console.say(
                    f"{type(view).__name__} failed and gets no more metrics ({error}); metrics.jsonl goes on."
                )
                self._close(view, 1)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End every view with the exit code that the error leads to."""
        failed = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE
        self.close(EXIT_DONE if error is None else getattr(error, "exit_code", failed))

    def close(self, exit_code: int) -> None:
        """End every view, also when another one fails to end."""
        for view in self._views[::-1]:
            self._close(view, exit_code)
        self._views = []
        self.file.close()

    def _close(self, view: Logger, exit_code: int) -> None:
        try:
            view.close(exit_code)
        except Exception as error:
            self.console.say(f"{type(view).__name__} could not be closed: {error}")
