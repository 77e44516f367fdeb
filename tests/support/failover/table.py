"""The table of disturbed runs, docs/reliability-table.md: a row for each request kind, death and phase, the latest run.

Written by the tests marked chaos, row by row, so that a run that is cut short leaves what it has shown.
"""

from collections.abc import Mapping
from pathlib import Path

from tests.support.failover.scene import Outcome
from tests.support.service import REPOSITORY

TABLE = REPOSITORY / "docs" / "reliability-table.md"
COLUMNS = ("request", "death", "phase", "sent", "ok", "resumed", "failed", "longest gap, s", "recovery, s")
INTRODUCTION = """# Reliability table

Runs of real services of two groups in which one dies at an exact point of a request. `make chaos` writes this page. The
rows of a whole run cover every pair of request kind, death and phase. After each the laws are checked: one row in the
ledger for each request with the tokens of its usage, no block, adapter, ticket or place in a queue held, the tokens of
the undisturbed run, and the processes that were not hit answer as before. A run in which one does not hold ends `make
chaos` with an error and has no row.

Sent: the request, its copy in the other group if there is one, and three streams beside it. Resumed: moves of a
request to another group. Longest gap: the longest silence of one of the streams. Recovery: from the death until two
groups serve again, which on a machine of a few cores is mostly the start of the new processes. Both grow with what else
the machine does; they are shown, not bounded.
"""


def render(rows: Mapping[tuple[str, str, str], Outcome], void: Mapping[tuple[str, str], str], planned: int) -> str:
    """The page. void: pairs of death and phase that cannot be, with the reason. planned: rows of a whole run."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [_line(rows[key]) for key in sorted(rows)]
    nothing = [f"- {death}, {phase}: {reason}" for (death, phase), reason in sorted(void.items())]
    count = f"{len(rows)} of the {planned} rows of a whole run have been played.\n"
    return "\n".join([INTRODUCTION, count, *lines, "", "## What cannot be", "", *nothing, ""])


def add(outcome: Outcome, void: Mapping[tuple[str, str], str], planned: int, table: Path = TABLE) -> None:
    """Writes one run's row; the others stay."""
    rows = read(table)
    rows[outcome.kind, outcome.death, outcome.phase] = outcome
    table.write_text(render(rows, void, planned))


def remove(key: tuple[str, str, str], void: Mapping[tuple[str, str], str], planned: int, table: Path = TABLE) -> None:
    """Takes out the row of an earlier run."""
    rows = read(table)
    if rows.pop(key, None) is not None:
        table.write_text(render(rows, void, planned))


def read(table: Path) -> dict[tuple[str, str, str], Outcome]:
    """The rows of the page, none if there is no page."""
    lines = table.read_text().splitlines() if table.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    found = [_outcome(row) for row in cells if row[3:4] != ["sent"]]
    return {(outcome.kind, outcome.death, outcome.phase): outcome for outcome in found}


def _line(outcome: Outcome) -> str:
    counts = (outcome.sent, outcome.ok, outcome.resumed, outcome.failed)
    times = (f"{outcome.gap_s:.1f}", f"{outcome.recovery_s:.1f}")
    return "| " + " | ".join(map(str, (outcome.kind, outcome.death, outcome.phase, *counts, *times))) + " |"


def _outcome(cells: list[str]) -> Outcome:
    kind, death, phase, sent, ok, resumed, _, gap, recovery = cells
    return Outcome(kind, death, phase, int(sent), int(ok), int(resumed), float(gap), float(recovery))
