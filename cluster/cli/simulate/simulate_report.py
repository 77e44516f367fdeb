"""The results of `tandem simulate` as a table, as JSON, and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tandem.cluster.cli.base.plot_file import drawn
from tandem.cluster.cli.base.terminal import table
from tandem.cluster.simulator.simulation import SimulatedRun
from tandem.cluster.simulator.steps.fitted_times import FittedTimes

COLUMNS: Final = (
    ("goodput/s", "goodput", 1.0, 2),
    ("tokens/s", "output_tokens_per_s", 1.0, 0),
    ("TTFT p50 ms", "ttft_p50_s", 1e3, 1),
    ("p99 ms", "ttft_p99_s", 1e3, 1),
    ("ITL p50 ms", "itl_p50_s", 1e3, 1),
    ("p99 ms", "itl_p99_s", 1e3, 1),
    ("hit rate", "hit_rate", 1.0, 3),
    ("busy", "mean_busy", 1.0, 2),
    ("group-hours", "group_hours", 1.0, 3),
)
"""Title, figure, factor and decimals of each column."""


def text_report(runs: Sequence[SimulatedRun], is_scaled: bool) -> str:
    """Returns a line a run, and below it what was not served, moved or scaled."""
    rows = [["policy", "groups", "served", *(title for title, *_ in COLUMNS)]]
    notes = []
    for run in runs:
        figures = run.figures
        shown = [f"{figures[name] * factor:,.{digits}f}" for _, name, factor, digits in COLUMNS]
        groups = f"{run.groups}*" if is_scaled else str(run.groups)
        rows.append([run.policy, groups, f"{figures['served']:.0f}/{figures['requests']:.0f}", *shown])
        notes += _notes(run)
    if is_scaled:
        notes.append("* at the start; the number of groups follows the load")
    return "\n".join([*table(rows), *notes]) + "\n"


def _notes(run: SimulatedRun) -> list[str]:
    name = f"{run.policy}, {run.groups} groups"
    failed = {why: count for why, count in run.ends.items() if why not in ("stop", "length")}
    notes = [f"{name}: {count} requests ended with {why}" for why, count in failed.items()]
    if run.figures["moved"]:
        notes.append(f"{name}: {run.figures['moved']:.0f} moves of requests to another group after a loss")
    return notes + [f"{name}: at {one.at_s:.0f} s to {one.groups} groups: {one.why}" for one in run.scaled]


def json_report(runs: Sequence[SimulatedRun], times: FittedTimes) -> str:
    """Returns one object with all figures."""
    found: dict[str, Any] = {"step_times": msgspec.to_builtins(times), "runs": msgspec.to_builtins(runs)}
    return json.dumps(found, indent=1) + "\n"


def draw_runs(runs: Sequence[SimulatedRun], file: Path) -> None:
    """Draws goodput, first tokens and hits by number of groups, a line for each policy. SettingsError when the file
    cannot be written."""
    shown = (("goodput", 1.0, "good requests a second"), ("ttft_p99_s", 1e3, "TTFT p99, ms"), ("hit_rate", 1.0, "hits"))
    with drawn(file, len(shown)) as (_, axes):
        for axis, (name, factor, title) in zip(axes, shown, strict=True):
            for policy in dict.fromkeys(run.policy for run in runs):
                mine = [run for run in runs if run.policy == policy]
                axis.plot(
                    [one.groups for one in mine], [factor * one.figures[name] for one in mine], "o-", label=policy
                )
            axis.set(title=title, xlabel="groups", ylim=(0, None))
            axis.set_xscale("log", base=2)
        axes[0].legend()
