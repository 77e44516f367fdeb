"""The plot of what drafts bring, over acceptance and over batch, from the committed records of the two benchmarks.

    python -m benchmarks.engine.draft_plot [--results benchmarks/results/latest] [--out docs/drafts.png]

Reads speculation-llama-135m-ROWS.json (make bench-speculation: drafts that are right with a given probability) and
drafts-grown.json (make bench-drafts: a distilled draft). After new measurements: this, then make performance.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LATEST = Path(__file__).resolve().parents[1] / "results" / "latest"
DOCS = Path(__file__).resolve().parents[2] / "docs"
DICTATED = "drafts right "
"""How the names of outcomes begin in which drafts are right with a given probability."""


class Gain(NamedTuple):
    """An outcome: rows at once, accepted drafts over drafts, how many times as fast by run, and by predicted times of
    steps. name: its series."""

    name: str
    rows: int
    acceptance: float
    runs: list[float]
    predicted: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def read(file: Path) -> dict[str, Any]:
    """Returns a benchmark's record."""
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def read_gains(results: Path) -> list[Gain]:
    """Returns the outcomes of both benchmarks. FileNotFoundError where one is missing."""
    files = sorted(results.glob("speculation-llama-135m-*.json"))
    if not files:
        raise FileNotFoundError(f"no speculation-llama-135m-*.json in {results}")
    gains = [
        Gain(one["name"], record["options"]["rows"], one["acceptance"], one["speed_up"], one["predicted"])
        for record in map(read, files)
        for one in record["outcomes"]
        if one["name"].startswith(DICTATED)
    ]
    for one in read(results / "drafts-grown.json")["outcomes"]:
        gains.append(Gain("distilled draft", one["rows"], one["acceptance"], one["speed_up"]))
    return gains


def plot(gains: Sequence[Gain], file: Path) -> None:
    """Plots the gain over acceptance, a line for each batch, and over the batch, a line for each text."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    _over_acceptance(axes[0], gains)
    _over_rows(axes[1], gains)
    for axis in axes:
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("times as fast as without drafts")
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _over_acceptance(axis: Any, gains: Sequence[Gain]) -> None:
    for rows in sorted({gain.rows for gain in gains}):
        own = sorted((gain for gain in gains if gain.rows == rows and gain.predicted is not None), key=_acceptance)
        (line,) = axis.plot(
            [_acceptance(one) for one in own], [one.median for one in own], "-", label=f"{rows} at once"
        )
        color = line.get_color()
        axis.plot([_acceptance(one) for one in own], [one.predicted for one in own], ":", color=color)
        for gain in gains:
            if gain.rows == rows:
                mark = "." if gain.predicted is not None else "*"
                axis.plot([_acceptance(gain)] * len(gain.runs), gain.runs, mark, color=color)
    axis.set(title="dotted: predicted; stars: distilled draft", xlabel="accepted drafts, % of drafts")


def _over_rows(axis: Any, gains: Sequence[Gain]) -> None:
    for name in dict.fromkeys(gain.name for gain in gains):
        own = sorted((gain for gain in gains if gain.name == name), key=lambda gain: gain.rows)
        axis.plot([one.rows for one in own], [one.median for one in own], "o-", label=name)
    axis.set(title="medians of runs", xlabel="sequences at once", xticks=sorted({gain.rows for gain in gains}))


def _acceptance(gain: Gain) -> float:
    return 100 * gain.acceptance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=LATEST, help="folder of the records")
    parser.add_argument("--out", type=Path, default=DOCS / "drafts.png")
    options = parser.parse_args()
    plot(read_gains(options.results), options.out)


if __name__ == "__main__":
    main()
