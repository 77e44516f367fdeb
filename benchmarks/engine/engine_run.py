"""Engines for benchmarks: settings, an engine that ends with its block, and runs that record token times.

Loads torch. Times are seconds of perf_counter.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import Job, Timeline
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
)
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.executor.local_ranks import local_group
from tandem.workers.messages.request import AdapterRef, Ended, GenerationRequest, SamplingParams, TokenDelta

CONCURRENCY = 16
NO_PREFIX_CACHE = CacheSettings(enable_prefix_caching=False)


@dataclass
class TimelineSink:
    """OutputSink that records arrival times, token ids and cached prompt tokens of each request."""

    timelines: dict[str, Timeline] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended_ids: set[str] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            self.timelines[delta.request_id].token_times_s.extend([now] * len(delta.token_ids))
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None and "error" not in ended.finish_reasons, ended
        self.ended_ids.add(ended.request_id)
        self.cached[ended.request_id] = ended.usage.cached_tokens


def cpu_settings(
    folder: Path,
    threads: int,
    max_model_len: int,
    *,
    dtype: str = "bfloat16",
    rows: int = CONCURRENCY,
    async_scheduling: bool = False,
    cache: CacheSettings = NO_PREFIX_CACHE,
    lora: LoraSettings | None = None,
) -> EngineSettings:
    """Settings of one rank on the CPU with `rows` running sequences at most and a queue without a limit."""
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype=dtype, max_model_len=max_model_len),
        cache=cache,
        scheduler=SchedulerSettings(max_num_seqs=rows, async_scheduling=async_scheduling, max_num_queued_reqs=2**31),
        device=DeviceSettings(device="cpu", cpu_threads=threads),
        lora=lora or LoraSettings(),
    )


@contextmanager
def opened_engine(
    settings: EngineSettings, sink: TimelineSink, *, spawn: bool = False
) -> Iterator[tuple[Engine, ExecutorReady]]:
    """An engine on ranks of its own, which end with the block. spawn: in processes, as served; else one rank is here,
    where the engine can take in nothing while a step runs."""
    executor = local_group(settings) if spawn else open_executor(settings)
    try:
        ready = executor.start()
        yield build_engine(settings, model_facts(settings, ready), executor, ready, sink), ready
    finally:
        executor.close()


def greedy_request(
    request_id: str, job: Job, adapter: AdapterRef | None = None, fields: Mapping[str, Any] = {}
) -> GenerationRequest:
    """A request that ends after exactly the job's output tokens; greedy, unless fields of SamplingParams say
    otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, **fields, "max_tokens": job.output_len, "ignore_eos": True})
    return GenerationRequest(request_id=request_id, prompt_token_ids=job.prompt, sampling=sampling, adapter=adapter)


def run_jobs(
    engine: Engine,
    sink: TimelineSink,
    jobs: Sequence[Job],
    concurrency: int,
    tag: str,
    adapters: Sequence[AdapterRef | None] = (None,),
    watch: Callable[[], None] = lambda: None,
    fields: Mapping[str, Any] = {},
) -> list[Timeline]:
    """Runs all jobs, at most `concurrency` at once, each with the next of `adapters` in turn.

    All count as submitted at the start. `tag` begins the ids of their requests. `watch` is called after each turn.
    fields: as of greedy_request.
    """
    start = time.perf_counter()
    requests = [
        greedy_request(f"{tag}-{place}", job, adapters[place % len(adapters)], fields) for place, job in enumerate(jobs)
    ]
    sink.timelines.update({request.request_id: Timeline(start) for request in requests})
    waiting = iter(requests)
    running: set[str] = set()
    pending = next(waiting, None)
    while pending is not None or running:
        while pending is not None and len(running) < concurrency:
            engine.add_request(pending)
            running.add(pending.request_id)
            pending = next(waiting, None)
        engine.turn(0.05)
        watch()
        running -= sink.ended_ids
    return [sink.timelines[request.request_id] for request in requests]


def drain(engine: Engine) -> None:
    """Steps until nothing runs and no copy is under way."""
    while engine.has_work():
        engine.turn(0.05)
