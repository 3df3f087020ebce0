"""Supervision: training is a child process, which is started again from its newest checkpoint after a failure.

A run is not started again after success, wrong input (it would be wrong again), an interrupt, a NaN at the same step
twice, and more than `max_restarts` failures in a row without a new checkpoint between them.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER
from ttrain.core.files import read_json
from ttrain.core.units import format_duration
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.metrics import Events
from ttrain.train.runs.record import override
from ttrain.train.settings import SuperviseConfig
from ttrain.train.supervise.child import VARIABLE, Child, PassOn, describe_exit

_POLL_SECONDS = 0.1
LONGEST_WAIT = 300.0  # seconds before a restart
HOOK_SECONDS = 300.0  # that supervise.on_restart may take
_DUMP_SECONDS = 2.0  # for a hung child to print where it is


@dataclass
class _End:
    """End of one child."""

    code: int
    hung: bool
    told: dict[str, Any]

    @property
    def reason(self) -> str:
        if self.hung:
            return f"no sign of life; {describe_exit(self.code)}"
        message = str(self.told.get("message") or "").split("\n")[0]
        return f"{describe_exit(self.code)}{': ' if message else ''}{message}"


class Supervisor:
    """Runs and restarts one training run."""

    def __init__(
        self, config: SuperviseConfig, command: Callable[[Path | None], Sequence[str]], say: Callable[[str], None]
    ) -> None:
        """`command(run)` is the command line that continues a run, or with None the one that starts it."""
        self._config, self._command, self._say = config, command, say
        self._child: Child | None = None
        self._run: Path | None = None
        self.failures = 0  # in a row, without a new checkpoint between them
        self._reached = -1  # step of the newest checkpoint when the last child ended
        self._bad_step: int | None = None
        self.restarts = 0

    def run(self) -> int:
        """Supervise until the run ends for good. Return its exit code."""
        with (
            tempfile.TemporaryDirectory(prefix="ttrain-") as folder,
            PassOn(lambda: [] if self._child is None else [self._child]) as signals,
        ):
            while True:
                end = self._one(Path(folder) / f"heartbeat-{self.restarts}.json", signals)
                if signals.received or end.code in (EXIT_DONE, EXIT_USER, EXIT_INTERRUPTED):
                    return end.code if end.code >= 0 else 128 - end.code
                stop = self._judge(end)
                if stop:
                    self._note("gave_up", f"Supervision gives up: {stop} The last failure: {end.reason}.")
                    return end.code if end.code > 0 else EXIT_FAILURE
                self._prepare_restart(end, signals)
                if signals.received:
                    return EXIT_INTERRUPTED

    def _one(self, heartbeat: Path, signals: PassOn) -> _End:
        """Runs one child to its end."""
        heartbeat.touch()
        self._child = child = Child(self._command(self._run), {VARIABLE: str(heartbeat)})
        hung, limit = False, self._config.hang_timeout
        while (code := child.wait(_POLL_SECONDS)) is None:
            if self._run is None:
                self._learn_run(read_json(heartbeat))
            silent = time.time() - heartbeat.stat().st_mtime
            if not signals.received and limit is not None and silent > limit:
                hung = True
                self._end_hung(child)
        told = read_json(heartbeat)
        self._learn_run(told)
        self._child = None
        return _End(code, hung, told)

    def _learn_run(self, told: dict[str, Any]) -> None:
        if told.get("run"):
            self._run = Path(told["run"])

    def _end_hung(self, child: Child) -> None:
        self._note("hang", f"No sign of life for {self._config.hang_timeout:g} s; the process is killed.")
        child.send(signal.SIGUSR2)  # prints where every thread is
        if child.wait(_DUMP_SECONDS) is None:
            child.kill()

    def _judge(self, end: _End) -> str | None:
        """Return why there is no use in another start; None where there is."""
        found = [] if self._run is None else list_checkpoints(self._run / "checkpoints")[0]
        reached = found[-1].step if found else -1
        if reached > self._reached:
            self.failures = 0
        self._reached = max(reached, self._reached)
        self.failures += 1
        bad_step = end.told.get("step") if end.told.get("error") == "NonFiniteError" else None
        before = self._bad_step
        self._bad_step = bad_step if bad_step is not None else before
        if bad_step is not None and bad_step == before:
            return f"step {bad_step} is not finite again, so it would be the next time too."
        if self.failures > self._config.max_restarts:
            return f"{self.failures} failures in a row without a new checkpoint."
        return None

    def _prepare_restart(self, end: _End, signals: PassOn) -> None:
        """Say what happened, wait, and run on_restart."""
        self.restarts += 1
        config = self._config
        wait = min(config.backoff * 2 ** (self.failures - 1), LONGEST_WAIT)
        start = f"step {self._reached}" if self._reached >= 0 else "the beginning"
        told = f"Restart {self.restarts} from {start} in {format_duration(wait)}, after {end.reason}."
        self._note("restart", told, exit_code=end.code, hung=end.hung)
        until = time.monotonic() + wait
        while time.monotonic() < until and not signals.received:
            time.sleep(min(_POLL_SECONDS, max(until - time.monotonic(), 0)))
        if config.on_restart and not signals.received:
            self._run_hook(config.on_restart)

    def _run_hook(self, command: str) -> None:
        """Run the user's own command. The restart continues even if that fails."""
        try:
            done = subprocess.run(command, shell=True, timeout=HOOK_SECONDS, check=False)
            result = describe_exit(done.returncode)
        except subprocess.TimeoutExpired:
            result = f"ended after {HOOK_SECONDS:g} s"
        self._note("on_restart", f"supervise.on_restart ({command}): {result}.")

    def _note(self, kind: str, message: str, **facts: Any) -> None:
        self._say(message)
        if self._run is not None and self._run.is_dir():
            Events(self._run).add(kind, message, **facts)


def continuing(overrides: Sequence[str], run: Path | None) -> list[str]:
    """The overrides of a command line with run.dir and resume set to continue `run`."""
    if run is None:
        return list(overrides)
    kept = [each for each in overrides if each.lstrip("+").partition("=")[0] not in ("run.dir", "run", "resume")]
    return [*kept, override("run.dir", run), "resume=auto"]
