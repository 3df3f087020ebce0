"""Tables at every width: nothing is lost, nothing is longer than the window."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ttrain.core import tables
from ttrain.core.tables import fitted
from ttrain.sweep import outcome
from ttrain.tasks import plan, runs
from ttrain.train.runs.run_directory import RunInfo


def test_a_table_that_fits_has_one_line_a_row() -> None:
    rows = [["name", "ms"], ["a", "10.5"], ["longer", "1"]]
    assert fitted(rows, 12, (0,)) == ["name      ms", "a       10.5", "longer     1"]
    assert fitted(rows, sys.maxsize, (0,)) == fitted(rows, 12, (0,))
    assert fitted(rows, 12, (0, 1)) == ["name    ms", "a       10.5", "longer  1"]


def test_a_wider_one_goes_on_below_with_its_first_column() -> None:
    rows = [["name", "first", "second", "third"], ["a", "1", "2", "3"]]
    assert fitted(rows, 20, (0,)) == ["name  first  second", "a         1       2", "", "name  third", "a         3"]


def test_a_cell_that_is_wider_than_a_line_is_folded() -> None:
    rows = [["run", "why"], ["outputs/long", "one two three four"]]
    assert fitted(rows, 16, (0, 1)) == [
        "run       why",
        "outputs/  one",
        "long      two",
        "          three",
        "          four",
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_that_tasks_print_fit_the_window_and_lose_nothing(
    columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (outcome, runs, tables):
        monkeypatch.setattr(module, "window", lambda: columns)
    records = [
        {
            "job": number, "optimizer.lr": "0.0003", "model.width": "192", "engine": "static", "state": "failed",
            "step": 1000, "train/loss": 1.23456, "objective": 1.3456 + number, "tokens_per_s": 123456.0,
            "seconds": 83.0, "reason": "train.batch_size=16 of 64 tokens takes 12 GiB of memory, and 8 GiB are free.",
        }
        for number in range(3)
    ]  # fmt: skip
    outcome.print_table(records, ["optimizer.lr", "model.width", "engine"], "best_val_loss")
    path = Path("outputs/2026-11-28/12-37-36_nano-gpt_cpu_static_of_a_long_name")
    runs._print([RunInfo(path, "finished", 1000, 1000, 1000, metrics=[{"train/loss": 1.5, "val/loss": 1.625}])])
    rows = [("blocks.*.attention of a name that is long", "12,345,678", "45.6%", "123.4 GiB", "1.5 ms")]
    plan._print([tables.Table("Parameters", ("module", "count", "share", "bytes", "time"), rows)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    of_sweep = ("optimizer.lr", "model.width", "best_val_loss", "1.2346", "2.3456", "123.5k", "GiB of memory,")
    for part in (*of_sweep, "1000/1000", "1.5000", "1.6250", str(path)[:15], *rows[0][1:], "count", "share"):
        assert any(part in line for line in lines), part
