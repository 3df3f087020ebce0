"""Long work says what it does and how much is done; quick work says nothing."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrain.cli import main
from ttrain.core import waiting
from ttrain.core.waiting import Waiting, waited_for

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "device=cpu", "data.max_bytes=90000"]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 150
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_what_takes_long_is_told_again_and_again_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = clock(monkeypatch)
    baking = Waiting("Baking", said.append)
    now[0] = 104.0
    with baking:
        until(lambda: said == ["Baking: 4.0 s so far."])
        baking.at(5, 25)
        now[0] = 140.0
        until(lambda: len(said) == 2)
    assert said[1] == "Baking: 5 of 25 after 40.0 s, about 2 min 40 s left."
    until(lambda: not any(thread.name == "waiting: Baking" for thread in threading.enumerate()))
    now[0] = 999.0
    time.sleep(0.02)
    assert len(said) == 2


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that waiting goes by, to be set; threads look every millisecond."""
    now = [100.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting, "AFTER", 0.001)
    return now


def test_parts_are_told_with_the_whole_each_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = clock(monkeypatch)
    with Waiting("Baking", said.append) as baking:
        for number, _ in enumerate(waited_for(["brown", "white"], "Beating eggs", lambda egg: f"the {egg} one")):
            now[0] += 4
            egg = ("brown", "white")[number]
            beaten = f"Baking, {4 * number + 4:.1f} s so far: beating eggs ({number} of 2: the {egg} one)."
            assert baking.text() == beaten
        with Waiting("Kneading"), Waiting("Seeking flour") as search:
            search.at(1, 3)
            until(lambda: any("flour" in line for line in said))
            count = len(said)
            time.sleep(0.02)
            assert len(said) == count
            now[0] += 30
            until(lambda: len(said) > count)
    assert said[count:] == ["Baking, 38.0 s so far: kneading, seeking flour (1 of 3)."]


def test_a_thread_beside_the_main_one_is_silent_unless_it_is_told_where_to_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch)
    said: list[str] = []

    def work() -> None:
        with Waiting("Saving beside"):
            time.sleep(0.02)
        with Waiting("Baking", said.append), Waiting("Beating eggs"):
            until(lambda: any("eggs" in line for line in said))

    thread = threading.Thread(target=work)
    with Waiting("Walking", lambda text: None):
        thread.start()
        thread.join()
    assert said[-1] == "Baking, 0 ms so far: beating eggs." and capsys.readouterr().err == ""


def test_what_is_quick_or_fails_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(waited_for([3, 1, 2], "Counting")) == [3, 1, 2]
    with pytest.raises(KeyError), Waiting("Failing"):
        raise KeyError
    until(lambda: not any(thread.name.startswith("waiting: ") for thread in threading.enumerate()))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.steps=2", "train.eval_sequences=null"],
         ["Importing what device=cpu needs", "Reading the data", "Placing the model", "drawing initial values",
          "planning steps", "The first step is under way", "Evaluating on held-out data",
          "Saving the checkpoint of step 2", "writing files of parameters"]),
        (["task=plan", "plan.limits=true", "plan.memory_gb=0.01", "plan.time=false"],
         ["Planning", "Searching the largest"]),
        (["task=verify", "verify.ops=[gelu,linear]"], ["Comparing ops", "Comparing the model"]),
    ],
    ids=["train", "plan", "verify"],
)  # fmt: skip
def test_what_a_command_does_is_told_where_it_takes_long(
    overrides: list[str],
    told: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of its parts waits here until it was told of."""
    leave: Any = Waiting.close

    def close(self: Waiting) -> None:
        if not self._ended.is_set() and threading.current_thread() is threading.main_thread():
            until(lambda: self in spoken)
        leave(self)

    spoken: set[Waiting] = set()
    text = Waiting.text
    monkeypatch.setattr(Waiting, "text", lambda self: (spoken.update(self._open), text(self))[1])
    monkeypatch.setattr(Waiting, "close", close)
    monkeypatch.setattr(waiting, "AFTER", 0.002)
    assert main([*SMALL, *overrides, f"run.dir={tmp_path}/run", "sample.tokens=1"]) == 0
    err = capsys.readouterr().err.lower()  # a part of what began before is told in small letters
    assert not [part for part in told if part.lower() not in err]


def test_a_run_and_what_is_made_of_it_tell_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "train.steps=2", f"run.dir={tmp_path}/run", "sample.tokens=1"]) == 0
    opened: list[str] = []
    enter = Waiting.__enter__
    monkeypatch.setattr(
        Waiting, "__enter__", lambda self: (enter(self), opened.append(self._what) if self._open[0] is self else 0)[0]
    )
    run = f"run.dir={tmp_path}/run"
    assert main(["task=sample", run, "sample.tokens=1", "device=cpu"]) == 0
    assert main(["task=export", run, f"export.file={tmp_path}/a.safetensors", f"export.dir={tmp_path}/b"]) == 0
    assert main(["task=runs", f"runs.root={tmp_path}"]) == 0 and main(["task=report", f"run={tmp_path}/run"]) == 0
    assert [what for what in opened if not re.search("^(Importing|Verifying) ", what)] == [
        "Loading the model", "Reading the parameters", f"Writing {tmp_path}/a.safetensors and {tmp_path}/b",
        "Reading runs", "Reading runs",
    ]  # fmt: skip


def test_the_first_word_of_a_process_does_not_wait_anew_for_what_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = clock(monkeypatch)
    monkeypatch.setattr(waiting, "AFTER", 600.0)
    monkeypatch.setattr(waiting, "_due", now[0] + 0.01)
    with Waiting("Baking", said.append):
        until(lambda: said == ["Baking: 0 ms so far."])
