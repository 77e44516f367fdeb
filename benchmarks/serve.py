"""HTTP over offline: the mixed workload through `tandem serve` and through the engine in this process, A-B-A-B.

    python -m benchmarks.serve [--model qwen3-0.6b | llama-135m | demo | FOLDER] [--threads N] [--repeats 2] [--no-peer]

Both sides run on the CPU with the same threads, the same jobs (token ids in, EOS ignored), at most 16 at once. In the
same run: `transformers` generate on jobs of that workload one after another, and the floor that the machine's measured
rates allow (benchmarks/throughput.py says how both are made). The client shares the machine: its CPU share is printed.
JSON goes to out/benchmarks.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import torch
from rich.console import Console

from benchmarks.engine_run import TimelineSink, run_jobs
from benchmarks.machine import OtherCpu, measure_machine
from benchmarks.models import SHAPES, model_folder
from benchmarks.service import Service
from benchmarks.throughput import TransformersPeer, floor_s, spread
from benchmarks.workload import Job, Summary, Timeline, describe, mixed_workload, summarize
from configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from workers.build import model_facts, open_executor
from workers.engine.engine import Engine
from workers.models.registry import load_spec

CONCURRENCY = 16
PEER_JOBS = 4
RESULTS = Path(__file__).resolve().parents[1] / "out" / "benchmarks"
DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo" / "model"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"demo, a folder, or one of {', '.join(sorted(SHAPES))}")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2, help="A-B pairs")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def service_flags(options: argparse.Namespace, max_model_len: int) -> list[str]:
    """What makes `tandem serve` the same engine as the one in this process."""
    flags = ["--dtype", options.dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(CONCURRENCY)]
    return [*flags, "--device", "cpu", "--cpu-threads", str(options.threads), "--no-enable-prefix-caching"]


async def one_job(session: aiohttp.ClientSession, service: Service, job: Job, timeline: Timeline) -> None:
    """Streams one completion; a chunk's tokens arrive together, counted by the token ids it returns."""
    body = {
        "model": service.model_name,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with session.post(f"{service.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                new = len(choices[0].get("token_ids") or ()) if choices else 0
                timeline.token_times_s.extend([time.perf_counter()] * new)
    assert len(timeline.token_times_s) == job.output_len, (len(timeline.token_times_s), job.output_len)


async def run_http(service: Service, jobs: list[Job]) -> tuple[list[Timeline], float]:
    """All jobs, at most CONCURRENCY at once; the timelines and the client's CPU seconds per second of the run."""
    start, cpu = time.perf_counter(), time.process_time()
    timelines = [Timeline(start) for _ in jobs]
    places = asyncio.Semaphore(CONCURRENCY)

    async def placed(session: aiohttp.ClientSession, job: Job, timeline: Timeline) -> None:
        async with places:
            await one_job(session, service, job, timeline)

    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(placed(session, job, t) for job, t in zip(jobs, timelines, strict=True)))
    return timelines, (time.process_time() - cpu) / (time.perf_counter() - start)


def main() -> None:
    options = parse_arguments()
    console = Console()
    shape = options.model in SHAPES
    folder = model_folder(options.model, getattr(torch, options.dtype)) if shape else Path(options.model)
    folder = DEMO if options.model == "demo" else folder
    spec = load_spec(folder)
    jobs = mixed_workload(spec.vocab_size, count=options.jobs, scale=min(1.0, spec.max_position_embeddings / 1024))
    max_len = min(1024, spec.max_position_embeddings)
    settings = EngineSettings(
        model=ModelSettings(model=str(folder), dtype=options.dtype, max_model_len=max_len),
        cache=CacheSettings(enable_prefix_caching=False),
        scheduler=SchedulerSettings(max_num_seqs=CONCURRENCY, async_scheduling=False),
        device=DeviceSettings(device="cpu", cpu_threads=options.threads),
    )
    speed = measure_machine(options.threads)
    peer = None if options.no_peer else TransformersPeer(folder, options.dtype)
    with Service(str(folder), service_flags(options, max_len), RESULTS / "serve.log") as service:
        executor = open_executor(settings)
        ready = executor.start()
        sink = TimelineSink()
        engine = Engine(settings, model_facts(settings, ready), executor, ready, sink)
        console.print(
            f"{options.model} {options.dtype}, {options.threads} threads, first answer {service.first_answer_s:.1f} s"
        )
        console.print(str(speed))
        run_jobs(engine, sink, jobs[:2], CONCURRENCY, "warm")
        asyncio.run(run_http(service, jobs[:2]))
        result = compare(options, console, service, engine, sink, jobs, peer)
        executor.close()
    floor = sum(job.output_len for job in jobs) / floor_s(jobs, spec, ready, speed, options.dtype)
    report(options, console, result, floor)
    record = {
        "options": vars(options),
        "machine": asdict(speed),
        "torch": torch.__version__,
        "offline": [asdict(s) for s in result.offline],
        "http": [asdict(s) for s in result.http],
        "ratio": result.ratio,
        "transformers_sequential_tokens_per_s": result.peer,
        "floor_tokens_per_s": floor,
    }
    name = f"serve-{Path(options.model).name}-{options.dtype}.json"
    (RESULTS / name).write_text(json.dumps(record, indent=1))


@dataclass
class Result:
    """Every run of each side; `peer` in tokens/s, empty when it was left out."""

    offline: list[Summary] = field(default_factory=list)
    http: list[Summary] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def http_median(self) -> float:
        return statistics.median(s.tokens_per_s for s in self.http)

    @property
    def offline_median(self) -> float:
        return statistics.median(s.tokens_per_s for s in self.offline)

    @property
    def ratio(self) -> float:
        return self.http_median / self.offline_median


def compare(
    options: argparse.Namespace,
    console: Console,
    service: Service,
    engine: Engine,
    sink: TimelineSink,
    jobs: list[Job],
    peer: TransformersPeer | None,
) -> Result:
    """One side after the other, `repeats` times."""
    result = Result()
    for repeat in range(options.repeats):
        with OtherCpu() as other:
            result.offline.append(summarize(run_jobs(engine, sink, jobs, CONCURRENCY, f"run{repeat}")))
        console.print(describe(f"offline [{repeat}]", result.offline[-1]), f"other_cpu {other.share:.2f}")
        with OtherCpu() as other:
            timelines, client = asyncio.run(run_http(service, jobs))
        result.http.append(summarize(timelines))
        console.print(
            describe(f"http [{repeat}]", result.http[-1]), f"client {client:.2f} core  other_cpu {other.share:.2f}"
        )
        if peer is not None:
            with OtherCpu() as other:
                result.peer.append(peer.tokens_per_s(spread(jobs, PEER_JOBS)))
            console.print(
                f"transformers, sequential [{repeat}] {result.peer[-1]:.1f} tok/s  other_cpu {other.share:.2f}"
            )
    return result


def report(options: argparse.Namespace, console: Console, result: Result, floor: float) -> None:
    """The comparisons, by medians. `floor` in tokens/s."""
    console.print(f"HTTP over offline: {result.ratio:.3f} (medians of {options.repeats})")
    console.print(
        f"floor {floor:.0f} tok/s; HTTP reached {result.http_median / floor:.2f} of it, "
        f"offline {result.offline_median / floor:.2f}"
    )
    if result.peer:
        console.print(f"HTTP over sequential transformers: {result.http_median / statistics.median(result.peer):.2f}x")


if __name__ == "__main__":
    main()
