"""Decode steps and prompts of one rank on a GPU, beside the roofline and `transformers`.

    python -m benchmarks.engine.gpu_steps [--model llama-8b] [--rows 1 8 32 128] [--context 512] [--peer-rows 1 32]

Random bf16 weights, made on the device. Rows have prompts of one length and write --steps tokens each; the time of a
step is the median gap between a row's tokens while all rows decode. Replayed steps (CUDA graphs) and eager ones
alternate (A-B-A-B). Rooflines: weights once and the rows' KV at the measured read bandwidth; a prompt's products at the
measured bf16 rate. The peer is `generate` of `transformers` over a batch of equal rows, on the same device. JSON goes
to out/benchmarks.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_run import TimelineSink, opened_engine, run_jobs
from benchmarks.models import SHAPES, config_folder
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import Job
from tandem.configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.parallel.mesh import Mesh
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tests.support.in_process import runner_of

PROMPT_TOKENS = 2048
PROMPTS = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=512, help="tokens of each row's prompt")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--peer-rows", type=int, nargs="*", default=[1, 32])
    return parser.parse_args()


def device_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """The least time of a call on the device, in seconds, after three that warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)


def measure_device() -> tuple[float, float]:
    """Bytes read a second, from a reduction over 4 GiB, and bf16 operations a second, from products of 8192^3."""
    memory = torch.ones(2**31, dtype=torch.bfloat16, device="cuda")
    read_bytes_per_s = memory.nbytes / device_seconds(lambda: memory.view(torch.int32).max())
    copied_bytes_per_s = 2 * memory.nbytes / 2 / device_seconds(lambda: memory[: 2**30].copy_(memory[2**30 :]))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / device_seconds(lambda: square @ square)
    return max(read_bytes_per_s, copied_bytes_per_s), rate


def settings_of(folder: Path, rows: int, max_model_len: int) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="bfloat16", load_format="dummy", max_model_len=max_model_len),
        cache=CacheSettings(enable_prefix_caching=False),
        scheduler=SchedulerSettings(max_num_seqs=rows, max_num_batched_tokens=8192, max_num_queued_reqs=2**31),
        device=DeviceSettings(device="cuda"),
    )


def step_ms(engine: Engine, sink: TimelineSink, rows: int, context: int, steps: int, vocab: int, tag: str) -> float:
    """The median time of a decode step with all rows."""
    jobs = [Job([2 + (7 * row + 13 * k) % (vocab - 2) for k in range(context)], steps) for row in range(rows)]
    timelines = run_jobs(engine, sink, jobs, rows, tag)
    last_first = max(timeline.token_times_s[0] for timeline in timelines)
    first_last = min(timeline.token_times_s[-1] for timeline in timelines)
    times = sorted(t for t in timelines[0].token_times_s if last_first < t <= first_last)
    gaps = [after - before for before, after in pairwise(times)]
    return 1e3 * statistics.median(gaps[4:])


def prompt_tokens_per_s(engine: Engine, sink: TimelineSink, vocab: int, tag: str) -> float:
    jobs = [Job([2 + (11 * row + 17 * k) % (vocab - 2) for k in range(PROMPT_TOKENS)], 1) for row in range(PROMPTS)]
    begin = time.perf_counter()
    run_jobs(engine, sink, jobs, PROMPTS, tag)
    return PROMPTS * PROMPT_TOKENS / (time.perf_counter() - begin)


def replays(executor: Executor, allowed: bool) -> int:
    """Allows or forbids replays from now on; returns how many there have been."""
    graphs: Any = runner_of(executor)._model.graphs  # type: ignore[attr-defined]
    graphs.can_replay = allowed
    return int(graphs.num_replays)


def step_times(
    engine: Engine, sink: TimelineSink, options: argparse.Namespace, rows: int, spec: ArchSpec
) -> dict[str, list[float]]:
    """Milliseconds of replayed and of eager steps, in turns; the first turn, which compiles, is not counted."""
    found: dict[str, list[float]] = {"replayed": [], "eager": []}
    for pair in range(options.pairs + 1):
        for kind, times_ms in found.items():
            before = replays(engine.executor, kind == "replayed")
            tag = f"{kind}-{rows}-{pair}"
            taken_ms = step_ms(engine, sink, rows, options.context, options.steps, spec.vocab_size, tag)
            was_replayed = replays(engine.executor, True) > before
            assert was_replayed == (kind == "replayed"), f"steps of {rows} rows were to be {kind}"
            if pair:
                times_ms.append(taken_ms)
    return found


def described(line: Mapping[str, Any]) -> str:
    """One printed line of a number of rows."""
    rows, least_ms = line["rows"], line["roofline_ms"]
    replayed, eager = (statistics.median(line[kind]) for kind in ("replayed", "eager"))
    return (
        f"{rows:4d} rows: replayed {replayed:.2f} ms, eager {eager:.2f} ms, roofline {least_ms:.2f} ms"
        f" ({least_ms / replayed:.0%}), {1e3 * rows / replayed:.0f} tokens/s"
    )


def peer_step_ms(folder: Path, rows: int, context: int, steps: int) -> float:
    """The mean time of a token of `generate` over equal rows, without the prompt's, in milliseconds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (rows, context), device="cuda")
    seconds = []
    for count in (1, 1 + steps // 4, 1, 1 + steps // 4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                pad_token_id=0,
            )  # fmt: skip
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return 1e3 * (seconds[3] - seconds[2]) / (steps // 4)


def main() -> None:
    options = parse_arguments()
    folder = config_folder(options.model)
    spec = load_spec(folder)
    name = torch.cuda.get_device_name()
    read_bytes_per_s, flop_per_s = measure_device()
    print(f"{name}: reads {read_bytes_per_s / 1e12:.2f} TB/s, {flop_per_s / 1e12:.0f} TFLOP/s in bf16", flush=True)
    torch.cuda.empty_cache()
    kv_bytes = 2 * sum(plane.heads * plane.dim for layout in kv_layouts(spec, Mesh()) for plane in layout.planes)
    sink, decode = TimelineSink(), []
    settings = settings_of(folder, max(options.rows), options.context + options.steps + PROMPT_TOKENS)
    began_s = time.perf_counter()
    with opened_engine(settings, sink) as (engine, ready):
        print(f"{options.model}: ready after {time.perf_counter() - began_s:.1f} s, {ready}", flush=True)
        head_bytes = 2 * spec.vocab_size * spec.hidden_size
        body_bytes = ready.weight_bytes - head_bytes * (1 if spec.tie_word_embeddings else 2)
        for rows in options.rows:
            context_bytes = rows * (options.context + options.steps / 2) * kv_bytes
            least_ms = 1e3 * (body_bytes + head_bytes + context_bytes) / read_bytes_per_s
            decode.append({"rows": rows, "roofline_ms": least_ms, **step_times(engine, sink, options, rows, spec)})
            print(described(decode[-1]), flush=True)
        rates = [prompt_tokens_per_s(engine, sink, spec.vocab_size, f"prompts{run}") for run in range(3)][1:]
        most = flop_per_s / body_bytes  # two operations for each two-byte parameter
        print(
            f"prompts of {PROMPT_TOKENS}: {max(rates):.0f} tokens/s, {max(rates) / most:.0%} of the roofline",
            flush=True,
        )
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    peer = {rows: peer_step_ms(folder, rows, options.context, options.steps) for rows in options.peer_rows}
    for rows, taken_ms in peer.items():
        print(f"{rows:4d} rows: transformers {taken_ms:.2f} ms a token", flush=True)
    write_record(
        RESULTS / f"gpu-steps-{options.model}.json",
        options,
        device=name,
        read_bytes_per_s=read_bytes_per_s,
        flop_per_s=flop_per_s,
        decode=decode,
        prompt_tokens_per_s=rates,
        prompt_roofline_tokens_per_s=most,
        transformers_ms=peer,
    )


if __name__ == "__main__":
    main()
