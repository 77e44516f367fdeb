"""LoRA adapters in full batches: decode speed by active adapters, adapters in a GiB, and `peft` as the peer.

Parts `speed`, `memory` and `peer` of `trace_replay lora`. Speeds alternate with those of the base model in one run
(A-B-A-B); the prediction is the bytes of the weights over those of weights and active adapters.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from tqdm import tqdm

from benchmarks.engine.engine_run import TimelineSink, drain, opened_engine, run_jobs
from benchmarks.engine.transformers_peer import TransformersPeer
from benchmarks.machine import OtherCpu, measure_machine
from benchmarks.models import find_model
from benchmarks.service.trace_replay.lora_adapters import ALL_LINEARS, QV, AdapterSet, engine_settings, random_jobs
from benchmarks.workload import Timeline
from tandem.configs.schema import LoraSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import AdapterRef

GIB = 2**30
PADDED_RANK = 64
PEER_ADAPTERS = 16
CASES = ((16, 8, QV, (1, 4, 16)), (64, 8, QV, (64,)), (16, 16, ALL_LINEARS, (1, 4, 16)))
"""Rows, rank, modules and numbers of active adapters."""


@dataclass(frozen=True)
class SpeedLine:
    """One batch with `active` adapters. Medians: of tokens/s, and of the ratio of each run to the base run beside it,
    because the machine drifts."""

    batch: int
    active: int
    rank: int
    modules: str
    tokens_per_s: float
    base_tokens_per_s: float
    ratio: float
    predicted_ratio: float
    other_cpu: float


# ---- speed ----


@dataclass
class Batch:
    """A full batch on one engine; its rows decode `tokens` tokens each, with the given adapters in turn."""

    engine: Engine
    sink: TimelineSink
    rows: int
    tokens: int
    vocab_size: int
    adapters: Sequence[AdapterRef | None] = (None,)

    def run(self, tag: str) -> list[Timeline]:
        """Runs all rows to their end."""
        jobs = random_jobs(self.rows, self.tokens, self.vocab_size, tag)
        timelines = run_jobs(self.engine, self.sink, jobs, self.rows, tag, self.adapters)
        drain(self.engine)
        return timelines


def full_batch_tokens_per_s(timelines: list[Timeline]) -> float:
    """Tokens per second from the moment when every row has its first token to the end of the first row."""
    times = [timeline.token_times_s for timeline in timelines]
    begin, end = max(row[0] for row in times), min(row[-1] for row in times)
    if begin >= end:
        raise SystemExit("--tokens: a row ended before all rows had begun; rows need more tokens")
    return sum(begin < time_s <= end for row in times for time_s in row) / (end - begin)


def run_speed(options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    bandwidth = measure_machine(options.threads).read_bytes_per_s
    weights = (find_model(options.model) / "model.safetensors").stat().st_size
    lines: list[SpeedLine] = []
    for rows, rank, modules, counts in CASES:
        adapters = AdapterSet(options.model, rank, modules)
        refs = adapters.references(max(counts))
        sink = TimelineSink()
        with opened_engine(engine_settings(options, rows, adapters.settings(len(refs))), sink) as (engine, _):
            base = Batch(engine, sink, rows, options.tokens, adapters.spec.vocab_size)
            if not lines:
                lines.append(idle_line(options, console, base))
            for count in counts:
                ours = replace(base, adapters=refs[:count])
                predicted = weights / (weights + adapters.nbytes * count)
                kind = "all" if modules == ALL_LINEARS else "q, v"
                line = alternate(base, ours, options.repeats, count, rank, kind, predicted)
                lines.append(line)
                console.print(
                    f"batch {rows:2d}, {count:2d} adapters of rank {rank:2d} on {kind:4s}: "
                    f"{line.tokens_per_s:7.1f} tok/s, base {line.base_tokens_per_s:7.1f}: {line.ratio:.3f} of base; "
                    f"bytes predict {predicted:.3f} (reached {line.ratio / predicted:.3f} of it) "
                    f"other_cpu {line.other_cpu:.2f}"
                )
    console.print(f"weights {weights / GIB:.2f} GiB, read at {bandwidth / 1e9:.1f} GB/s")
    return [asdict(line) for line in lines]


def idle_line(options: argparse.Namespace, console: Console, ours: Batch) -> SpeedLine:
    """An engine with --enable-lora and no active adapter, over one without --enable-lora."""
    sink = TimelineSink()
    with opened_engine(engine_settings(options, ours.rows, LoraSettings()), sink) as (engine, _):
        line = alternate(replace(ours, engine=engine, sink=sink), ours, options.repeats, 0, 0, "none", 1.0)
    console.print(f"batch {ours.rows}, no adapter active: {line.ratio:.3f} of an engine without --enable-lora")
    return line


def alternate(
    base: Batch, ours: Batch, repeats: int, active: int, rank: int, modules: str, predicted: float
) -> SpeedLine:
    """Runs both in turn, each first in every other pair; the first pair warms up."""
    speeds: dict[str, list[float]] = {"base": [], "lora": []}
    sides = [("base", base), ("lora", ours)]
    with OtherCpu() as other:
        for repeat in tqdm(range(repeats + 1), desc=f"{active} adapters", leave=False):
            for name, batch in sides if repeat % 2 else reversed(sides):
                timelines = batch.run(f"{name}-{active}-{rank}-{repeat}")
                if repeat:
                    speeds[name].append(full_batch_tokens_per_s(timelines))
    return SpeedLine(
        batch=ours.rows,
        active=active,
        rank=rank,
        modules=modules,
        tokens_per_s=statistics.median(speeds["lora"]),
        base_tokens_per_s=statistics.median(speeds["base"]),
        ratio=statistics.median(a / b for a, b in zip(speeds["lora"], speeds["base"], strict=True)),
        predicted_ratio=predicted,
        other_cpu=other.share,
    )


# ---- memory ----


def run_memory(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Places adapters one after another in a small slab until one pushes another out; scaled to a GiB."""
    slab = 2**24 if options.quick else 2**28
    padded = slab // AdapterSet(options.model, PADDED_RANK, ALL_LINEARS).nbytes * GIB / slab
    held: dict[str, float] = {}
    for rank, modules in ((8, QV), (16, ALL_LINEARS)):
        adapters = AdapterSet(options.model, rank, modules)
        count = slab // adapters.nbytes + 2
        refs = adapters.references(count)
        lora = LoraSettings(
            enable_lora=True, max_loras=1, max_lora_rank=PADDED_RANK, max_cpu_loras=count, memory_bytes=slab
        )
        sink = TimelineSink()
        jobs = random_jobs(count, 1, adapters.spec.vocab_size, "held")
        with opened_engine(engine_settings(options, 1, lora), sink) as (engine, _):
            run_jobs(engine, sink, jobs, 1, "held", refs)
            drain(engine)
            on_device = sum(tier == "device" for tier in engine.adapter_residency().values())
        kind = f"rank {rank} on {'all linears' if modules == ALL_LINEARS else 'q, v'}"
        held[kind] = on_device * GIB / slab
        console.print(f"{kind}: {held[kind]:.0f} per GiB; in slots padded to rank {PADDED_RANK} on all: {padded:.0f}")
    return {"per_gib": held, "padded_slots_per_gib": padded, "padded_to": f"rank {PADDED_RANK} on all linears"}


# ---- peer ----


def run_peer(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Runs 16 requests of 16 adapters as one batch, and one after another in transformers with peft."""
    adapters = AdapterSet(options.model, 8)
    refs = adapters.references(PEER_ADAPTERS)
    jobs = random_jobs(PEER_ADAPTERS, options.tokens, adapters.spec.vocab_size, "peer")
    peer = TransformersPeer(find_model(options.model), "bfloat16", adapters.folders(PEER_ADAPTERS))
    sink = TimelineSink()
    ours: list[float] = []
    theirs: list[float] = []
    settings = engine_settings(options, PEER_ADAPTERS, adapters.settings(PEER_ADAPTERS))
    with opened_engine(settings, sink) as (engine, _):
        for repeat in range(2):
            start = time.perf_counter()
            run_jobs(engine, sink, jobs, len(jobs), f"peer{repeat}", refs)
            ours.append(len(jobs) * options.tokens / (time.perf_counter() - start))
            theirs.append(peer.tokens_per_s(jobs))
    rate, peer_rate = statistics.median(ours), statistics.median(theirs)
    console.print(
        f"{PEER_ADAPTERS} requests, {PEER_ADAPTERS} adapters: {rate:.1f} tok/s; "
        f"transformers + peft, switching per request: {peer_rate:.1f} tok/s: {rate / peer_rate:.1f}x"
    )
    return {"ours_tokens_per_s": ours, "peft_tokens_per_s": theirs, "ratio": rate / peer_rate}
