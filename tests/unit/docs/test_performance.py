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


def test_todays_words_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded outputs have the words of their day; benchmarks print others now."""
    for file in result_files.LATEST.iterdir():
        text = file.read_text().replace("of floor", "of the roofline").replace("floor", "roofline")
        text = (
            text.replace("KV bfloat16 1.00x", "KV bfloat16, replay 1.00x") if file.name == "decode-step.txt" else text
        )
        (tmp_path / file.name).write_text(text.replace("KV bfloat16, run", "KV bfloat16, eager"))
    page = performance.render()
    monkeypatch.setattr(result_files, "LATEST", tmp_path)
    assert performance.render() == page


def test_a_result_without_its_line_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "LATEST", tmp_path)
    (tmp_path / "startup.txt").write_text("first answer after 7.2 s\n")
    with pytest.raises(result_files.MissingFigureError, match=r"startup\.txt"):
        performance.startup_section()
