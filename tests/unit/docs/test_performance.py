"""docs/performance.md is what tools/performance.py makes of the committed results, all of which it reads."""

import re
from pathlib import Path

import pytest

from tools import performance, result_files

RESULTS = result_files.LATEST.parent


def test_the_page_is_what_the_script_writes() -> None:
    assert performance.PAGE.read_text() == performance.render(), "run `make performance`"


def test_one_set_of_results_is_kept() -> None:
    assert [path.name for path in RESULTS.iterdir()] == ["latest"]


def test_every_result_is_described_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    open_text = Path.read_text

    def noted(path: Path) -> str:
        read.add(path.name)
        return open_text(path)

    monkeypatch.setattr(Path, "read_text", noted)
    performance.render()
    stored = {path.name for path in result_files.LATEST.iterdir()} - {"README.md"}
    described = set(re.findall(r"^\| (\S+) \|", (result_files.LATEST / "README.md").read_text(), re.MULTILINE))
    assert read - {"README.md"} == stored
    assert described - {"file"} == stored
