"""The page of figures is what the command makes of the results in benchmarks/."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page, plot


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
