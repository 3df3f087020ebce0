"""The page of figures is what the command makes of the results in benchmarks/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare, page, plot
from tests.bench.test_report import result


def test_the_page_is_what_the_command_writes_and_shows_every_result() -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.written(text) == text
    shown = {name for found in page.MARK.finditer(text) for name in found[2].split()}
    assert shown == {path.stem for path in page.RESULTS.glob("*.json")}
    assert len(text.split()) <= 2_500


def test_a_table_has_a_line_per_contender_or_a_column() -> None:
    text = page.written("<!-- table mlp_tiny: contender, x -->\nold\n<!-- /table -->\n")
    assert "| traced | 7.63 |" in text and "old" not in text and text.count("2026-11-29") == 1
    text = page.written("<!-- table mlp_tiny: ms/step, x -->\n<!-- /table -->\n")
    assert "| tiny | fp32 | 0.177 (1.00) |" in text


def test_a_plot_of_what_was_timed(tmp_path: Path) -> None:
    plot.draw(page.result_of("gpt_char"), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text("utf-8").count("</svg>") == 1


def test_two_results_are_compared_and_what_else_changed_is_named(tmp_path: Path) -> None:
    files = [tmp_path / "earlier.json", tmp_path / "later.json"]
    for file, values in zip(files, (result(), result(static_ms=0.25, threads=1)), strict=True):
        file.write_text(json.dumps(values), "utf-8")
    found = compare.compared(*(compare.read(str(file)) for file in files))
    assert found.rows[1] == ("char fp32 static", "0.5", "0.25", "2.00")
    assert any("2 earlier" in note and "1 later" in note and "threads" in note for note in found.notes)
    for content in ('{"format": 1}', "[]", '{"bench": "gpt"}'):
        files[0].write_text(content, "utf-8")
        with pytest.raises(SystemExit):
            compare.read(str(files[0]))
