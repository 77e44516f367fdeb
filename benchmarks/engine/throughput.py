"""Offline throughput of one engine in this process on the mixed workload, beside the roofline and `transformers`.

    python -m benchmarks.engine.throughput [--model qwen3-0.6b | llama-135m | demo | FOLDER] [--threads N] [--repeats 2]

Prints tokens/s, percentiles of TTFT and ITL, the share of the roofline, and the tokens/s of `transformers` on jobs of
the same workload, in turn in one run (A-B-A-B). JSON goes to out/benchmarks. The roofline: every prompt token's
products at the measured bf16 rate, plus for each decode step the weights once at the measured read bandwidth (or the
step's products, if those take longer) and the KV of its rows.
"""

import argparse
import math
import os
import statistics
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.engine.engine_run import CONCURRENCY, TimelineSink, cpu_settings, opened_engine, run_jobs
from benchmarks.engine.transformers_peer import TransformersPeer
from benchmarks.machine import MachineSpeed, OtherCpu, measure_machine
from benchmarks.models import MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import Job, Summary, describe, mixed_workload, summarize
from tandem.parallel.mesh import Mesh
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_layouts

MAX_MODEL_LEN = 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=MODELS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2, help="A-B pairs")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--peer-jobs", type=int, default=4, help="how many of the jobs transformers runs; 0: no peer")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def roofline_s(jobs: list[Job], spec: ArchSpec, ready: ExecutorReady, speed: MachineSpeed, dtype: str) -> float:
    """The least time that `jobs` can take on this machine, in seconds (see the module's docstring)."""
    rate = speed.bf16_flop_per_s if dtype == "bfloat16" else speed.fp32_flop_per_s
    element = 2 if dtype == "bfloat16" else 4
    head = spec.vocab_size * spec.hidden_size
    all_parameters = ready.weight_bytes / element
    body = all_parameters - head * (1 if spec.tie_word_embeddings else 2)
    prompt_s = sum(len(job.prompt) for job in jobs) * 2 * body / rate
    decode_tokens = sum(job.output_len for job in jobs)
    steps = math.ceil(decode_tokens / CONCURRENCY)
    kv_per_token = (
        sum(plane.heads * plane.dim for layout in kv_layouts(spec, Mesh()) for plane in layout.planes) * element
    )
    context = statistics.mean(len(job.prompt) + job.output_len / 2 for job in jobs)
    step_bytes = (body + head) * element + CONCURRENCY * context * kv_per_token
    step_flop = 2 * (body + head) * CONCURRENCY
    return prompt_s + steps * max(step_bytes / speed.read_bytes_per_s, step_flop / rate)


def spread(jobs: list[Job], count: int) -> list[Job]:
    """`count` jobs that stand for all, evenly spaced by the share of prompt tokens, which decides a job's tokens/s."""
    ordered = sorted(jobs, key=lambda job: len(job.prompt) / job.output_len)
    return [ordered[int((place + 0.5) * len(ordered) / count)] for place in range(count)]


def main() -> None:
    options = parse_arguments()
    console = Console()
    folder = find_model(options.model, options.dtype)
    spec = load_spec(folder)
    max_len = min(MAX_MODEL_LEN, spec.max_position_embeddings)
    jobs = mixed_workload(spec.vocab_size, count=options.jobs, scale=max_len / MAX_MODEL_LEN)
    speed = measure_machine(options.threads)
    peer = TransformersPeer(folder, options.dtype) if options.peer_jobs else None
    console.print(f"{options.model} {options.dtype}, {options.threads} threads: {speed}")
    peer_jobs = spread(jobs, options.peer_jobs)
    settings = cpu_settings(folder, options.threads, max_len, dtype=options.dtype)
    sink = TimelineSink()
    ours: list[Summary] = []
    theirs: list[float] = []
    with opened_engine(settings, sink) as (engine, ready):
        run_jobs(engine, sink, jobs[:2], CONCURRENCY, "warm")
        for repeat in range(options.repeats):
            with OtherCpu() as other:
                ours.append(summarize(run_jobs(engine, sink, jobs, CONCURRENCY, f"run{repeat}")))
            console.print(describe(f"tandem offline [{repeat}]", ours[-1]), f"other_cpu {other.share:.2f}")
            if peer:
                with OtherCpu() as other:
                    theirs.append(peer.tokens_per_s(peer_jobs))
                console.print(
                    f"transformers, sequential [{repeat}] {theirs[-1]:.1f} tok/s  other_cpu {other.share:.2f}"
                )
    least = roofline_s(jobs, spec, ready, speed, options.dtype)
    median = statistics.median(summary.tokens_per_s for summary in ours)
    roofline = sum(job.output_len for job in jobs) / least
    console.print(f"roofline {least:.1f} s = {roofline:.0f} tok/s; reached {median / roofline:.2f} of it")
    if theirs:
        console.print(
            f"over sequential transformers: {median / statistics.median(theirs):.2f}x (median of {len(theirs)})"
        )
    write_record(
        RESULTS / f"throughput-{Path(options.model).name}-{options.dtype}.json",
        options,
        machine=asdict(speed),
        ours=[asdict(summary) for summary in ours],
        transformers_sequential_tokens_per_s=theirs,
        roofline_tokens_per_s=roofline,
    )


if __name__ == "__main__":
    main()
