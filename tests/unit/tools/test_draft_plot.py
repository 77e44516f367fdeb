"""The plot of what drafts bring is made of the committed records, and of others that have more batches."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import draft_plot


def test_the_committed_records_are_plotted(tmp_path: Path) -> None:
    gains = draft_plot.read_gains(draft_plot.LATEST)
    assert {gain.rows for gain in gains} == {1, 4} and any(gain.name == "distilled draft" for gain in gains)
    draft_plot.plot(gains, tmp_path / "drafts.png")
    assert (tmp_path / "drafts.png").read_bytes().startswith(b"\x89PNG")
    assert (draft_plot.DOCS / "drafts.png").is_file()


def test_other_batches_are_read_with_their_rows(tmp_path: Path) -> None:
    dictated = [
        {"name": f"drafts right {share}%", "acceptance": share / 100, "speed_up": [1.5, 1.0, 2.0], "predicted": 1.6}
        for share in (0, 50)
    ]
    other = {"name": "edit a passage", "acceptance": 0.5, "speed_up": [9.0], "predicted": 9.0}
    for rows in (1, 16):
        record = {"options": {"rows": rows}, "outcomes": [*dictated, other]}
        (tmp_path / f"speculation-llama-135m-{rows}.json").write_text(json.dumps(record))
    with pytest.raises(FileNotFoundError, match="drafts-grown"):
        draft_plot.read_gains(tmp_path)
    grown = {"outcomes": [{"rows": 8, "acceptance": 0.6, "speed_up": [1.2]}]}
    (tmp_path / "drafts-grown.json").write_text(json.dumps(grown))
    gains = draft_plot.read_gains(tmp_path)
    assert sorted({gain.rows for gain in gains}) == [1, 8, 16] and len(gains) == 5
    assert gains[1].median == 1.5, "of runs"
    draft_plot.plot(gains, tmp_path / "out.png")
