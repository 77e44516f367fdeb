"""The table of a run of tools/gpu_run.py, from its lines. Pure functions."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def table(lines: Sequence[Line]) -> list[str]:
    """The stages with their outcomes, then the figures of each kind."""
    text = ["Stages"]
    stages = [line for line in lines if "status" in line and "name" not in line]
    text += aligned([[one["stage"], one["status"], f"{one['seconds']:.0f} s", one["detail"]] for one in stages])
    checks = [line for line in lines if "status" in line and "name" in line]
    if checks:
        text += ["", "Checks"]
        text += aligned([[one["status"], one["name"], one["detail"]] for one in checks])
    for title, case, heads, row in TABLES:
        rows = [row(line) for line in lines if line.get("case") == case]
        if rows:
            text += ["", title, *aligned([heads, *rows])]
    return text


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of one width, each line indented."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]  # noqa: B905


def _ms(values: Sequence[float] | None) -> str:
    return "" if not values else f"{statistics.median(values):.2f}"


def _steps(line: Line) -> list[str]:
    taken = statistics.median(line["replayed"])
    kinds = [_ms(line.get(kind)) for kind in ("replayed", "drawn", "eager")]
    least, rate = line["roofline_ms"], 1e3 * line["rows"] / taken
    where = [line["model"], line["weights"], line["kv_cache_dtype"], str(line["rows"]), line["lengths"]]
    return [*where, *kinds, f"{least:.2f}", f"{least / taken:.0%}", f"{rate:.0f}"]


def _prompts(line: Line) -> list[str]:
    taken, tokens = min(line["seconds"]), line["count"] * line["length"]
    where = [line["model"], line["weights"], line["kv_cache_dtype"], f"{line['count']} x {line['length']}"]
    return [*where, f"{1e3 * taken:.0f}", f"{tokens / taken:.0f}", f"{line['roofline_s'] / taken:.0%}"]


def _load(line: Line) -> list[str]:
    gaps, first = line["gap_ms"], line["first_token_ms"]
    return [
        line["part"],
        *(f"{gaps[key]:.1f}" for key in ("p50", "p99", "max")),
        "" if first is None else f"{first['p50']:.0f}",
        f"{line['tokens_per_s']:.0f}",
    ]


def _http(line: Line) -> list[str]:
    found = [line["model"], f"{line['start_s']:.1f}"]
    for way in ("greedy", "drawn"):
        one = line[way]
        found += [f"{one['tokens_per_s']:.0f}", f"{one['itl_ms']['p50']:.1f} / {one['itl_ms']['p99']:.1f}"]
    return found


def _rates(line: Line) -> list[str]:
    names = ("read_bytes_per_s", "copied_bytes_per_s", "to_device_bytes_per_s", "to_host_bytes_per_s")
    return [*(f"{line[name] / 1e9:.0f}" for name in names), f"{line['bf16_flop_per_s'] / 1e12:.0f}"]


def _tiles(line: Line) -> list[str]:
    times, tile = (f"{line[key]:.1f}" for key in ("default_us", "chosen_us")), " ".join(map(str, line["tile"]))
    return [line["use"], line["load"], *times, tile, str(line["tried"])]


TABLES: tuple[tuple[str, str, list[str], Callable[[Line], list[str]]], ...] = (
    (
        "Ceilings, GB/s and TFLOP/s", "rates", ["read", "copied", "to it", "back", "bf16"], _rates,
    ),
    (
        "Kernels", "ceilings", ["part", "case", "us", "of the best rate"],
        lambda line: [line["part"], line["name"], f"{line['us']:.1f}", f"{line['share']:.0%}"],
    ),
    (
        "Tiles of kernels, us", "tiles", ["kernel", "load", "default", "chosen", "tile", "tried"], _tiles,
    ),
    (
        "Decode steps, ms", "steps",
        ["model", "weights", "cache", "rows", "lengths", "greedy", "drawn", "eager", "roofline", "share", "tokens/s"],
        _steps,
    ),
    ("Prompts", "prompts", ["model", "weights", "cache", "prompts", "ms", "tokens/s", "of the roofline"], _prompts),
    ("Gaps between tokens, ms", "mixed load", ["part", "p50", "p99", "longest", "first token", "tokens/s"], _load),
    (
        "Sampling, ms", "sampling", ["rows", "case", "ms"],
        lambda line: [str(line["rows"]), line["name"], f"{line['best_ms']:.3f}"],
    ),
    (
        "Loading", "loading", ["pages", "work", "s", "GB/s"],
        lambda line: [
            line["state"], line["work"], f"{line['seconds']:.2f}", f"{line['file_bytes'] / line['seconds'] / 1e9:.2f}",
        ],
    ),
    (
        "LLM", "LLM", ["model", "ready after, s", "greedy, tokens/s", "drawn, tokens/s"],
        lambda line: [line["model"], f"{line['start_s']:.1f}", f"{line['greedy']:.0f}", f"{line['drawn']:.0f}"],
    ),
    (
        "HTTP", "HTTP",
        ["model", "answers after, s", "greedy, tokens/s", "gap p50 / p99", "drawn, tokens/s", "gap p50 / p99"], _http,
    ),
    (
        "Profile of 20 steps", "profile", ["model", "rows", "s", "of which kernels"],
        lambda line: [
            line["model"], str(line["rows"]), f"{line['wall_s']:.3f}", f"{line['busy_s'] / line['wall_s']:.0%}",
        ],
    ),
)  # fmt: skip
"""Title, `case` of the lines, heads, and the row of a line."""
