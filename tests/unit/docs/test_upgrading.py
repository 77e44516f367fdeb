"""docs/upgrading.md tells who has to do what for each entry of CHANGELOG.md that needs a hand, which stand together."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HAND = re.compile(r"- \*\*(?:Changed|Removed|Upgrade)\*\*.*\n(?:  .*\n)*")


def newest_block() -> str:
    """The block of CHANGELOG.md of the version that is made."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n## ")[0]


def test_what_needs_a_hand_stands_together() -> None:
    before, _, entries = newest_block().partition("\n### What needs a hand\n\n")
    assert not HAND.findall(before), "entries that need a hand go under `### What needs a hand`"
    assert HAND.sub("", entries + "\n").strip() == "", "only such entries"


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "upgrading.md").read_text()
    rows = page.partition("## What each version wants")[2].partition("| 0.1.0 | next |")[2]
    entries = HAND.findall(newest_block() + "\n")
    named = [set(re.findall(r"`([^`]+)`", entry)) for entry in entries]
    missing = [entry for entry, spans in zip(entries, named, strict=True) if not any(s in rows for s in spans)]
    assert not missing, missing
