"""Writes docs/decisions/index.md, the table of all decisions, from the title and the `Status:` line of each.

    python -m tools.decision_index

A status is `accepted`, `amended by NNN (in what), ...` or `superseded by NNN`; the table also shows the other end: what
a decision changed. tests/unit/docs/test_decisions.py holds the page up to date. Needs the standard library only.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
PAGE = FOLDER / "index.md"
FORM = re.compile(r"# (\d{3}): (.+)\n\nStatus: (accepted|(?:amended|superseded) by \d{3}[^\n]*)\.\n")
HEAD = """# Decisions

Each page has the context of one decision, what was chosen and what it costs. A decision stays as it was written; where
a later one changed a part of it, or replaced it, its status says so. Names of files and classes are those of its day:
decisions that moved files have tables of old and new paths.

*This page is written by `python -m tools.decision_index` from the decisions' `Status:` lines.*

| | decision | status | changed |
|---|---|---|---|
"""


class Decision(NamedTuple):
    """One page. later: the numbers that its status names."""

    path: Path
    number: str
    title: str
    status: str
    later: frozenset[str]


def read(path: Path) -> Decision:
    """Return what a page says of itself; ValueError without a title and a status in the form above."""
    found = FORM.match(path.read_text())
    if found is None or found[1] != path.name[:3]:
        raise ValueError(f"{path.name} needs '# NNN: title', an empty line and 'Status: accepted.' or the like")
    number, title, status = found.groups()
    return Decision(path, number, title, status, frozenset(re.findall(r"\b\d{3}\b", status)))


def decisions(folder: Path = FOLDER) -> list[Decision]:
    """All pages by number; ValueError for a number that stands twice or names no later decision."""
    pages = [read(path) for path in sorted(folder.glob("[0-9]*.md"))]
    numbers = [page.number for page in pages]
    for page in pages:
        if numbers.count(page.number) > 1 or not all(page.number < later and later in numbers for later in page.later):
            raise ValueError(f"{page.path.name}: its number, or one in its status, is wrong")
    return pages


def render(pages: Sequence[Decision]) -> str:
    """Return the text of the page."""
    links = {page.number: f"[{page.number}]({page.path.name})" for page in pages}
    rows = []
    for page in pages:
        status = re.sub(r"\b\d{3}\b", lambda found: links[found[0]], page.status)
        changed = ", ".join(links[other.number] for other in pages if page.number in other.later)
        title = page.title[:1].upper() + page.title[1:]
        rows.append(f"| {links[page.number]} | {title} | {status} | {changed} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render(decisions()))
