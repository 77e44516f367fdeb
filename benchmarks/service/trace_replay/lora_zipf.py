"""TTFT when requests draw from more adapters than the device has room for (Zipf, Poisson arrivals).

Arrivals come at half the capacity that is measured with as many adapters as the room. Part `zipf` of
`trace_replay lora`.
"""

import argparse
import time

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
    refs = adapters.references(max(options.adapters))
    vocab_size = adapters.spec.vocab_size
    lora = adapters.settings(ROOM, known=len(refs))
    settings = engine_settings(options, CONCURRENCY, lora)
    rate = 0.5 * capacity(settings, refs[:ROOM], max(40, options.requests // 2), vocab_size)
    console.print(f"{options.model}: capacity with {ROOM} adapters {2 * rate:.1f} requests/s; arrivals at half of it")
    lines: dict[str, object] = {"requests_per_s": rate}
    for count in options.adapters:
        arrivals = adapter_arrivals(refs[:count], rate, options.requests, vocab_size)
        sink = TimelineSink()
        with opened_engine(settings, sink, spawn=True) as (engine, _):
            warm(engine, sink, refs[:ROOM], vocab_size)
            before = engine.stats().adapters
            with OtherCpu() as other:
                timelines = replay(engine, sink, arrivals, f"{count} adapters")
            after = engine.stats().adapters
        assert before is not None and after is not None
        ttft_ms = percentiles([timeline.ttft_ms for timeline in timelines])
        loads = after.loads - before.loads
        lines[str(count)] = {"ttft_ms": ttft_ms, "loads": loads, "other_cpu": other.share}
        shown = " ".join(f"{name} {value:.0f}" for name, value in ttft_ms.items())
        console.print(
            f"{count:4d} adapters, room for {ROOM}: TTFT ms {shown}; {loads} loads  other_cpu {other.share:.2f}"
        )
    return lines


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
