"""Results on a page: put in, put in again, and pages that can't take one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttrain.bench.page import check_page, insert, main, mark_name
from ttrain.core.errors import UserError


def test_a_result_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- bench:a -->\nold\n<!-- /bench:a -->\n\nThe end.\n", "utf-8")
    insert(page, "a", "new\n")
    insert(page, "b", "other")
    insert(page, "a", "newer")
    assert page.read_text("utf-8") == (
        "# Title\n\n<!-- bench:a -->\n\nnewer\n\n<!-- /bench:a -->\n\nThe end.\n\n"
        "<!-- bench:b -->\n\nother\n\n<!-- /bench:b -->\n"
    )


def test_files_that_runs_wrote_find_their_place(tmp_path: Path) -> None:
    (tmp_path / "results.md").write_text("<!-- bench:mlp_tiny -->\nnumbers\n", "utf-8")
    main(str(tmp_path / "page.md"), [str(tmp_path / "results.md")])
    assert (tmp_path / "page.md").read_text(
        "utf-8"
    ) == "<!-- bench:mlp_tiny -->\n\nnumbers\n\n<!-- /bench:mlp_tiny -->\n"
    (tmp_path / "other.md").write_text("numbers", "utf-8")
    with pytest.raises(UserError, match=r"is no results\.md"):
        main(str(tmp_path / "page.md"), [str(tmp_path / "other.md")])


@pytest.mark.parametrize(
    "text",
    ["<!-- bench:a -->\n", "<!-- /bench:a -->\n<!-- bench:a -->\n", "<!-- bench:a -->\n<!-- /bench:a -->\n" * 2],
)
def test_marks_that_are_not_a_pair_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(text, "utf-8")
    with pytest.raises(UserError, match="each once"):
        check_page(tmp_path / "page.md", "a")
    with pytest.raises(UserError, match="is no file"):
        check_page(tmp_path, "a")


def test_names_tell_the_device_where_it_matters() -> None:
    assert mark_name("mlp_tiny", "auto") == "mlp_tiny" and mark_name("mlp_tiny", "n300") == "mlp_tiny_n300"
