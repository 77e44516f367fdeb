"""docs/decisions/index.md lists every decision with its status."""

from pathlib import Path

import pytest

from tools import decision_index


def test_the_index_is_what_the_script_writes() -> None:
    pages = decision_index.decisions()
    assert len(pages) > 40
    assert decision_index.PAGE.read_text() == decision_index.render(pages), "run `python -m tools.decision_index`"


def page(folder: Path, number: str, status: str) -> None:
    (folder / f"{number}-a.md").write_text(f"# {number}: title {number}\n\nStatus: {status}.\n\n**Context.**\n")


def test_both_ends_of_a_change_are_shown(tmp_path: Path) -> None:
    page(tmp_path, "001", "amended by 002 (how)")
    page(tmp_path, "002", "accepted")
    first, second = decision_index.render(decision_index.decisions(tmp_path)).splitlines()[-2:]
    assert first == "| [001](001-a.md) | Title 001 | amended by [002](002-a.md) (how) |  |"
    assert second == "| [002](002-a.md) | Title 002 | accepted | [001](001-a.md) |"


def test_a_page_without_a_status_or_with_a_wrong_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "001-a.md").write_text("# 001: title\n\n**Context.**\n")
    with pytest.raises(ValueError, match="001-a"):
        decision_index.decisions(tmp_path)
    for wrong in ("superseded by 001", "amended by 009 (what)"):
        page(tmp_path, "001", wrong)
        with pytest.raises(ValueError, match="001-a"):
            decision_index.decisions(tmp_path)
