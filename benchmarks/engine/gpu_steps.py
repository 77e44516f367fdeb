"""Decode steps and prompts of one rank on a GPU, beside the roofline and `transformers`.

    python -m benchmarks.engine.gpu_steps [--model llama-8b] [--rows 1 8 32 128] [--context 512] [--peer-rows 1 32]
    python -m benchmarks.engine.gpu_steps --sampled --lengths uniform mixed one-long --prompts 2048 8192 32768
    python -m benchmarks.engine.gpu_steps --quantization int4 fp8 --prompts 8192 --no-eager

Random bf16 weights, made on the device, or rounded there as --quantization says. Rows have prompts of --lengths and
write --steps tokens each; the time of a step is the median gap between a row's tokens while all rows decode. Replayed
steps (CUDA graphs) and eager ones alternate (A-B-A-B), and with --sampled replayed ones whose tokens are drawn.
Rooflines: weights once and the rows' KV at the measured read bandwidth; a prompt's products at the measured bf16 rate,
and those of its attention. The peer is `generate` of `transformers` over a batch of equal rows, on the same device.
--profile writes the kernels of some steps. JSON goes to out/benchmarks. --device cpu is for a try without a GPU.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_run import TimelineSink, opened_engine, run_jobs
from benchmarks.models import SHAPES, config_folder
from benchmarks.record import RESULTS, note, write_record
from benchmarks.workload import Job
from tandem.configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.parallel.mesh import Mesh
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.self_checks.device_checks import DeviceRates, device_rates
from tests.support.in_process import runner_of

DRAWN: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
LENGTHS: Mapping[str, str] = {
    "uniform": "each of --context tokens",
    "mixed": "in turn four times and a fifth of it",
    "one-long": "one of --long-context, the others of --context",
}
TURNS: Mapping[str, tuple[bool, Mapping[str, Any]]] = {
    "replayed": (True, {}),
    "eager": (False, {}),
    "drawn": (True, DRAWN),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=512, help="tokens of each row's prompt")
    parser.add_argument(
        "--lengths", nargs="+", default=["uniform"], choices=LENGTHS, help="; ".join(map(": ".join, LENGTHS.items()))
    )
    parser.add_argument("--long-context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--sampled", action="store_true", help="drawn tokens too: temperature 0.8, top-p 0.95")
    parser.add_argument("--no-eager", action="store_true", help="leaves eager steps out")
    parser.add_argument("--no-tune", action="store_true", help="with the default tiles of kernels")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], choices=("auto", "fp8", "int8"))
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=("none", *AT_LOAD))
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048], help="lengths of prompts that are timed")
    parser.add_argument("--prompt-tokens", type=int, default=16384, help="of all prompts of a length, at most")
    parser.add_argument("--peer-rows", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--profile", type=Path, help="file for the kernels of 20 steps of the last number of rows")
    return parser.parse_args()


def settings_of(folder: Path, options: argparse.Namespace, kv_dtype: Any, weights: Any = "none") -> EngineSettings:
    """Rows find their prompts' KV again from the second turn on."""
    longest = max(max(lengths_of(options, kind, 2)) for kind in options.lengths)
    most = 2 * options.steps + 8192 + max([longest, *options.prompts])
    return EngineSettings(
        model=ModelSettings(
            model=str(folder),
            dtype="bfloat16",
            load_format="dummy",
            quantization=None if weights == "none" else weights,
            max_model_len=min(most, load_spec(folder).max_position_embeddings),
        ),
        cache=CacheSettings(kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=2**28 if options.device == "cpu" else None),
        scheduler=SchedulerSettings(
            max_num_seqs=max(options.rows), max_num_batched_tokens=8192, max_num_queued_reqs=2**31
        ),
        device=DeviceSettings(
            device=options.device, cpu_threads=1 if options.device == "cpu" else None, tune=not options.no_tune
        ),
    )


def lengths_of(options: argparse.Namespace, kind: str, rows: int) -> list[int]:
    """Tokens of each row's prompt."""
    context = options.context
    if kind == "mixed":
        return [context // 5 if row % 2 else 4 * context for row in range(rows)]
    return [options.long_context if kind == "one-long" and row == 0 else context for row in range(rows)]


def prompt_of(length: int, vocab: int, number: int, step: int) -> list[int]:
    return [2 + (7919 * number + step * place + place // 97 * number) % (vocab - 2) for place in range(length)]


def step_ms(
    engine: Engine,
    sink: TimelineSink,
    lengths: Sequence[int],
    steps: int,
    vocab: int,
    tag: str,
    fields: Mapping[str, Any],
) -> float:
    """The median time of a decode step with all rows. Each writes more tokens than there are steps of prompts."""
    tokens = steps + sum(lengths) // 8192 + len(lengths) // 64
    jobs = [Job(prompt_of(length, vocab, row, 13), tokens) for row, length in enumerate(lengths)]
    timelines = run_jobs(engine, sink, jobs, len(jobs), tag, fields=fields)
    last_first = max(timeline.token_times_s[0] for timeline in timelines)
    first_last = min(timeline.token_times_s[-1] for timeline in timelines)
    times = sorted(t for t in timelines[-1].token_times_s if last_first < t <= first_last)
    gaps = [after - before for before, after in pairwise(times)]
    return 1e3 * statistics.median(gaps[4:] or gaps)


def prompt_seconds(engine: Engine, sink: TimelineSink, length: int, count: int, vocab: int, turn: int) -> float:
    jobs = [Job(prompt_of(length, vocab, 1 + row + count * turn, 17 + 2 * turn), 1) for row in range(count)]
    begin = time.perf_counter()
    run_jobs(engine, sink, jobs, count, f"prompts{length}-{turn}")
    return time.perf_counter() - begin


def replays(executor: Executor, allowed: bool) -> int:
    """Allows or forbids replays from now on; returns how many there have been."""
    graphs: Any = runner_of(executor)._model.graphs  # type: ignore[attr-defined]
    graphs.can_replay = allowed
    return int(graphs.num_replays)


def step_times(
    engine: Engine, sink: TimelineSink, options: argparse.Namespace, kind: str, rows: int, spec: ArchSpec
) -> dict[str, list[float]]:
    """Milliseconds of replayed, eager and drawn steps, in turns; the first turn, which compiles and computes the
    prompts, is not counted."""
    wanted = {"eager": not options.no_eager, "drawn": options.sampled}
    found: dict[str, list[float]] = {name: [] for name in TURNS if wanted.get(name, True)}
    lengths = lengths_of(options, kind, rows)
    for pair in range(options.pairs + 1):
        for name, times_ms in found.items():
            is_replayed, fields = TURNS[name]
            before = replays(engine.executor, is_replayed)
            tag = f"{name}-{kind}-{rows}-{pair}"
            taken_ms = step_ms(engine, sink, lengths, options.steps, spec.vocab_size, tag, fields)
            was_replayed = replays(engine.executor, True) > before
            assert was_replayed == is_replayed or options.device == "cpu", f"steps of {rows} rows were to be {name}"
            if pair:
                times_ms.append(taken_ms)
    return found


def described(line: Mapping[str, Any]) -> str:
    """One printed line of a number of rows."""
    rows, least_ms = line["rows"], line["roofline_ms"]
    medians = {kind: statistics.median(line[kind]) for kind in TURNS if kind in line}
    words = ", ".join(f"{kind} {taken:.2f} ms" for kind, taken in medians.items())
    share, rate = least_ms / medians["replayed"], 1e3 * rows / medians["replayed"]
    return f"{rows:4d} rows {line['lengths']:8}: {words}, roofline {least_ms:.2f} ms ({share:.0%}), {rate:.0f} tokens/s"


def profiled(engine: Engine, sink: TimelineSink, options: argparse.Namespace, vocab: int) -> None:
    """Writes the kernels of some replayed steps by their time, and how much of the time the device computed."""
    on_gpu = options.device == "cuda"
    lengths = lengths_of(options, "uniform", options.rows[-1])
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    run_jobs(
        engine, sink, [Job(prompt_of(n, vocab, row, 13), 1) for row, n in enumerate(lengths)], len(lengths), "seen"
    )
    with torch.profiler.profile(activities=kinds) as profile:
        begin = time.perf_counter()
        step_ms(engine, sink, lengths, 20, vocab, "profiled", {})
        wall_s = time.perf_counter() - begin
    table = profile.key_averages()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    busy_s = sum(getattr(row, name) for row in table) / 1e6
    options.profile.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f"{options.model}, {len(lengths)} rows, 20 steps behind cached prompts: {wall_s:.3f} s, kernels {busy_s:.3f} s"
    )
    rows = table.table(sort_by=name, row_limit=60, max_name_column_width=80)
    options.profile.write_text(f"{head}\n{rows}")
    note(case="profile", model=options.model, rows=len(lengths), wall_s=wall_s, busy_s=busy_s)


def peer_step_ms(folder: Path, rows: int, context: int, steps: int, device: str) -> float:
    """The mean time of a token of `generate` over equal rows, without the prompt's, in milliseconds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (rows, context), device=device)
    seconds = []
    for count in (1, 1 + steps // 4, 1, 1 + steps // 4):
        begin = time.perf_counter()
        with torch.inference_mode():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                pad_token_id=0,
            )  # fmt: skip
        tokens.cpu()  # waits
        seconds.append(time.perf_counter() - begin)
    del model
    release(device)
    return 1e3 * (seconds[3] - seconds[2]) / (steps // 4)


def release(device: str) -> None:
    """Gives memory of the device back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Roofline:
    """The least time of steps and prompts, by the bytes and products of a model and the rates of the device."""

    def __init__(
        self,
        spec: ArchSpec,
        ready: ExecutorReady,
        rates: DeviceRates,
        options: argparse.Namespace,
        kv_dtype: str,
        weights: str,
    ) -> None:
        self.kv_dtype, self.weights = kv_dtype, weights
        self.kv_tokens = ready.num_blocks * CacheSettings().block_size
        self._rates, self._steps = rates, options.steps
        planes = [plane for layout in kv_layouts(spec, Mesh()) for plane in layout.planes]
        elements, heads = sum(plane.heads * plane.dim for plane in planes), sum(plane.heads for plane in planes)
        self._kv_bytes = 2 * elements if kv_dtype == "auto" else elements + 4 * heads  # codes and scales
        dense, table_bytes = rank_weights(spec, Mesh(), 2, packs=False), 2 * spec.vocab_size * spec.hidden_size
        is_head_apart = not spec.tie_word_embeddings or ready.weight_bytes > dense.total_bytes
        self._read_bytes = ready.weight_bytes - table_bytes * is_head_apart  # few rows of the embedding are read
        self._body_bytes = dense.total_bytes - dense.table_bytes
        self._query_width = sum(layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers)

    def step_ms(self, lengths: Sequence[int]) -> float:
        context_bytes = sum(length + self._steps / 2 for length in lengths) * self._kv_bytes
        return 1e3 * (self._read_bytes + context_bytes) / self._rates.memory_bytes_per_s

    def prompt_s(self, length: int) -> float:
        """Two operations for each two-byte parameter, and two products with the half of the keys that a token sees."""
        return (length * self._body_bytes + 2 * length**2 * self._query_width) / self._rates.bf16_flop_per_s


def measure_steps(
    engine: Engine, sink: TimelineSink, options: argparse.Namespace, spec: ArchSpec, roofline: Roofline
) -> list[dict[str, Any]]:
    """Times and prints steps of each kind of lengths and number of rows."""
    found = []
    for kind in options.lengths:
        for rows in options.rows:
            lengths = lengths_of(options, kind, rows)
            if sum(lengths) + rows * 3 * options.steps > roofline.kv_tokens:
                print(
                    f"{rows:4d} rows {kind}: left out, {roofline.kv_tokens} tokens of KV do not hold them", flush=True
                )
                continue
            line: dict[str, Any] = {
                "rows": rows,
                "lengths": kind,
                "kv_cache_dtype": roofline.kv_dtype,
                "weights": roofline.weights,
                "roofline_ms": roofline.step_ms(lengths),
                **step_times(engine, sink, options, kind, rows, spec),
            }
            found.append(line)
            print(described(line), flush=True)
            note(case="steps", model=options.model, **line)
    return found


def measure_prompts(
    engine: Engine, sink: TimelineSink, options: argparse.Namespace, spec: ArchSpec, roofline: Roofline
) -> list[dict[str, Any]]:
    """Times and prints prompts of each length, new ones in each turn; the first, which compiles, is not counted."""
    found = []
    for length in options.prompts:
        count = max(1, options.prompt_tokens // length)
        times = [prompt_seconds(engine, sink, length, count, spec.vocab_size, turn) for turn in range(3)][1:]
        line = {
            "length": length,
            "count": count,
            "kv_cache_dtype": roofline.kv_dtype,
            "weights": roofline.weights,
            "seconds": times,
            "roofline_s": count * roofline.prompt_s(length),
        }
        found.append(line)
        rate = count * length / min(times)
        share = count * roofline.prompt_s(length) / min(times)
        print(f"{count} prompts of {length}: {rate:.0f} tokens/s, {share:.0%} of the roofline", flush=True)
        note(case="prompts", model=options.model, **line)
    return found


def main() -> None:
    options = parse_arguments()
    folder = config_folder(options.model)
    spec, decode, prompts = load_spec(folder), list[dict[str, Any]](), list[dict[str, Any]]()
    platform = open_platform(settings_of(folder, options, "auto"), rank=0, ranks_on_node=1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    small = {} if options.device == "cuda" else {"most_bytes": 2**24, "square": 256}
    rates = device_rates(platform, **small)
    print(
        f"{name}: moves {rates.memory_bytes_per_s / 1e12:.2f} TB/s, {rates.bf16_flop_per_s / 1e12:.0f} TFLOP/s in bf16",
        flush=True,
    )
    release(options.device)
    for kv_dtype, weights in product(options.kv_cache_dtype, options.quantization):
        sink = TimelineSink()
        began_s = time.perf_counter()
        with opened_engine(settings_of(folder, options, kv_dtype, weights), sink) as (engine, ready):
            taken_s = time.perf_counter() - began_s
            print(
                f"{options.model}, weights {weights}, KV {kv_dtype}: ready after {taken_s:.1f} s, {ready}", flush=True
            )
            note(case="ready", model=options.model, device=name, seconds=taken_s, **rates._asdict())
            roofline = Roofline(spec, ready, rates, options, kv_dtype, weights)
            decode += measure_steps(engine, sink, options, spec, roofline)
            prompts += measure_prompts(engine, sink, options, spec, roofline)
            if options.profile is not None:
                profiled(engine, sink, options, spec.vocab_size)
        del engine
        release(options.device)
    peer = {
        rows: peer_step_ms(folder, rows, options.context, options.steps, options.device) for rows in options.peer_rows
    }
    for rows, taken_ms in peer.items():
        print(f"{rows:4d} rows: transformers {taken_ms:.2f} ms a token", flush=True)
    write_record(
        RESULTS / f"gpu-steps-{options.model}.json",
        options,
        device=name,
        read_bytes_per_s=rates.memory_bytes_per_s,
        flop_per_s=rates.bf16_flop_per_s,
        decode=decode,
        prompts=prompts,
        prompt_tokens_per_s=[
            one["count"] * one["length"] / seconds for one in prompts[:1] for seconds in one["seconds"]
        ],
        prompt_roofline_tokens_per_s=next((one["count"] * one["length"] / one["roofline_s"] for one in prompts), None),
        transformers_ms=peer,
    )


if __name__ == "__main__":
    main()
