"""docs/performance.md is what tools/performance.py makes of the committed results, all of which it reads."""

import re
from pathlib import Path

import pytest

from tools import performance, result_files

RESULTS = result_files.LATEST.parent


def test_the_page_is_what_the_script_writes() -> None:
    assert performance.PAGE.read_text() == performance.render(), "run `make performance`"


def test_one_set_of_results_is_kept() -> None:
    assert {path.name for path in RESULTS.iterdir()} == {"latest", "launch", "release"}, "what `make NAME` said, too"


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


def test_measured_lines_of_adapters_beyond_memory_are_read_and_simulated_ones_are_not() -> None:
    printed = """
   8 adapters, room for 8: TTFT ms p50 80 p90 108 p99 164; 0 loads  other_cpu 0.00
  simulated with 2000 adapters, loads of no time: ms, and times the first such: p50 9 (1.1) p90 9 (1.1) p99 9 (1.1)
2000 adapters, room for 8: TTFT ms, and times the first line's: p50 90 (1.12) p90 150 (1.39) p99 300 (1.83); 99 loads of
"""
    assert re.findall(performance.ZIPF_LINE, printed) == [("8", "80", "164", "0"), ("2000", "90", "300", "99")]
