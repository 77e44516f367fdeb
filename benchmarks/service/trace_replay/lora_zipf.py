"""TTFT when requests draw from more adapters than the device has room for (Zipf, Poisson arrivals).

Arrivals come at half the capacity that is measured with as many adapters as the room, or at --rate. Printed first: the
bound of a load, which is to read an adapter's files and to copy their bytes once, and first tokens of the same arrivals
on the same engine if loads took no time (lora_queueing.py): what is above them is what loads cost. Part `zipf` of
`trace_replay lora`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, drain, greedy_request, opened_engine
from benchmarks.engine.timed_ranks import StepTimes
from benchmarks.machine import OtherCpu
from benchmarks.service.trace_replay.lora_adapters import AdapterSet, engine_settings, random_jobs
from benchmarks.service.trace_replay.lora_queueing import MeasuredEngine
from benchmarks.service.trace_replay.replay import replay
from benchmarks.service.trace_replay.trace import Arrival, adapter_arrivals
from benchmarks.workload import percentiles
from tandem.configs.schema import EngineSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import AdapterRef

Bytes = npt.NDArray[np.uint8]
RANK = 8


class Room(NamedTuple):
    """Settings of an engine with room for some adapters, and these."""

    settings: EngineSettings
    adapters: list[AdapterRef]
    vocab_size: int

    def warm(self) -> list[Arrival]:
        """A request of each adapter, all at once."""
        jobs = random_jobs(len(self.adapters), 24, self.vocab_size, "warm")
        pairs = enumerate(zip(jobs, self.adapters, strict=True))
        return [Arrival(0.0, greedy_request(f"warm-{place}", job, ref)) for place, (job, ref) in pairs]


def run_zipf(options: argparse.Namespace, console: Console) -> dict[str, object]:
    adapters = AdapterSet(options.model, RANK)
    settings = engine_settings(options, CONCURRENCY, adapters.settings(options.room, known=max(options.adapters)))
    room = Room(settings, adapters.references(options.room), adapters.spec.vocab_size)
    bound = LoadBound.of(adapters.folders(options.room))
    console.print(
        f"bound of a load of {adapters.nbytes / 2**20:.2f} MiB: {bound.cached_ms:.2f} ms to read from the page cache "
        f"and copy, {bound.disk_ms:.2f} ms from disk",
        soft_wrap=True,
    )
    full, measured = capacity(room, max(40, options.requests // 2), options.rate)
    rate = options.rate or full / 2
    console.print(
        f"{options.model}: capacity with {options.room} adapters {full:.1f} requests/s; arrivals at {rate:.1f}; "
        f"{measured.places} adapters fit, {settings.lora.max_loras} share a step",
        soft_wrap=True,
    )
    lines: dict[str, object] = {"requests_per_s": rate, "load_bound_ms": bound._asdict(), "places": measured.places}
    base: dict[str, dict[str, float]] = {}
    for count in options.adapters:
        arrivals = adapter_arrivals(adapters.drawn(count), rate, options.requests, room.vocab_size)
        queueing = percentiles(measured.waits(room.warm(), arrivals).first_ms)
        shown = _with_ratios(queueing, base.setdefault("simulated", queueing))
        console.print(
            f"  simulated, {count} adapters and loads of no time: ms, and times the first such line's: {shown}",
            soft_wrap=True,
        )
        line = run_line(room, arrivals, f"{count} adapters")
        shown = _with_ratios(line["ttft_ms"], base.setdefault("measured", line["ttft_ms"]))
        console.print(
            f"{count:4d} adapters, room for {options.room}: TTFT ms, and times the first line's: {shown}; "
            f"{line['loads']} loads of {line['load_ms']:.0f} ms  other_cpu {line['other_cpu']:.2f}",
            soft_wrap=True,
        )
        lines[str(count)] = line | {"simulated_ttft_ms": queueing}
    return lines


def _with_ratios(ms: Mapping[str, float], base: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.0f} ({value / base[name]:.2f})" for name, value in ms.items())


def run_line(room: Room, arrivals: list[Arrival], name: str) -> dict[str, Any]:
    """Replays the arrivals on an engine whose room is full. load_ms: the mean from an adapter's first move to its
    place on the device, without the wait for room."""
    sink = TimelineSink()
    with opened_engine(room.settings, sink, spawn=True) as (engine, _):
        warm(engine, sink, room)
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


class LoadBound(NamedTuple):
    """The least time of a load, of reading an adapter's tensors and copying them once: best of the page cache, and the
    median from disk."""

    cached_ms: float
    disk_ms: float

    @classmethod
    def of(cls, folders: Sequence[Path]) -> "LoadBound":
        files = [folder / "adapter_model.safetensors" for folder in folders]
        size = max(file.stat().st_size for file in files)
        host, device = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        for file in files:
            _load_ms(file, host, device)
        cached_ms = min(_load_ms(file, host, device) for file in files)
        for file in files:
            _forget(file)
        return cls(cached_ms, statistics.median(_load_ms(file, host, device) for file in files))


def _load_ms(path: Path, host: Bytes, device: Bytes) -> float:
    began_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        count = file.readinto(host.data)
    device[:count] = host[:count]
    return 1e3 * (time.perf_counter() - began_s)


def _forget(file: Path) -> None:
    """Drops a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def warm(engine: Engine, sink: TimelineSink, room: Room) -> None:
    """Runs one request of each adapter of the room."""
    replay(engine, sink, room.warm(), "warm")
    drain(engine)


def capacity(room: Room, count: int, rate: float | None) -> tuple[float, MeasuredEngine]:
    """Requests per second of a queue that is always full, and the engine that ran them, with the times of its steps
    then and at `rate` (None: at half of the capacity)."""
    arrivals = adapter_arrivals(room.adapters, 1.0, count, room.vocab_size, "full")
    sink, times = TimelineSink(), StepTimes()
    with opened_engine(room.settings, sink, spawn=True) as (engine, ready):
        warm(engine, sink, room)
        adapters = engine.stats().adapters
        assert adapters is not None and adapters.resident == len(room.adapters)
        pages = (adapters.num_pages - adapters.free_pages) // adapters.resident
        engine.observers += (times,)
        start = time.perf_counter()
        replay(engine, sink, [Arrival(0.0, arrival.request) for arrival in arrivals], "capacity")
        full = count / (time.perf_counter() - start)
        replay(engine, sink, adapter_arrivals(room.adapters, rate or full / 2, count, room.vocab_size, "half"), "half")
    return full, MeasuredEngine(room.settings, engine.facts, ready, pages, times)
