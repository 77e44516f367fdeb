"""First tokens on the engine over TimedRanks: what waiting for rows and for places on the device costs by itself.

The engine is the one that is measured, with its own rules of admission; only its ranks and its clock are not. Used by
lora_zipf.py, beside what it measures. Part `waits` of `trace_replay lora` does without a model: steps and loads take
what GIVEN and LOAD_S say, so its figures hang on no machine.
"""

import argparse
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, NO_PREFIX_CACHE, greedy_request
from benchmarks.engine.timed_ranks import GivenTimes, LoadTimes, StepTimes, TimedRanks
from benchmarks.service.trace_replay.trace import Arrival, adapter_arrivals
from benchmarks.workload import Job, percentiles
from tandem.configs.schema import EngineSettings, LoraSettings, ModelSettings, SchedulerSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import RESULT_WAIT_S
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.request import AdapterRef, Ended, GenerationRequest, TokenDelta

IDLE_S = 0.001
"""The time that passes in a turn in which the engine waits for nothing but time."""
GIVEN = GivenTimes((0.014, 0.0015, 0.0002, 0.0003))
"""Seconds of a step, and more for each row, further token and adapter."""
LOAD_S = (0.02, 0.003)
"""Seconds to read an adapter and to place it."""
VOCABULARY = 1000
SHARE = 8
"""--max-loras of the part `waits`."""
PLACES, RATES = (8, 42), (6.1, 7.0, 9.0)
"""Adapters that fit (42: what --max-loras of the highest rank on all layers take has room for of small ones); requests
a second: half of the capacity, and more."""


@dataclass
class FirstTokens:
    """OutputSink that notes first tokens, ends and gaps between tokens, by the ranks' clock."""

    ranks: TimedRanks
    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            name, now_s = delta.request_id, self.ranks.now_s
            self.first_s.setdefault(name, now_s)
            self.gaps_s.append(now_s - self.last_s.get(name, now_s))
            self.last_s[name] = now_s

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None, ended


@dataclass(frozen=True)
class Waits:
    """Milliseconds to the first and to the last token of each arrival, and between any two of its tokens."""

    first_ms: list[float]
    last_ms: list[float]
    gaps_ms: list[float]
    loads: int
    preemptions: int


@dataclass(frozen=True)
class MeasuredEngine:
    """What ranks said of themselves, the pages of an adapter there, and the times of their steps."""

    settings: EngineSettings
    facts: ModelFacts
    ready: ExecutorReady
    pages: int
    times: StepTimes | GivenTimes

    @property
    def places(self) -> int:
        """Adapters that the device has room for."""
        return self.ready.adapter_pages // self.pages

    def waits(
        self, warm: Sequence[Arrival], arrivals: Sequence[Arrival], load_s: tuple[float, float] = (0, 0)
    ) -> Waits:
        """What becomes of arrivals, after those that warm, if loads took so long."""
        ranks = TimedRanks(self.ready, self.times.again(seed=0), LoadTimes(self.pages, *load_s))
        sink = FirstTokens(ranks)
        engine = build_engine(self.settings, self.facts, ranks, self.ready, sink, ranks.clock)
        run(engine, ranks, warm)
        begin_s, before = ranks.now_s, engine.stats()
        sink.gaps_s.clear()
        run(engine, ranks, arrivals)
        after = engine.stats()
        assert before.adapters is not None and after.adapters is not None
        due_s = [(one.request.request_id, begin_s + one.due_s) for one in arrivals]
        return Waits(
            first_ms=[1e3 * (sink.first_s[name] - at_s) for name, at_s in due_s],
            last_ms=[1e3 * (sink.last_s[name] - at_s) for name, at_s in due_s],
            gaps_ms=[1e3 * gap for gap in sink.gaps_s],
            loads=after.adapters.loads - before.adapters.loads,
            preemptions=after.preemptions - before.preemptions,
        )


def run(engine: Engine, ranks: TimedRanks, arrivals: Sequence[Arrival]) -> None:
    """Runs every request to its end, as replay() does by the machine's clock."""
    begin_s = ranks.now_s
    coming = deque((begin_s + arrival.due_s, arrival.request) for arrival in arrivals)
    while coming or engine.has_work():
        while coming and coming[0][0] <= ranks.now_s:
            engine.add_request(coming.popleft()[1])
        before_s = ranks.now_s
        if not engine.has_work():
            ranks.poll(coming[0][0] - before_s)
        elif not engine.turn(RESULT_WAIT_S) and ranks.now_s == before_s:
            ranks.now_s += IDLE_S


# ---- without a model ----


def run_waits(options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    """Prints first tokens, whole answers and gaps by places on the device and rate, beside those of SHARE adapters."""
    lines: list[dict[str, object]] = []
    for rate in RATES:
        base: dict[str, float] = {}
        for count, places in ((SHARE, SHARE), *((max(options.adapters), places) for places in PLACES)):
            waits = _given(places).waits(_warm(), _arrivals(count, rate, options.requests), LOAD_S)
            first, gaps = percentiles(waits.first_ms), percentiles(waits.gaps_ms)
            base = base or first
            shown = " ".join(f"{name} {value:.0f} ({value / base[name]:.2f})" for name, value in first.items())
            console.print(
                f"{rate} requests/s, {count} adapters, {places} places, steps of given times: first token ms {shown}; "
                f"answer mean {statistics.mean(waits.last_ms):.0f}; gap p99 {gaps['p99']:.0f} "
                f"most {max(waits.gaps_ms):.0f}; {waits.loads} loads, {waits.preemptions} pauses",
                soft_wrap=True,
            )
            lines.append({"rate": rate, "adapters": count, "places": places, "first_ms": first})
    return lines


def _given(places: int) -> MeasuredEngine:
    settings = EngineSettings(
        model=ModelSettings(model="none"),
        cache=NO_PREFIX_CACHE,
        scheduler=SchedulerSettings(max_num_seqs=CONCURRENCY, async_scheduling=True, max_num_queued_reqs=2**31),
        lora=LoraSettings(enable_lora=True, max_loras=SHARE, max_cpu_loras=2**20),
    )
    ready = ExecutorReady(
        num_blocks=2000,
        pipeline_parallel_size=1,
        device="none",
        dtype="none",
        threads=0,
        weight_bytes=0,
        block_bytes=0,
        load_s=0.0,
        adapter_pages=places,
    )
    return MeasuredEngine(settings, ModelFacts(512, VOCABULARY, (1,), "none", "none"), ready, 1, GIVEN)


def _refs(count: int) -> list[AdapterRef]:
    return [AdapterRef(name=f"a{i}", digest=f"a{i}", source=f"/a{i}") for i in range(count)]


def _warm() -> list[Arrival]:
    job = Job([5] * 32, 24)
    return [Arrival(0.0, greedy_request(f"warm-{ref.name}", job, ref)) for ref in _refs(SHARE)]


def _arrivals(count: int, rate: float, requests: int) -> list[Arrival]:
    return adapter_arrivals(_refs(count), rate, requests, VOCABULARY)
