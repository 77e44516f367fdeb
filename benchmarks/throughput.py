"""Offline throughput of one engine in this process: mixed workload, the machine's floor, transformers beside it.

    python -m benchmarks.throughput [--model qwen3-0.6b | llama-135m | FOLDER] [--threads N] [--repeats 3]

Prints tokens/s, TTFT and inter-token percentiles, the share of the floor that was reached, and what `transformers`
generate does on jobs of the same workload one after another, in the same run (A-B-A-B). JSON goes to out/benchmarks.
The floor: every prompt token's products at the measured bf16 rate, plus for each decode step the weights once at the
measured read bandwidth (or the step's products, if those take longer) and the KV of its rows.
"""

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.engine_run import TimelineSink, run_jobs
from benchmarks.machine import MachineSpeed, OtherCpu, measure_machine
from benchmarks.models import SHAPES, model_folder
from benchmarks.workload import Job, Summary, describe, mixed_workload, summarize
from configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from workers.build import model_facts, open_executor
from workers.engine.engine import Engine
from workers.engine.executor import ExecutorReady
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec

CONCURRENCY = 16
RESULTS = Path(__file__).resolve().parents[1] / "out" / "benchmarks"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a folder, or one of {', '.join(sorted(SHAPES))}")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2, help="A-B pairs")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--peer-jobs", type=int, default=4, help="how many of the jobs transformers runs; 0: no peer")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def engine_settings(folder: Path, options: argparse.Namespace) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype=options.dtype, max_model_len=1024),
        cache=CacheSettings(enable_prefix_caching=False),
        scheduler=SchedulerSettings(max_num_seqs=CONCURRENCY, async_scheduling=False),
        device=DeviceSettings(device="cpu", cpu_threads=options.threads),
    )


def floor_s(jobs: list[Job], spec: ArchSpec, ready: ExecutorReady, speed: MachineSpeed, dtype: str) -> float:
    """The least time that `jobs` can take on this machine, in seconds (see the module's docstring)."""
    rate = speed.bf16_flop_per_s if dtype == "bfloat16" else speed.fp32_flop_per_s
    element = 2 if dtype == "bfloat16" else 4
    head = spec.vocab_size * spec.hidden_size
    all_parameters = ready.weight_bytes / element
    body = all_parameters - head * (1 if spec.tie_word_embeddings else 2)
    prompt_s = sum(len(job.prompt) for job in jobs) * 2 * body / rate
    decode_tokens = sum(job.output_len for job in jobs)
    steps = math.ceil(decode_tokens / CONCURRENCY)
    kv_per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element
    context = statistics.mean(len(job.prompt) + job.output_len / 2 for job in jobs)
    step_bytes = (body + head) * element + CONCURRENCY * context * kv_per_token
    step_flop = 2 * (body + head) * CONCURRENCY
    return prompt_s + steps * max(step_bytes / speed.read_bytes_per_s, step_flop / rate)


def spread(jobs: list[Job], count: int) -> list[Job]:
    """`count` jobs that stand for all: evenly spaced by the share of prompt tokens, which decides a job's tokens/s."""
    ordered = sorted(jobs, key=lambda job: len(job.prompt) / job.output_len)
    return [ordered[int((place + 0.5) * len(ordered) / count)] for place in range(count)]


class TransformersPeer:
    """`transformers` generate, greedy, one job after another, KV cache on."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.tokens_per_s([Job(list(range(2, 18)), 4)])  # warm

    def tokens_per_s(self, jobs: list[Job]) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for job in jobs:
                ids = torch.tensor([job.prompt])
                out = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=job.output_len,
                    min_new_tokens=job.output_len,
                    pad_token_id=0,
                )
                assert out.shape[1] == len(job.prompt) + job.output_len
        return sum(job.output_len for job in jobs) / (time.perf_counter() - start)


def main() -> None:
    options = parse_arguments()
    console = Console()
    folder = (
        model_folder(options.model, getattr(torch, options.dtype)) if options.model in SHAPES else Path(options.model)
    )
    spec = load_spec(folder)
    scale = min(1.0, spec.max_position_embeddings / 1024)
    jobs = mixed_workload(spec.vocab_size, count=options.jobs, scale=scale)
    speed = measure_machine(options.threads)
    settings = engine_settings(folder, options)
    executor = open_executor(settings)
    sink = TimelineSink()
    ready = executor.start()
    engine = Engine(settings, model_facts(settings, ready), executor, ready, sink)
    peer = TransformersPeer(folder, options.dtype) if options.peer_jobs else None
    console.print(f"{options.model} {options.dtype}, {options.threads} threads: {speed}")
    run_jobs(engine, sink, jobs[:2], CONCURRENCY, "warm")
    ours: list[Summary] = []
    theirs: list[float] = []
    peer_jobs = spread(jobs, options.peer_jobs)
    for repeat in range(options.repeats):
        with OtherCpu() as other:
            ours.append(summarize(run_jobs(engine, sink, jobs, CONCURRENCY, f"run{repeat}")))
        console.print(describe(f"tandem offline [{repeat}]", ours[-1]), f"other_cpu {other.share:.2f}")
        if peer:
            with OtherCpu() as other:
                theirs.append(peer.tokens_per_s(peer_jobs))
            console.print(f"transformers, sequential [{repeat}] {theirs[-1]:.1f} tok/s  other_cpu {other.share:.2f}")
    executor.close()
    least = floor_s(jobs, spec, ready, speed, options.dtype)
    median = statistics.median(s.tokens_per_s for s in ours)
    best_possible = sum(job.output_len for job in jobs) / least
    console.print(f"floor {least:.1f} s = {best_possible:.0f} tok/s; reached {median / best_possible:.2f} of it")
    if theirs:
        console.print(
            f"over sequential transformers: {median / statistics.median(theirs):.2f}x (median of {len(theirs)})"
        )
    save(options, speed, ours, theirs, best_possible)


def save(
    options: argparse.Namespace, speed: MachineSpeed, ours: list[Summary], theirs: list[float], floor_tps: float
) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"throughput-{Path(options.model).name}-{options.dtype}.json"
    record = {
        "options": vars(options),
        "machine": asdict(speed),
        "torch": torch.__version__,
        "ours": [asdict(s) for s in ours],
        "transformers_sequential_tokens_per_s": theirs,
        "floor_tokens_per_s": floor_tps,
    }
    (RESULTS / name).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
