"""docs/tour.md stays a short walk: six files that exist, none longer than 200 lines."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_the_tour_is_six_short_files() -> None:
    page = (REPO / "docs" / "tour.md").read_text("utf-8")
    files = re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE)
    assert len(files) == 6
    assert {name: count for name in files if (count := (REPO / name).read_text("utf-8").count("\n")) > 200} == {}
