"""Report of a load: vLLM's table, the first reasons of failures, and the JSON file."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from tandem.cluster.cli.bench.bench_figures import TITLES, LoadFigures
from tandem.cluster.cli.bench.bench_flags import ResultFlags, TargetFlags, TrafficFlags, pairs
from tandem.cluster.cli.bench.load_client import Outcome
from tandem.configs.errors import SettingsError

WIDTH, NAME_WIDTH = 50, 40
MOST_REASONS = 10


def report_lines(figures: LoadFigures, traffic: TrafficFlags) -> list[str]:
    """The table of a run."""
    found = figures.summary
    rows = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
        ("Unfinished requests:", found.get("unfinished")),
        ("Maximum request concurrency:", traffic.max_concurrency),
        ("Request rate configured (RPS):", traffic.request_rate if traffic.request_rate < inf else None),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found.get("total_output_tokens")),
        ("Request throughput (req/s):", found["request_throughput"]),
        ("Request goodput (req/s):", found.get("request_goodput")),
        ("Output token throughput (tok/s):", found.get("output_throughput")),
        ("Peak output token throughput (tok/s):", found.get("max_output_tokens_per_s")),
        ("Peak concurrent requests:", _as_float(found.get("max_concurrent_requests"))),
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_row(name, value) for name, value in rows if value is not None]
    for name in figures.shown:
        short, title = TITLES[name]
        lines.append(f"{title:-^{WIDTH}}")
        for field in (field for field in found if field.endswith(f"_{name}_ms") and not field.startswith("std_")):
            which = field.removesuffix(f"_{name}_ms")
            lines.append(_row(f"{which.capitalize()} {short} (ms):", found[field]))
    return [*lines, "=" * WIDTH]


def _row(name: str, value: int | float) -> str:
    return f"{name:<{NAME_WIDTH}} {value:<10.2f}" if isinstance(value, float) else f"{name:<{NAME_WIDTH}} {value:<10}"


def _as_float(value: int | None) -> float | None:
    return None if value is None else float(value)


def reasons(failed: Sequence[Outcome]) -> list[str]:
    """Says why requests failed, a line for each reason, the first ones first."""
    counts = Counter(outcome.error for outcome in failed)
    lines = [
        f"{count} request{'s' * (count > 1)} failed: {reason}" for reason, count in list(counts.items())[:MOST_REASONS]
    ]
    more = len(counts) - MOST_REASONS
    return [*lines, f"and {more} more reasons"] if more > 0 else lines


def record(
    figures: LoadFigures, target: TargetFlags, traffic: TrafficFlags, flags: ResultFlags, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of the JSON file: vLLM's. about: model_id, tokenizer_id and num_prompts."""
    head = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": flags.label,
        **about,
        **pairs(flags.metadata, "--metadata"),
        "request_rate": "inf" if traffic.request_rate == inf else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
    }
    if traffic.ramp_up_strategy is not None:
        head |= {name: getattr(traffic, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    return head | figures.summary | (figures.details() if flags.save_detailed else {})


def check_file(flags: ResultFlags) -> None:
    """Makes the folder of the JSON file. SettingsError when that is none, or when there will be no file."""
    if flags.save_result or flags.append_result:
        folder = Path(flags.result_dir or ".")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{folder}: {error.strerror}", "--result-dir") from error
        return
    for flag, given in (("--result-dir", flags.result_dir), ("--result-filename", flags.result_filename)):
        if given is not None:
            raise SettingsError(f"{given}: nothing is saved without --save-result or --append-result", flag)


def result_file(flags: ResultFlags, target: TargetFlags, traffic: TrafficFlags, model: str) -> Path | None:
    """The file of --save-result and --append-result, None without them."""
    if not (flags.save_result or flags.append_result):
        return None
    return Path(flags.result_dir or ".") / (flags.result_filename or _file_name(flags, target, traffic, model))


def _file_name(flags: ResultFlags, target: TargetFlags, traffic: TrafficFlags, model: str) -> str:
    rate = f"{traffic.request_rate:g}qps"
    if traffic.ramp_up_strategy is not None:
        rate = f"ramp-up-{traffic.ramp_up_strategy}-{traffic.ramp_up_start_rps:g}qps-{traffic.ramp_up_end_rps:g}qps"
    limit = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{flags.label or target.backend}-{rate}{limit}-{model.rsplit('/', 1)[-1]}-{moment}.json"


def write_result(file: Path, found: Mapping[str, Any], *, append: bool) -> None:
    """Writes the file, or adds a line to it. SettingsError when it cannot be written."""
    try:
        with file.open("a" if append else "w", encoding="utf-8") as out:
            if append and out.tell():
                out.write("\n")
            json.dump(found, out)
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}", "--result-filename") from error
