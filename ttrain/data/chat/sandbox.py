"""Run chat templates, which are not trusted, in one child process with limits on its memory and time."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from ttrain.core.errors import DataError
from ttrain.core.units import format_bytes

SECONDS = 10  # of computing that one rendering may take
MEMORY = 1 << 29  # bytes of address space that the child may take
OUT_OF_MEMORY = 3  # exit code of the child
_SAFE = (3, 1, 6)  # earlier versions of Jinja2 have known ways out of their sandbox
_KEPT = ("LD_LIBRARY_PATH", "TZ", "TZDIR")  # variables that the child sees; no secret is among them
_START = "import sys; sys.path[:] = {path!r}; from ttrain.data.chat.renderer import main; main({limits})"

Variant = tuple[list[Any], bool]  # messages, and if the text ends with a prompt for a reply


class Sandbox:
    """A child process that renders templates. It starts with the first request and ends with this process."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, source: str, marks: tuple[str, str], names: Mapping[str, Any], variants: Sequence[Variant], place: object
    ) -> tuple[str, list[list[int]]]:
        """Return the text of the first variant, and how the others compare with it; see renderer.

        Raises DataError for what is no template or takes too much, and ValueError for messages that it fails on.
        `place` is where it is from.
        """
        with self._lock:
            process = self._running()
            try:
                with suppress(BrokenPipeError):  # of a dead child, which gives no answer
                    pickle.dump((source, marks, names, variants), process.stdin, pickle.HIGHEST_PROTOCOL)
                    process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # such as Ctrl-C: an answer that nobody reads would be taken for the next one
                process.kill()
                process.wait()
                raise
            if not line.endswith(b"\n"):
                raise _ended(process.wait(), place)
        found = json.loads(line)
        if "template" in found:
            number, why = found["template"]
            raise DataError(f"the tokenizer's chat template{f', line {number}' if number else ''}: {why}.")
        if "failed" in found:
            raise ValueError(f"the tokenizer's chat template {found['failed']}")
        return found["text"], found["compared"]

    def _running(self) -> Any:
        """Return the child, started anew where there is none, where it is dead, or where it is that of a parent."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            _require_safe_jinja2()
            code = _START.format(path=sys.path, limits=f"{SECONDS}, {MEMORY}, {OUT_OF_MEMORY}")
            environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
            self._owner, self._process = os.getpid(), subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=environment, start_new_session=True,  # Ctrl-C is not for it
            )  # fmt: skip
        return self._process


SANDBOX = Sandbox()  # of this process


def _ended(code: int, place: object) -> DataError:
    """Return the error for a template that ended the child with an exit code."""
    why = f"takes more than {format_bytes(MEMORY)} of memory"
    if code == -signal.SIGXCPU:
        why = f"computes for more than {SECONDS} s, so it may never end"
    elif code not in (OUT_OF_MEMORY, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
        why = f"ended its process with code {code}"
    mend = "Mend it, shorten the conversation, or give data.template=chatml, plain or a text"
    return DataError(f"the chat template of {place} {why}. {mend}.")


def _require_safe_jinja2() -> None:
    version = metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _SAFE:
        raise DataError(f"jinja2 {version} has holes in its sandbox: pip install -U 'jinja2>=3.1.6'.")
