"""docs/tour.md stays a short walk: six files, none longer than 200 lines, with the line counts that it states."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_the_tour_is_six_short_files() -> None:
    page = (REPO / "docs" / "tour.md").read_text("utf-8")
    stated = {name: int(lines) for name, lines in re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", page, re.MULTILINE)}
    assert len(stated) == 6 and max(stated.values()) <= 200
    assert stated == {name: (REPO / name).read_text("utf-8").count("\n") for name in stated}
