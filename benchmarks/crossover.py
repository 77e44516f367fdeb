"""Host or recompute: the time to the first token of one prompt on an idle engine, by how long its known prefix is.

Called by benchmarks/multiturn.py. A known prompt is a prefix that the host holds and the device has lost, and NEW
tokens more; the other one is as long and new from its first token. Both are served by the same engine, one after the
other, so both see the same machine. Whether a prefix is copied or computed again is the engine's own choice.
"""

import random
import statistics
import time
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.engine_run import TimelineSink, drain, greedy_request, opened_engine
from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.tier_arms import Arm, Machine, arm_settings, warm
from benchmarks.turns import BLOCK, fresh_tokens
from benchmarks.workload import Job, Timeline
from workers.engine.engine import Engine

NEW = 16


@dataclass(frozen=True)
class Sample:
    """One prompt: its time to the first token and CPU seconds of this process meanwhile, tokens copied from the host,
    seconds of copying and of steps."""

    ttft_s: float
    cpu_s: float
    loaded_tokens: int
    copy_s: float
    step_s: float


@dataclass(frozen=True)
class Point:
    """One prefix length: samples of the known prompt and of the new one."""

    prefix: int
    known: list[Sample]
    fresh: list[Sample]

    @property
    def known_ms(self) -> tuple[float, float]:
        """Median and least."""
        return _median_and_least(self.known)

    @property
    def fresh_ms(self) -> tuple[float, float]:
        return _median_and_least(self.fresh)

    @property
    def cpu_ratio(self) -> float:
        """Of the medians of the CPU time, which other processes lengthen less than the time; fresh over known."""
        fresh, known = (statistics.median(sample.cpu_s for sample in side) for side in (self.fresh, self.known))
        return fresh / known

    @property
    def copied(self) -> int:
        """How many of the known prompts were brought up from the host."""
        return sum(sample.loaded_tokens > 0 for sample in self.known)


@dataclass(frozen=True)
class Crossover:
    """crossover: the shortest prefix from which on known beats fresh at every length, by the medians; None when it
    never does. slower: lengths at which known took over 2 % (and 0.1 ms) longer, by median and by least."""

    points: list[Point]
    crossover: int | None
    slower: list[int]
    other_cpu: float


def measure_crossover(
    machine: Machine, bytes_of_block: int, vocab_size: int, lengths: list[int], repeats: int, patience_s: float
) -> Crossover:
    """Round after round over all lengths: what is sent between two visits of one length drives it off the device."""
    draw = random.Random(0)
    prompts = {length: fresh_tokens(draw, length, vocab_size) for length in lengths}
    device = 2 * (-(-(max(lengths) + NEW + 1) // BLOCK) + 1)  # at most half of it is stored at once
    host = sum(2 * (length + NEW) // BLOCK + 2 for length in lengths) * (repeats + 2)
    sink = TimelineSink()
    known: dict[int, list[Sample]] = {length: [] for length in lengths}
    fresh: dict[int, list[Sample]] = {length: [] for length in lengths}
    settings = arm_settings(machine, Arm("crossover", device, host), bytes_of_block, None)
    with opened_engine(settings, sink) as (engine, ready), OtherCpu() as other:
        assert ready.store is not None, ready.tier_notes
        warm(engine, sink)
        rounds = range(-1, repeats)  # the first one brings every prefix to the host
        for turn in tqdm(rounds, desc="crossover", unit="round", leave=False):
            for length in lengths:
                wait_until_quiet(patience_s if turn >= 0 else 0.0)
                one = _sample(engine, sink, fresh_tokens(draw, length + NEW, vocab_size))
                two = _sample(engine, sink, prompts[length] + fresh_tokens(draw, NEW, vocab_size))
                if turn >= 0:
                    fresh[length].append(one)
                    known[length].append(two)
    points = [Point(length, known[length], fresh[length]) for length in lengths]
    beats = [point.known_ms[0] < point.fresh_ms[0] for point in points]
    first = next((place for place in range(len(points)) if all(beats[place:])), None)
    slower = [point.prefix for point in points if all(map(_is_slower, point.known_ms, point.fresh_ms))]
    return Crossover(points, None if first is None else points[first].prefix, slower, other.share)


def _median_and_least(samples: list[Sample]) -> tuple[float, float]:
    times_ms = [1e3 * sample.ttft_s for sample in samples]
    return statistics.median(times_ms), min(times_ms)


def _is_slower(known_ms: float, fresh_ms: float) -> bool:
    return known_ms > max(1.02 * fresh_ms, fresh_ms + 0.1)


def _sample(engine: Engine, sink: TimelineSink, prompt: list[int]) -> Sample:
    """One prompt alone; everything it set going is over when this returns."""
    before = engine.stats()
    name = f"sample-{len(sink.ended_ids)}"
    cpu_s = time.process_time()
    timeline = sink.timelines[name] = Timeline(time.perf_counter())
    engine.add_request(greedy_request(name, Job(prompt, 1)))
    while name not in sink.ended_ids:
        engine.step()
    cpu_s = time.process_time() - cpu_s
    drain(engine)
    after = engine.stats()
    assert before.offload is not None and after.offload is not None
    return Sample(
        ttft_s=timeline.token_times_s[0] - timeline.submitted_s,
        cpu_s=cpu_s,
        loaded_tokens=after.offload.loaded_tokens - before.offload.loaded_tokens,
        copy_s=after.offload.copy_s["load"] - before.offload.copy_s["load"],
        step_s=after.device_s - before.device_s,
    )
