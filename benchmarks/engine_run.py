"""Drives an Engine over a workload with at most `concurrency` jobs at once and records when every token came."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.workload import Job, Timeline
from configs.schema import EngineSettings
from workers.build import model_facts, open_executor
from workers.engine.engine import Engine
from workers.engine.executor import ExecutorReady
from workers.local_executor import LocalExecutor
from workers.messages import Ended, GenerationRequest, SamplingParams, TokenDelta


@dataclass
class TimelineSink:
    """OutputSink that notes arrival times, token ids and prompt tokens found in a cache, per request."""

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


@contextmanager
def opened_engine(
    settings: EngineSettings, sink: TimelineSink, *, spawn: bool = False, early_loads: bool = True
) -> Iterator[tuple[Engine, ExecutorReady]]:
    """An engine on ranks of its own, which end with the block. spawn: in processes, as served; else one rank is here,
    where the engine can take in nothing while a step runs. early_loads: of KV, as a request enters the queue."""
    executor = LocalExecutor(settings) if spawn else open_executor(settings)
    try:
        ready = executor.start()
        yield Engine(settings, model_facts(settings, ready), executor, ready, sink, early_loads=early_loads), ready
    finally:
        executor.close()


def greedy_request(request_id: str, job: Job) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=request_id, prompt_token_ids=job.prompt, sampling=sampling)


def run_jobs(engine: Engine, sink: TimelineSink, jobs: list[Job], concurrency: int, tag: str) -> list[Timeline]:
    """All jobs count as submitted at the start, as in a queue in front of `concurrency` places."""
    start = time.perf_counter()
    waiting: Iterator[tuple[int, Job]] = iter(enumerate(jobs))
    running: set[str] = set()
    ids = [f"{tag}-{index}" for index in range(len(jobs))]
    sink.timelines.update({request_id: Timeline(start) for request_id in ids})
    pending = next(waiting, None)
    while pending is not None or running:
        while pending is not None and len(running) < concurrency:
            engine.add_request(greedy_request(ids[pending[0]], pending[1]))
            running.add(ids[pending[0]])
            pending = next(waiting, None)
        engine.step()
        running -= sink.ended_ids
    return [sink.timelines[request_id] for request_id in ids]


def drain(engine: Engine) -> None:
    """Until nothing runs and no copy is on its way."""
    while engine.has_work():
        engine.step()
