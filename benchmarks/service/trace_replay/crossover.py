"""Host memory against computing again: TTFT of one prompt on an idle engine in this process, by length of its prefix.

A known prompt is a prefix that the host holds and the device has lost, and NEW tokens more; a fresh one is as long and
new from its first token. One engine serves both in turn, so both see the same machine, and chooses between copying and
computing by itself. Part `crossover` of `trace_replay kv`.
"""

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.engine.engine_run import TimelineSink, drain, opened_engine, run_jobs
from benchmarks.machine import OtherCpu, wait_until_quiet
from benchmarks.models import find_model
from benchmarks.service.trace_replay.kv_model import KVModel, Variant, warm
from benchmarks.service.trace_replay.trace import BLOCK
from benchmarks.workload import Job, random_prompt, short
from tandem.workers.engine.engine import Engine

NEW = 16
PREFIXES = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Sample:
    """One prompt: TTFT and CPU seconds of this process, tokens copied from the host, seconds of copies and steps."""

    ttft_s: float
    cpu_s: float
    loaded_tokens: int
    copy_s: float
    step_s: float


@dataclass(frozen=True)
class Point:
    """The samples of one prefix length."""

    prefix: int
    known: list[Sample]
    fresh: list[Sample]

    @property
    def known_ms(self) -> tuple[float, float]:
        """Median and least."""
        return _median_and_least(self.known)

    @property
    def fresh_ms(self) -> tuple[float, float]:
        """Median and least."""
        return _median_and_least(self.fresh)

    @property
    def cpu_ratio(self) -> float:
        """Fresh over known, by the medians of CPU time, which other processes lengthen less than wall time."""
        fresh, known = (statistics.median(sample.cpu_s for sample in side) for side in (self.fresh, self.known))
        return fresh / known

    @property
    def copied(self) -> int:
        """The number of known prompts whose prefix was copied from the host."""
        return sum(sample.loaded_tokens > 0 for sample in self.known)


@dataclass(frozen=True)
class Crossover:
    """All lengths. crossover: the shortest from which on known beats fresh at every length, by the medians; None:
    there is none. slower: lengths at which known took over 2 % (and 0.1 ms) longer, by median and by least."""

    points: list[Point]
    crossover: int | None
    slower: list[int]
    other_cpu: float


def run_crossover(options: argparse.Namespace, console: Console) -> dict[str, object]:
    folder = find_model(options.model, options.dtype)
    lengths = [length for length in PREFIXES if length <= options.prefix]
    model = KVModel(folder, options.dtype, options.threads, max(lengths) + 4 * BLOCK)
    result = measure_crossover(model, lengths, options.repeats, options.patience)
    show(console, options.model, result)
    return asdict(result)


def show(console: Console, model: str, result: Crossover) -> None:
    title = f"time to the first token in process, {model}, prefix + {NEW} new tokens, medians, ms"
    columns = ("prefix", "on host", "least", "copy", "step", "new", "least", "ratio", "CPU ratio", "copied")
    table = Table(*columns, title=title)
    for point in result.points:
        copy = 1e3 * statistics.median(sample.copy_s for sample in point.known)
        step = 1e3 * statistics.median(sample.step_s for sample in point.known)
        ratio = point.fresh_ms[0] / point.known_ms[0]
        figures = [*point.known_ms, copy, step, *point.fresh_ms, ratio, point.cpu_ratio]
        table.add_row(str(point.prefix), *map(short, figures), f"{point.copied}/{len(point.known)}")
    console.print(table)
    slower = f"slower at {', '.join(map(str, result.slower))}" if result.slower else "never slower"
    crossover = "no crossover" if result.crossover is None else f"crossover at {result.crossover} tokens"
    console.print(f"{crossover}; host is {slower}; other_cpu {result.other_cpu:.2f}")


def measure_crossover(model: KVModel, lengths: list[int], repeats: int, patience_s: float) -> Crossover:
    """Goes round after round over all lengths; between two visits the other prompts drive a length off the device."""
    draw, vocab_size = random.Random(0), model.spec.vocab_size
    prompts = {length: random_prompt(draw, length, vocab_size) for length in lengths}
    device = 2 * (-(-(max(lengths) + NEW + 1) // BLOCK) + 1)  # at most half of it is stored at once
    host = sum(2 * (length + NEW) // BLOCK + 2 for length in lengths) * (repeats + 2)
    sink = TimelineSink()
    points = [Point(length, [], []) for length in lengths]
    settings = model.settings(Variant("crossover", device, host))
    with opened_engine(settings, sink) as (engine, ready), OtherCpu() as other:
        assert ready.store is not None, ready.tier_notes
        warm(engine, sink)
        rounds = range(-1, repeats)  # the first one brings every prefix to the host
        for turn in tqdm(rounds, desc="crossover", unit="round", leave=False):
            for point in points:
                wait_until_quiet(patience_s if turn >= 0 else 0.0)
                fresh = _sample(engine, sink, random_prompt(draw, point.prefix + NEW, vocab_size))
                known = _sample(engine, sink, prompts[point.prefix] + random_prompt(draw, NEW, vocab_size))
                if turn >= 0:
                    point.fresh.append(fresh)
                    point.known.append(known)
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
    """Measures one prompt alone, and waits until its copies are over."""
    before, cpu_s = engine.stats(), time.process_time()
    (timeline,) = run_jobs(engine, sink, [Job(prompt, 1)], 1, f"sample-{len(sink.ended_ids)}")
    cpu_s = time.process_time() - cpu_s
    drain(engine)
    after = engine.stats()
    assert before.offload is not None and after.offload is not None
    return Sample(
        ttft_s=timeline.ttft_ms / 1e3,
        cpu_s=cpu_s,
        loaded_tokens=after.offload.loaded_tokens - before.offload.loaded_tokens,
        copy_s=after.offload.copy_s["load"] - before.offload.copy_s["load"],
        step_s=after.device_s - before.device_s,
    )
