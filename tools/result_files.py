"""Reads raw benchmark output in benchmarks/results/latest, and writes figures and tables in Markdown.

Needs the standard library only.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LATEST = ROOT / "benchmarks" / "results" / "latest"
NUMBER = r"([\d.]+)"
Table = Sequence[Sequence[str]]


class MissingFigureError(ValueError):
    """A line that the page needs is missing from a result file."""


def read_text(name: str) -> str:
    """A printed output with every run of white space as one space: consoles wrap lines where they are full."""
    return " ".join((LATEST / name).read_text().split())


def read_json(name: str) -> Any:
    return json.loads((LATEST / name).read_text())


def found(pattern: str, name: str) -> list[tuple[str, ...]]:
    """The groups of every match of `pattern` in a printed output, at least one."""
    matches = [match.groups() for match in re.finditer(pattern, read_text(name))]
    if not matches:
        raise MissingFigureError(f"{name}: nothing matches {pattern!r}")
    return matches


def one(pattern: str, name: str) -> tuple[str, ...]:
    """The groups of the only match."""
    matches = found(pattern, name)
    if len(matches) != 1:
        raise MissingFigureError(f"{name}: {len(matches)} matches of {pattern!r}")
    return matches[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def whole(value: float) -> str:
    return f"{value:,.0f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """`0.84 to 1.00`, or one figure where they are equal."""
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
