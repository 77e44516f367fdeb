"""What KV tiers below the device are worth: conversations that return, one returning turn, and when a copy pays.

    python -m benchmarks.multiturn [--quick] [--parts trace return crossover] [--trace FILE] [--threads N]

trace: turns of a real conversation trace (or of a generated one) whose KV is --scale times what the device holds, on
fresh engines with the same arrivals: device only; with a host tier whose loads begin when a request's turn comes; the
same with loads that begin as it enters the queue, as in a service (prefetch); that with a small host and a disk. TTFT
is also given by how much of a prompt earlier turns had.
return: one turn over HTTP whose prefix lies on the host, against a prompt of the same length that is new.
crossover: the same in process, by length of the prefix. JSON goes to out/benchmarks.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.crossover import NEW, Crossover, measure_crossover
from benchmarks.machine import measure_memcpy
from benchmarks.models import SHAPES, model_folder
from benchmarks.prefix_bins import TTFTBin, slower_bins, ttft_bins
from benchmarks.returning_turn import Answer, ReturningTurn, measure_returning_turn, median_of, quiet
from benchmarks.tier_arms import GIB, Arm, ArmResult, Machine, block_bytes, run_arm, tokens_per_s_uncached
from benchmarks.turns import BLOCK, LONGEST_OUTPUT, Conversations, choose, generate_trace, read_trace
from workers.models.registry import load_spec

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "out" / "benchmarks"
DEMO = ROOT / "configs" / "demo" / "model"
TRACE = ROOT.parent / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"
PARTS = ("trace", "return", "crossover")
PREFIXES = (16, 32, 64, 128, 256, 512, 1024)
GOAL = 15.0
RECOMPUTE, PREFETCH = "recompute", "host+prefetch"
ARMS = (RECOMPUTE, "host", PREFETCH, "host+prefetch+disk")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="the demo model and few turns: about a minute")
    parser.add_argument("--model", help="of the trace part; demo, a folder, or a shape (default: llama-135m)")
    parser.add_argument("--turn-model", help="of the other parts (default: qwen3-0.6b)")
    parser.add_argument(
        "--trace", type=Path, default=TRACE, help="a trace in Mooncake's form; missing: a generated one"
    )
    parser.add_argument("--turns", type=int, help="at least that many turns of the trace (default: 200)")
    parser.add_argument("--scale", type=float, default=4.0, help="KV of all turns over KV of the device")
    parser.add_argument("--load", type=float, default=1.0, help="tokens that arrive over what is served uncached")
    parser.add_argument(
        "--longest", type=int, default=62, help="conversations with longer prompts (in blocks) are left out"
    )
    parser.add_argument("--prefix", type=int, default=1024, help="known tokens of the returning turn")
    parser.add_argument("--repeats", type=int, help="of the returning turn and of each length (default: 7)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument(
        "--in-process", action="store_true", help="trace part: the rank in this process; turns wait for whole steps"
    )
    parser.add_argument("--patience", type=float, default=3.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0, help="which conversations")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file, and of the disk tier's")
    options = parser.parse_args(arguments)
    defaults = ("demo", "demo", 60, 3) if options.quick else ("llama-135m", "qwen3-0.6b", 200, 7)
    for name, value in zip(("model", "turn_model", "turns", "repeats"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def folder_of(model: str, dtype: str) -> Path:
    if model == "demo":
        return DEMO
    return model_folder(model, getattr(torch, dtype)) if model in SHAPES else Path(model)


def load_conversations(options: argparse.Namespace, vocab_size: int) -> Conversations:
    if options.trace.is_file():
        rows, source = read_trace(options.trace), options.trace.name
    else:
        rows, source = generate_trace(options.turns, seed=options.seed), "generated"
    return choose(rows, source, vocab_size, options.turns, options.longest, options.seed)


def short(value: float) -> str:
    """Three digits or more, so that tables stay narrow."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# ---- trace ----


def build_arms(talk: Conversations, scale: float) -> list[Arm]:
    """Device: 1/scale of all prompts' blocks, but never less than two of the longest turns need. The host holds
    everything with its answers; beside a disk it holds half of what the device does, the disk everything."""
    answer = LONGEST_OUTPUT // BLOCK + 1
    device = max(math.ceil(talk.num_blocks / scale), 2 * (talk.longest_blocks + answer))
    everything = talk.num_blocks + (answer + 1) * len(talk.turns)
    small = max(device // 2, talk.longest_blocks + answer)
    recompute, host, prefetch, disk = ARMS
    return [
        Arm(recompute, device),
        Arm(host, device, everything, prefetch=False),
        Arm(prefetch, device, everything),
        Arm(disk, device, small, everything),
    ]


def run_trace(options: argparse.Namespace, console: Console, memcpy: float) -> dict[str, object]:
    folder = folder_of(options.model, options.dtype)
    spec = load_spec(folder)
    talk = load_conversations(options, spec.vocab_size)
    machine = Machine(folder, options.dtype, options.threads, (options.longest + 4) * BLOCK, not options.in_process)
    size = block_bytes(spec, options.dtype)
    speed = tokens_per_s_uncached(machine, talk, size)
    span_s = sum(len(t.job.prompt) + t.job.output_len for t in talk.turns) / speed / options.load
    arms = [arm for arm in build_arms(talk, options.scale) if arm.name in options.arms]
    scale = talk.num_blocks / arms[0].device_blocks
    console.print(
        f"{options.model} {options.dtype}, {options.threads} threads; {talk.source}: {len(talk.turns)} turns of "
        f"{talk.num_conversations} conversations, {talk.prompt_tokens} prompt tokens, {talk.seen_tokens} of them seen "
        f"before; {talk.num_blocks} blocks = {scale:.1f} x the device's {arms[0].device_blocks} "
        f"({arms[0].device_blocks * size / GIB:.2f} GiB); {speed:.0f} tok/s uncached, arrivals over {span_s:.0f} s"
    )
    results = []
    disk = Path(tempfile.mkdtemp(prefix="multiturn-kv-", dir=options.out))
    try:
        for arm in arms:
            results.append(run_arm(machine, arm, talk, span_s, size, disk))
            console.print(f"  {arm.name}: other_cpu {results[-1].other_cpu:.2f}; {'; '.join(results[-1].tier_notes)}")
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    show_arms(console, results, memcpy)
    bins = ttft_bins(talk.turns, {result.name: result.turn_ttft_ms for result in results})
    show_bins(console, bins, [result.name for result in results])
    same = [sum(a == b for a, b in zip(r.outputs, results[0].outputs, strict=True)) for r in results]
    return {
        "model": options.model,
        "source": talk.source,
        "turns": len(talk.turns),
        "conversations": talk.num_conversations,
        "prompt_tokens": talk.prompt_tokens,
        "seen_tokens": talk.seen_tokens,
        "trace_blocks": talk.num_blocks,
        "uncached_tokens_per_s": speed,
        "span_s": span_s,
        "arms": [asdict(arm) for arm in arms],
        "ttft_by_known_tokens": [asdict(one) for one in bins],
        "prefetch_slower_at": slower_bins(bins, PREFETCH, RECOMPUTE),
        "results": [asdict(r) | {"outputs": None, "same_as_first": n} for r, n in zip(results, same, strict=True)],
    }


def show_arms(console: Console, results: list[ArmResult], memcpy: float) -> None:
    table = Table(title=f"the same turns with each set of tiers; memcpy limit {memcpy / 1e9:.1f} GB/s")
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("TTFT p50 ms", [f"{r.summary.ttft_ms['p50']:.0f}" for r in results])
    row("TTFT p99 ms", [f"{r.summary.ttft_ms['p99']:.0f}" for r in results])
    row("TTFT mean ms", [f"{r.ttft_mean_ms:.0f}" for r in results])
    row("tokens/s out", [f"{r.summary.tokens_per_s:.1f}" for r in results])
    row("span s", [f"{r.summary.span_s:.1f}" for r in results])
    for place in ("device", "host", "disk"):
        row(f"hit tokens, {place}", [str(r.hits[place]) for r in results])
    row("computed prompt tokens", [str(r.computed) for r in results])
    row("  of them again", [str(r.recomputed) for r in results])
    for kind in ("load", "store", "fetch", "spill"):
        cells = [
            f"{r.copied_bytes[kind] / 2**20:.0f} MiB at {r.copy_bytes_per_s[kind] / 1e9:.2f}"
            f" ({r.copy_bytes_per_s[kind] / memcpy:.2f})"
            if r.copied_bytes[kind]
            else "–"
            for r in results
        ]
        row(f"{kind}, GB/s (of memcpy)", cells)
    row("failed blocks, preemptions", [f"{r.failed_blocks}, {r.preemptions}" for r in results])
    row("CPU s", [f"{r.cpu_s:.1f}" for r in results])
    row("other_cpu", [f"{r.other_cpu:.2f}" for r in results])
    console.print(table)


def show_bins(console: Console, bins: list[TTFTBin], arms: list[str]) -> None:
    table = Table("known tokens", "turns", *arms, title="TTFT p50 (p90) by tokens that earlier turns had, ms")
    for one in bins:
        cells = [f"{one.p50_ms[arm]:.0f} ({one.p90_ms[arm]:.0f})" for arm in arms]
        table.add_row(one.known, str(one.turns), *cells)
    console.print(table)
    if RECOMPUTE in arms and PREFETCH in arms:
        slower = slower_bins(bins, PREFETCH, RECOMPUTE)
        where = f"slower at {', '.join(slower)} known tokens" if slower else "never slower"
        console.print(f"{PREFETCH} against {RECOMPUTE}, by the medians of these bins: {where}")


# ---- one returning turn ----


def run_return(options: argparse.Namespace, console: Console) -> ReturningTurn:
    folder = folder_of(options.turn_model, options.dtype)
    spec = load_spec(folder)
    flags = ["--dtype", options.dtype, "--max-model-len", str(options.prefix + 4 * BLOCK)]
    flags += ["--cpu-threads", str(options.threads)]
    result = measure_returning_turn(
        folder,
        flags,
        options.prefix,
        block_bytes(spec, options.dtype),
        spec.vocab_size,
        options.repeats,
        options.patience,
        options.out / "multiturn-serve.log",
    )
    show_return(console, options.turn_model, result)
    return result


def show_return(console: Console, model: str, result: ReturningTurn) -> None:
    title = f"one turn over HTTP, {model}, {result.prefix} + {NEW} tokens, medians of {len(result.returning)}, ms"
    table = Table("", "TTFT", "least", "HTTP", "wait", "copy in it", "step", "rest", "from host", title=title)

    def row(name: str, answers: list[Answer]) -> None:
        fields = ("ttft_s", "http_s", "queue_s", "copy_s", "step_s", "rest_s")
        ttft, *split = [short(1e3 * median_of(answers, field)) for field in fields]
        least = short(1e3 * min(a.ttft_s for a in answers))
        table.add_row(name, ttft, least, *split, f"{statistics.median(a.loaded_tokens for a in answers):.0f}")

    row("returning", result.returning)
    row("new", result.fresh)
    console.print(table)
    calm = f"{len(quiet(result.returning))} and {len(quiet(result.fresh))} of them"
    calm_ratio = "–" if result.quiet_ratio is None else f"{result.quiet_ratio:.1f}x"
    verdict = "reached" if result.ratio >= GOAL else "NOT reached"
    console.print(
        f"{result.ratio:.1f}x lower (medians); {calm_ratio} over the turns while the machine was quiet, {calm}; "
        f"{result.least_ratio:.1f}x by the least; goal {GOAL:.0f}x {verdict}; other_cpu {result.other_cpu:.2f}"
    )


# ---- crossover ----


def run_crossover(options: argparse.Namespace, console: Console) -> Crossover:
    folder = folder_of(options.turn_model, options.dtype)
    spec = load_spec(folder)
    lengths = [length for length in PREFIXES if length + 4 * BLOCK <= spec.max_position_embeddings]
    machine = Machine(folder, options.dtype, options.threads, max(lengths) + 4 * BLOCK)
    result = measure_crossover(
        machine, block_bytes(spec, options.dtype), spec.vocab_size, lengths, options.repeats, options.patience
    )
    show_crossover(console, options.turn_model, result)
    return result


def show_crossover(console: Console, model: str, result: Crossover) -> None:
    title = f"time to the first token in process, {model}, prefix + {NEW} new tokens, medians, ms"
    columns = ("prefix", "on host", "least", "copy", "step", "new", "least", "ratio", "CPU ratio", "copied")
    table = Table(*columns, title=title)
    for point in result.points:
        copy = 1e3 * statistics.median(sample.copy_s for sample in point.known)
        step = 1e3 * statistics.median(sample.step_s for sample in point.known)
        known, fresh = point.known_ms, point.fresh_ms
        times = [known[0], known[1], copy, step, fresh[0], fresh[1]]
        times += [fresh[0] / known[0], point.cpu_ratio]
        copied = f"{point.copied}/{len(point.known)}"
        table.add_row(str(point.prefix), *map(short, times), copied)
    console.print(table)
    slower = f"slower at {result.slower}" if result.slower else "never slower"
    console.print(f"crossover at {result.crossover} tokens; host is {slower}; other_cpu {result.other_cpu:.2f}")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """The parts asked for; what goes to the JSON file."""
    options.out.mkdir(parents=True, exist_ok=True)
    memcpy = measure_memcpy(2**26 if options.quick else 2**28)
    record: dict[str, object] = {
        "options": {name: v.name if isinstance(v, Path) else v for name, v in vars(options).items()},
        "torch": torch.__version__,
        "memcpy_bytes_per_s": memcpy,
    }
    if "trace" in options.parts:
        record["trace"] = run_trace(options, console, memcpy)
    if "return" in options.parts:
        record["return"] = asdict(run_return(options, console))
    if "crossover" in options.parts:
        record["crossover"] = asdict(run_crossover(options, console))
    name = f"multiturn-{'quick' if options.quick else Path(options.model).name}-{'-'.join(options.parts)}.json"
    (options.out / name).write_text(json.dumps(record, indent=1))
    return record


if __name__ == "__main__":
    run(parse_arguments(), Console())
