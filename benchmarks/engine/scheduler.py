"""Speed of the coordinator's Python: scheduler, block manager and engine over ranks that compute nothing.

    python -m benchmarks.engine.scheduler                     # 16, 64, 256 and 1024 running sequences
    python -m benchmarks.engine.scheduler --rows 1024 --profile
    python -m benchmarks.engine.scheduler --adapters 16 --tenants 4   # rows spread over adapters and tenants

Every row decodes one token a step (prompt 128, blocks of 16 tokens), without a model and transport; --wire adds the
msgpack of plans, deltas and results. Prints CPU microseconds of the best of --repeats runs.
"""

import argparse
import cProfile
import pstats
import time
from dataclasses import dataclass

import msgspec

from tandem.configs.schema import EngineSettings, LoraSettings, ModelSettings, ParallelSettings, SchedulerSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import AdapterRef, DeltaBatch, Ended, GenerationRequest, SamplingParams, TokenDelta
from tests.support.no_ranks import NoRanks

PROMPT_LEN = 128


class CountingSink:
    """Counts tokens and ends."""

    def __init__(self, wire: bool) -> None:
        self.num_tokens = 0
        self.num_ended = 0
        self._wire = wire
        self._encode = msgspec.msgpack.Encoder().encode

    def deltas(self, deltas: list[TokenDelta]) -> None:
        if self._wire:
            self._encode(DeltaBatch(self.num_tokens, "nonce", deltas))
        self.num_tokens += len(deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        self.num_ended += 1


@dataclass(frozen=True)
class Load:
    """Rows spread evenly over tenants and adapters; adapters 0: the base model alone."""

    rows: int
    stages: int = 1
    asynchronous: bool = True
    wire: bool = False
    adapters: int = 0
    tenants: int = 1

    def settings(self) -> EngineSettings:
        scheduler = SchedulerSettings(
            max_num_seqs=self.rows,
            max_num_batched_tokens=max(8192, self.rows),
            max_num_queued_reqs=self.rows,
            async_scheduling=self.asynchronous,
        )
        most = max(1, self.adapters)
        lora = LoraSettings(enable_lora=self.adapters > 0, max_loras=most, max_cpu_loras=most)
        parallel = ParallelSettings(pipeline_parallel_size=self.stages)
        return EngineSettings(model=ModelSettings(model="none"), parallel=parallel, scheduler=scheduler, lora=lora)

    def request(self, i: int) -> GenerationRequest:
        name = f"adapter-{i % max(1, self.adapters)}"
        return GenerationRequest(
            request_id=f"chatcmpl-{i:032d}",
            prompt_token_ids=[(i * 31 + j * 17) % 997 + 2 for j in range(PROMPT_LEN)],
            sampling=SamplingParams(max_tokens=10**6),
            adapter=AdapterRef(name=name, digest=name, source=name) if self.adapters else None,
            tenant=f"tenant-{i % self.tenants}",
        )


@dataclass(frozen=True)
class Figure:
    """One measurement: steps with all rows decoding."""

    rows: int
    steps: int
    seconds: float
    tokens: int

    @property
    def us_per_step(self) -> float:
        return self.seconds / self.steps * 1e6

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def build(load: Load, steps: int) -> tuple[Engine, CountingSink]:
    """An engine whose rows are all past their prompt and have `steps` tokens and more to go."""
    blocks = load.rows * (-(-(PROMPT_LEN + 2 * steps) // 16) + 2)
    facts = ModelFacts(10**6, 1000, (1,), "none", "none")
    executor, sink = NoRanks(load.rows, blocks, load.stages, load.adapters, load.wire), CountingSink(load.wire)
    engine = build_engine(load.settings(), facts, executor, executor.start(), sink)
    for i in range(load.rows):
        engine.add_request(load.request(i))
    while engine.stats().waiting:
        engine.turn(0.05)
    for _ in range(8):
        engine.turn(0.05)
    return engine, sink


def measure(load: Load, steps: int, profile: bool) -> Figure:
    engine, sink = build(load, steps)
    before = sink.num_tokens
    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    start = time.process_time()
    for _ in range(steps):
        engine.turn(0.05)
    seconds = time.process_time() - start
    if profiler:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    return Figure(load.rows, steps, seconds, sink.num_tokens - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages; more than 1: tokens go back in plans")
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--wire", action="store_true", help="encode plans and deltas, decode results, as msgpack")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that the rows are spread over")
    parser.add_argument("--tenants", type=int, default=1, help="tenants that the rows are spread over")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"{'rows':>6} {'us/step':>10} {'us/token':>10} {'tokens/s':>12}")
    for rows in args.rows:
        load = Load(rows, args.stages, not args.no_async_scheduling, args.wire, args.adapters, args.tenants)
        runs = [measure(load, args.steps, args.profile) for _ in range(1 if args.profile else args.repeats)]
        best = min(runs, key=lambda figure: figure.seconds)
        per_token_us = best.seconds / best.tokens * 1e6
        print(f"{rows:>6} {best.us_per_step:>10.1f} {per_token_us:>10.3f} {best.tokens_per_s:>12,.0f}")


if __name__ == "__main__":
    main()
