"""The store of measurements: shared by processes, and empty where it is damaged."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ttrain.device import measured
from ttrain.device.measured import Section, positive


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_section_keeps_what_it_picks_and_leaves_the_others_alone() -> None:
    least, last = Section("least", positive, min), Section("last", str)
    assert least.known() == {}
    for number in (2.0, 1.0, 3.0):
        assert least.keep({"a": number}) and last.keep({"a": str(number)})
    assert least.keep({"b": 5.0}) and least.known() == {"a": 1.0, "b": 5.0} and last.known() == {"a": "3.0"}


def test_nothing_is_lost_where_many_write_at_once() -> None:
    section = Section("many", positive)
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda number: section.keep({str(number): number}), range(1, 41)))
    assert section.known() == {str(number): number for number in range(1, 41)}


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"version": 1}', '{"version": 1, "sections": 3}'])
def test_a_damaged_file_counts_as_empty(content: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "measured.json").write_text(content)
    section = Section("some", positive)
    assert section.known() == {} and section.keep({"a": 1.0}) and section.known() == {"a": 1.0}


@pytest.mark.parametrize("damage", ["Infinity", "NaN", "-1", "0", '"x"', "null", "[1]", f"1{'0' * 400}"])
def test_a_damaged_entry_is_left_out(damage: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "measured.json").write_text(f'{{"version": 1, "sections": {{"some": {{"a": {damage}, "b": 2}}}}}}')
    assert Section("some", positive).known() == {"b": 2.0}


def test_measurements_of_another_version_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section("some", positive)
    section.keep({"a": 1.0})
    monkeypatch.setattr(measured, "VERSION", 2)
    assert section.known() == {} and section.keep({"b": 1.0})
    assert json.loads(section.path.read_text())["version"] == 2 and section.known() == {"b": 1.0}


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.write_text("in the way")
    section = Section("some", positive)
    assert not section.keep({"a": 1.0}) and section.known() == {}
