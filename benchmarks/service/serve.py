"""Throughput over HTTP beside the same engine in this process, in turn (A-B-A-B), on the mixed workload.

    python -m benchmarks.service.serve [--model NAME | FOLDER] [--threads N] [--repeats 2] [--no-peer]

Both sides run on the CPU with the same threads and the same jobs (token ids in, EOS ignored), at most 16 at once. The
same run has `transformers` on jobs of that workload and the roofline of benchmarks/engine/throughput.py. The client
shares the machine; its CPU share is printed. KV waste (kv_waste.py) should be under 4 %. JSON goes to out/benchmarks.
"""

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, cpu_settings, opened_engine, run_jobs
from benchmarks.engine.throughput import MAX_MODEL_LEN, roofline_s, spread
from benchmarks.engine.transformers_peer import TransformersPeer
from benchmarks.machine import OtherCpu, measure_machine
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.service.kv_waste import EngineWatch, KVWaste, watched
from benchmarks.service.serving import Service, stream_completion
from benchmarks.workload import Job, Summary, Timeline, describe, mixed_workload, summarize
from tandem.workers.engine.engine import Engine
from tandem.workers.models.spec.config.config_reader import load_spec

PEER_JOBS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=MODELS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2, help="A-B pairs")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def service_flags(options: argparse.Namespace, max_model_len: int) -> list[str]:
    """Flags that make `tandem serve` the same engine as the one in this process."""
    flags = ["--dtype", options.dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(CONCURRENCY)]
    return [*flags, "--device", "cpu", "--cpu-threads", str(options.threads), "--no-enable-prefix-caching"]


async def run_http(service: Service, jobs: list[Job], waste: KVWaste) -> tuple[list[Timeline], float]:
    """Runs all jobs, at most CONCURRENCY at once; their timelines, and the client's CPU seconds per second. waste: the
    service's, noted while they run."""
    start, cpu = time.perf_counter(), time.process_time()
    timelines = [Timeline(start) for _ in jobs]
    places = asyncio.Semaphore(CONCURRENCY)

    async def placed(session: aiohttp.ClientSession, job: Job, timeline: Timeline) -> None:
        async with places:
            await stream_completion(session, service, job, timeline)

    timeout = aiohttp.ClientTimeout(total=1800)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        watched(session, service.url, waste),
    ):
        await asyncio.gather(*(placed(session, job, t) for job, t in zip(jobs, timelines, strict=True)))
    return timelines, (time.process_time() - cpu) / (time.perf_counter() - start)


def main() -> None:
    options = parse_arguments()
    console = Console()
    folder = find_model(options.model, options.dtype)
    spec = load_spec(folder)
    max_len = min(MAX_MODEL_LEN, spec.max_position_embeddings)
    jobs = mixed_workload(spec.vocab_size, count=options.jobs, scale=max_len / MAX_MODEL_LEN)
    speed = measure_machine(options.threads)
    peer = None if options.no_peer else TransformersPeer(folder, options.dtype)
    sink = TimelineSink()
    settings = cpu_settings(folder, options.threads, max_len, dtype=options.dtype)
    with (
        Service(str(folder), service_flags(options, max_len), RESULTS / "serve.log") as service,
        opened_engine(settings, sink) as (engine, ready),
    ):
        console.print(
            f"{options.model} {options.dtype}, {options.threads} threads, first answer {service.first_answer_s:.1f} s"
        )
        console.print(str(speed))
        run_jobs(engine, sink, jobs[:2], CONCURRENCY, "warm")
        asyncio.run(run_http(service, jobs[:2], KVWaste()))
        result = compare(options, console, service, engine, sink, jobs, peer)
    roofline = sum(job.output_len for job in jobs) / roofline_s(jobs, spec, ready, speed, options.dtype)
    report(options, console, result, roofline)
    write_record(
        RESULTS / f"serve-{Path(options.model).name}-{options.dtype}.json",
        options,
        machine=asdict(speed),
        offline=[asdict(summary) for summary in result.offline],
        http=[asdict(summary) for summary in result.http],
        ratio=result.ratio,
        offline_kv_waste=result.offline_waste.share,
        http_kv_waste=result.http_waste.share,
        transformers_sequential_tokens_per_s=result.peer,
        roofline_tokens_per_s=roofline,
    )


@dataclass
class Result:
    """Every run of each side, and the KV waste of all of its runs; `peer` in tokens/s, empty without a peer."""

    offline: list[Summary] = field(default_factory=list)
    http: list[Summary] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    offline_waste: KVWaste = field(default_factory=KVWaste)
    http_waste: KVWaste = field(default_factory=KVWaste)

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
    """Runs one side after the other, `repeats` times."""
    result = Result()
    watch = EngineWatch(engine.stats, result.offline_waste)
    for repeat in range(options.repeats):
        with OtherCpu() as other:
            result.offline.append(summarize(run_jobs(engine, sink, jobs, CONCURRENCY, f"run{repeat}", watch=watch)))
        console.print(describe(f"offline [{repeat}]", result.offline[-1]), f"other_cpu {other.share:.2f}")
        with OtherCpu() as other:
            timelines, client = asyncio.run(run_http(service, jobs, result.http_waste))
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


def report(options: argparse.Namespace, console: Console, result: Result, roofline: float) -> None:
    """Prints the comparisons, by medians; `roofline` in tokens/s."""
    console.print(f"HTTP over offline: {result.ratio:.3f} (medians of {options.repeats})")
    console.print(
        f"roofline {roofline:.0f} tok/s; HTTP reached {result.http_median / roofline:.2f} of it, "
        f"offline {result.offline_median / roofline:.2f}"
    )
    console.print(
        f"KV waste (allocated slots without a token): HTTP {result.http_waste.share:.2%}, "
        f"offline {result.offline_waste.share:.2%}"
    )
    if result.peer:
        console.print(f"HTTP over sequential transformers: {result.http_median / statistics.median(result.peer):.2f}x")


if __name__ == "__main__":
    main()
