"""TTFT when requests draw from more adapters than the device has room for (Zipf, Poisson arrivals).

Arrivals come at half the capacity that is measured with as many adapters as the room. First it prints the bound of a
load: to read the files, which are in the page cache, and to copy their bytes once. Part `zipf` of `trace_replay lora`.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, drain, opened_engine, run_jobs
from benchmarks.machine import OtherCpu
from benchmarks.service.trace_replay.lora_adapters import AdapterSet, engine_settings, random_jobs
from benchmarks.service.trace_replay.replay import replay
from benchmarks.service.trace_replay.trace import Arrival, adapter_arrivals
from benchmarks.workload import percentiles
from tandem.configs.schema import EngineSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import AdapterRef

ROOM = 8
RANK = 8


def run_zipf(options: argparse.Namespace, console: Console) -> dict[str, object]:
    adapters = AdapterSet(options.model, RANK)
    vocab_size = adapters.spec.vocab_size
    most = max(options.adapters)
    settings = engine_settings(options, CONCURRENCY, adapters.settings(ROOM, known=most))
    room = adapters.references(ROOM)
    bound_ms = load_bound_ms(adapters.folders(ROOM))
    console.print(f"bound of a load: {bound_ms:.2f} ms to read and copy {adapters.nbytes / 2**20:.2f} MiB")
    rate = 0.5 * capacity(settings, room, max(40, options.requests // 2), vocab_size)
    console.print(f"{options.model}: capacity with {ROOM} adapters {2 * rate:.1f} requests/s; arrivals at half of it")
    lines: dict[str, object] = {"requests_per_s": rate, "load_bound_ms": bound_ms}
    base: dict[str, float] | None = None
    for count in options.adapters:
        arrivals = adapter_arrivals(adapters.drawn(count), rate, options.requests, vocab_size)
        line = run_line(settings, arrivals, room, vocab_size, f"{count} adapters")
        ttft_ms = line["ttft_ms"]
        base = base or ttft_ms
        shown = " ".join(f"{name} {value:.0f} ({value / base[name]:.2f})" for name, value in ttft_ms.items())
        console.print(
            f"{count:4d} adapters, room for {ROOM}: TTFT ms, and times the first line's: {shown}; "
            f"{line['loads']} loads of {line['load_ms']:.0f} ms  other_cpu {line['other_cpu']:.2f}"
        )
        lines[str(count)] = line
    return lines


def run_line(
    settings: EngineSettings, arrivals: list[Arrival], room: list[AdapterRef], vocab_size: int, name: str
) -> dict[str, Any]:
    """Replays the arrivals on an engine whose room is full. load_ms: the mean from an adapter's first move to its
    place on the device, without the wait for room."""
    sink = TimelineSink()
    with opened_engine(settings, sink, spawn=True) as (engine, _):
        warm(engine, sink, room, vocab_size)
        before = engine.stats().adapters
        with OtherCpu() as other:
            timelines = replay(engine, sink, arrivals, name)
        after = engine.stats().adapters
    assert before is not None and after is not None
    loads, load_s = after.loads - before.loads, after.load_s.total - before.load_s.total
    return {
        "ttft_ms": percentiles([timeline.ttft_ms for timeline in timelines]),
        "loads": loads,
        "load_ms": 1000 * load_s / max(1, loads),
        "other_cpu": other.share,
    }


def load_bound_ms(folders: list[Path]) -> float:
    """The least time of a load: that of reading an adapter's tensors and copying them once, best of the folders."""
    best_s = math.inf
    for folder in folders:
        began_s = time.perf_counter()
        torch.frombuffer(bytearray((folder / "adapter_model.safetensors").read_bytes()), dtype=torch.uint8)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 1000 * best_s


def warm(engine: Engine, sink: TimelineSink, refs: list[AdapterRef], vocab_size: int) -> None:
    """Runs one request of each adapter."""
    jobs = random_jobs(len(refs), 24, vocab_size, "warm")
    run_jobs(engine, sink, jobs, len(jobs), "warm", refs)
    drain(engine)


def capacity(settings: EngineSettings, refs: list[AdapterRef], count: int, vocab_size: int) -> float:
    """Requests per second of a queue that is always full."""
    requests = [arrival.request for arrival in adapter_arrivals(refs, 1.0, count, vocab_size, "full")]
    sink = TimelineSink()
    with opened_engine(settings, sink, spawn=True) as (engine, _):
        warm(engine, sink, refs, vocab_size)
        start = time.perf_counter()
        replay(engine, sink, [Arrival(0.0, request) for request in requests], "capacity")
        return count / (time.perf_counter() - start)
