"""The section of docs/performance.md on two trees in turns. Used by performance.py; needs the standard library only."""

import re
import statistics

from tools.result_files import read_text, table

KINDS = {
    "engine without a model, {} rows": r"sched\d (old|new) (16|64|256) [\d.]+ [\d.]+ ([\d,]+)",
    "gateway, {}": r"gate\d (old|new) 16 streams (app|app, stop strings|app, 5 top logprobs|http) ([\d,]+) tokens",
    "decode step of the 135M shape, rows: {}": r"dec\d (old|new) (\d+) rows [^:]+: median [\d.]+ ms, best [\d.]+ ms, "
    r"([\d.]+) tok/s",
}
"""By name, with a place for the case: a regular expression of tree, case and a speed in tokens per second."""


def turns_section() -> str:
    """Of the trees before and after the rooms were re-cut (decision 050): speeds of the later one over the other's."""
    rows, said = [], read_text("before-after.txt")
    for name, form in KINDS.items():
        speeds: dict[str, dict[str, list[float]]] = {}
        for tree, case, speed in re.findall(form, said):
            speeds.setdefault(case, {}).setdefault(tree, []).append(float(speed.replace(",", "")))
        for case, of in speeds.items():
            best, mean = (f"{how(of['new']) / how(of['old']):.2f}" for how in (max, statistics.mean))
            rows.append([name.format(case), best, mean])
    return f"""## Before and after the rooms were re-cut

The tree at 25ace30 and the one of [decision 050](decisions/050-the-house-again.md) in turns, twice, alone on two cores
of an Intel Xeon with VNNI and without products of bf16 pairs: `benchmarks.engine.scheduler`,
`benchmarks.service.gateway --streams 16` and `benchmarks.engine.decode_step --threads 1`. Tokens per second, of the
gateway and the decode step per CPU second, after over before:

{table(["what", "best of two runs", "mean"], rows)}"""
