"""KV tiers below the device on a conversation trace: the same arrivals on a fresh engine with each set of tiers.

The rank is a process of its own, as in a service, unless --in-process. Part `trace` of `trace_replay kv`.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, drain, opened_engine, run_jobs
from benchmarks.machine import OtherCpu, family_cpu_s, measure_memcpy
from benchmarks.models import find_model
from benchmarks.service.trace_replay.kv_model import GIB, KVModel, Variant, warm
from benchmarks.service.trace_replay.replay import TTFTBin, replay, slower_bins, ttft_bins
from benchmarks.service.trace_replay.trace import (
    BLOCK,
    LONGEST_OUTPUT,
    Conversations,
    choose,
    generate_trace,
    read_trace,
)
from benchmarks.workload import Job, Summary, summarize
from tandem.workers.engine.base.stats import OffloadStats

KINDS = ("load", "store", "fetch", "spill")
PROBE_JOBS = 8
RECOMPUTE, PREFETCH = "recompute", "host+prefetch"
VARIANTS = (RECOMPUTE, PREFETCH, "host+prefetch+disk")


@dataclass(frozen=True)
class Copies:
    """Copies between tiers in one run, by kind; all zero without tiers. loaded_tokens: prompt tokens copied to the
    device; disk_tokens: those among them that came from the disk."""

    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    loaded_tokens: int = 0
    disk_tokens: int = 0
    failed_blocks: int = 0

    @classmethod
    def between(cls, before: OffloadStats | None, after: OffloadStats | None) -> "Copies":
        if before is None or after is None:
            return cls()
        blocks = {kind: after.blocks[kind] - before.blocks[kind] for kind in KINDS}
        loaded = after.loaded_tokens - before.loaded_tokens
        return cls(
            num_bytes={kind: count * after.block_bytes for kind, count in blocks.items()},
            seconds={kind: after.copy_s[kind] - before.copy_s[kind] for kind in KINDS},
            loaded_tokens=loaded,
            disk_tokens=min(loaded, blocks["fetch"] * BLOCK),
            failed_blocks=after.failed_blocks - before.failed_blocks,
        )

    def hits(self, found: int) -> dict[str, int]:
        """`found` prompt tokens by the tier that they came from."""
        return {
            "device": max(0, found - self.loaded_tokens),
            "host": self.loaded_tokens - self.disk_tokens,
            "disk": self.disk_tokens,
        }


@dataclass(frozen=True)
class VariantResult:
    """One run. hits: prompt tokens found at admission, by tier. computed: prompt tokens that were computed; recomputed:
    those among them that an earlier turn had computed. turn_ttft_ms: in the trace's order. cpu_s: CPU seconds of this
    process and its rank."""

    name: str
    summary: Summary
    ttft_mean_ms: float
    turn_ttft_ms: list[float]
    hits: dict[str, int]
    computed: int
    recomputed: int
    copies: Copies
    preemptions: int
    cpu_s: float
    tier_notes: tuple[str, ...]
    other_cpu: float
    outputs: list[list[int]]


def run_trace(options: argparse.Namespace, console: Console) -> dict[str, object]:
    model = KVModel(
        find_model(options.model, options.dtype), options.dtype, options.threads, (options.longest + 4) * BLOCK
    )
    talk = load_conversations(options, model.spec.vocab_size)
    spawn = not options.in_process
    memcpy = measure_memcpy(2**26 if options.quick else 2**28)
    speed = tokens_per_s_uncached(model, talk, spawn)
    span_s = sum(len(t.job.prompt) + t.job.output_len for t in talk.turns) / speed / options.load
    variants = [variant for variant in build_variants(talk, options.scale) if variant.name in options.variants]
    device = variants[0].device_blocks
    console.print(
        f"{options.model} {options.dtype}, {options.threads} threads; {talk.source} trace: {len(talk.turns)} turns of "
        f"{talk.num_conversations} conversations, {talk.prompt_tokens} prompt tokens, {talk.seen_tokens} of them seen "
        f"before; {talk.num_blocks} blocks = {talk.num_blocks / device:.1f} x the device's {device} "
        f"({device * model.block_bytes / GIB:.2f} GiB); {speed:.0f} tok/s uncached, arrivals over {span_s:.0f} s"
    )
    results = []
    options.out.mkdir(parents=True, exist_ok=True)
    disk = Path(tempfile.mkdtemp(prefix="trace-replay-kv-", dir=options.out))
    try:
        for variant in variants:
            results.append(run_variant(model, variant, talk, span_s, disk, spawn))
            notes = "; ".join(results[-1].tier_notes)
            console.print(f"  {variant.name}: other_cpu {results[-1].other_cpu:.2f}; {notes}")
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    show_variants(console, results, memcpy)
    known = [turn.seen_tokens for turn in talk.turns]
    bins = ttft_bins(known, {result.name: result.turn_ttft_ms for result in results})
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
        "memcpy_bytes_per_s": memcpy,
        "uncached_tokens_per_s": speed,
        "span_s": span_s,
        "variants": [asdict(variant) for variant in variants],
        "ttft_by_known_tokens": [asdict(one) for one in bins],
        "prefetch_slower_at": slower_bins(bins, PREFETCH, RECOMPUTE),
        "results": [asdict(r) | {"outputs": None, "same_as_first": n} for r, n in zip(results, same, strict=True)],
    }


def load_conversations(options: argparse.Namespace, vocab_size: int) -> Conversations:
    """The turns of --trace, or of a generated trace."""
    if options.trace is not None:
        rows, source = read_trace(options.trace), options.trace.name
    else:
        rows, source = generate_trace(options.turns, seed=options.seed), "generated"
    return choose(rows, source, vocab_size, options.turns, options.longest, options.seed)


def build_variants(talk: Conversations, scale: float) -> list[Variant]:
    """The variants by size: the device holds 1/scale of all prompts' blocks, but at least two of the longest turns. The
    host holds all blocks and answers; beside a disk it holds half of the device's blocks, and the disk all."""
    answer = LONGEST_OUTPUT // BLOCK + 1
    device = max(math.ceil(talk.num_blocks / scale), 2 * (talk.longest_blocks + answer))
    everything = talk.num_blocks + (answer + 1) * len(talk.turns)
    small = max(device // 2, talk.longest_blocks + answer)
    recompute, prefetch, disk = VARIANTS
    return [
        Variant(recompute, device),
        Variant(prefetch, device, everything),
        Variant(disk, device, small, everything),
    ]


def tokens_per_s_uncached(model: KVModel, talk: Conversations, spawn: bool) -> float:
    """Prompt and output tokens per second of some of the turns with nothing cached, the rate of --load 1."""
    jobs = [turn.job for turn in talk.turns[:: max(1, len(talk.turns) // PROBE_JOBS)]]
    own = [Job([3 + place, *job.prompt[1:]], job.output_len) for place, job in enumerate(jobs)]  # no block in common
    sink = TimelineSink()
    settings = model.settings(Variant("probe", CONCURRENCY * (talk.longest_blocks + 4)))
    with opened_engine(settings, sink, spawn=spawn) as (engine, _):
        warm(engine, sink)
        start = time.perf_counter()
        run_jobs(engine, sink, own, CONCURRENCY, "probe")
        return sum(len(job.prompt) + job.output_len for job in own) / (time.perf_counter() - start)


def run_variant(
    model: KVModel, variant: Variant, talk: Conversations, span_s: float, disk: Path, spawn: bool
) -> VariantResult:
    """Replays all turns within span_s seconds on one set of tiers."""
    sink = TimelineSink()
    with opened_engine(model.settings(variant, disk), sink, spawn=spawn) as (engine, ready):
        assert ready.block_bytes == model.block_bytes, (ready.block_bytes, model.block_bytes)
        assert (variant.host_blocks is None) == (ready.store is None), ready.tier_notes
        warm(engine, sink)
        before = engine.stats()
        cpu_s = family_cpu_s()
        with OtherCpu() as other:
            timelines = replay(engine, sink, talk.arrivals(span_s), variant.name)
        drain(engine)
        cpu_s = family_cpu_s() - cpu_s
        after = engine.stats()
    names = [f"turn-{index}" for index in range(len(talk.turns))]
    found = sum(sink.cached[name] for name in names)
    copies = Copies.between(before.offload, after.offload)
    ttft_ms = [timeline.ttft_ms for timeline in timelines]
    return VariantResult(
        name=variant.name,
        summary=summarize(timelines),
        ttft_mean_ms=statistics.mean(ttft_ms),
        turn_ttft_ms=ttft_ms,
        hits=copies.hits(found),
        computed=talk.prompt_tokens - found,
        recomputed=talk.seen_tokens - found,
        copies=copies,
        preemptions=after.preemptions - before.preemptions,
        cpu_s=cpu_s,
        tier_notes=ready.tier_notes,
        other_cpu=other.share,
        outputs=[sink.tokens[name] for name in names],
    )


# ---- tables ----


def show_variants(console: Console, results: Sequence[VariantResult], memcpy: float) -> None:
    """Prints one column per variant; memcpy in bytes per second."""

    def copies(result: VariantResult, kind: str) -> str:
        copied, seconds = result.copies.num_bytes[kind], result.copies.seconds[kind]
        rate = copied / seconds if seconds else 0.0
        return f"{copied / 2**20:.0f} MiB at {rate / 1e9:.2f} ({rate / memcpy:.2f})" if copied else "–"

    table = Table(title=f"the same turns with each set of tiers; memcpy limit {memcpy / 1e9:.1f} GB/s")
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    rows = {
        "TTFT p50 ms": [f"{r.summary.ttft_ms['p50']:.0f}" for r in results],
        "TTFT p99 ms": [f"{r.summary.ttft_ms['p99']:.0f}" for r in results],
        "TTFT mean ms": [f"{r.ttft_mean_ms:.0f}" for r in results],
        "tokens/s out": [f"{r.summary.tokens_per_s:.1f}" for r in results],
        "span s": [f"{r.summary.span_s:.1f}" for r in results],
        **{f"hit tokens, {tier}": [str(r.hits[tier]) for r in results] for tier in ("device", "host", "disk")},
        "computed prompt tokens": [str(r.computed) for r in results],
        "  of them again": [str(r.recomputed) for r in results],
        **{f"{kind}, GB/s (of memcpy)": [copies(r, kind) for r in results] for kind in KINDS},
        "failed blocks, preemptions": [f"{r.copies.failed_blocks}, {r.preemptions}" for r in results],
        "CPU s": [f"{r.cpu_s:.1f}" for r in results],
        "other_cpu": [f"{r.other_cpu:.2f}" for r in results],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def show_bins(console: Console, bins: Sequence[TTFTBin], variants: Sequence[str]) -> None:
    """Prints TTFT by known tokens, and the bins in which prefetch is slower than computing again."""
    table = Table("known tokens", "turns", *variants, title="TTFT p50 (p90) by tokens that earlier turns had, ms")
    for one in bins:
        table.add_row(one.known, str(one.turns), *(f"{one.p50_ms[v]:.0f} ({one.p90_ms[v]:.0f})" for v in variants))
    console.print(table)
    if {PREFETCH, RECOMPUTE} <= set(variants):
        slower = slower_bins(bins, PREFETCH, RECOMPUTE)
        where = f"slower at {', '.join(slower)} known tokens" if slower else "never slower"
        console.print(f"{PREFETCH} against {RECOMPUTE}, by the medians of these bins: {where}")
