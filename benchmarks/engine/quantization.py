"""Quantized weights: milliseconds of decode steps and of a prompt beside bf16, in turns; perplexity before and after.

    python -m benchmarks.engine.quantization [--batch 1 8 32] [--prompt 512] [--seconds 8] [--variants int8 int4]
    python -m benchmarks.engine.quantization --checkpoint FOLDER --text FILE [--window 256]    # perplexity too

Random weights of a known shape, in bf16 and by the plans of --quantization (fp8, which no kernel multiplies, if it is
named); variants take turns step by step, head included. Those of 4 bits
(int4, w4a8, nf4) have a head of int8 weights, whose inputs are rounded where theirs are. Ratios are of medians; `best`
are those of the least times, which other processes disturb less, and `cpu` those of the process's CPU time, which with
--threads 1 is what a step needs. The roofline of a decode step is the bytes of weights and KV over a bandwidth measured
now. Perplexity is of the tokens of a text's windows, each but the first, by the engine in the checkpoint's dtype.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine.decode_step import build, make_batch, make_kv, stepper
from benchmarks.machine import OtherCpu, measure_machine
from benchmarks.models import SHAPES
from benchmarks.record import RESULTS, write_record
from tandem import LLM, SamplingParams
from tandem.parallel.mesh import Mesh
from tandem.parallel.quantization.weight_plan import AT_LOAD, DENSE, WeightPlan
from tandem.workers.kernels.cpu.cpu_int8_gemm import multiplies_int8
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.rank.kv_cache import block_bytes

BF16 = torch.bfloat16
VARIANTS: dict[str, WeightPlan] = {"bf16": DENSE, **AT_LOAD}
"""Values of --quantization that are made at load, and their plans."""
BESIDE = [name for name in VARIANTS if name not in ("bf16", "fp8")]


class Times(NamedTuple):
    """Milliseconds of one variant's steps: by the wall, and of the process's CPU time over its threads."""

    wall_ms: list[float]
    cpu_ms: list[float]


def in_turn(steps: dict[str, Callable[[], object]], seconds: float, threads: int) -> dict[str, Times]:
    """Times of each variant's steps, in turn, after five that warm up, until each has had `seconds`."""
    times = {name: Times([], []) for name in steps}
    for step in list(steps.values()) * 5:
        step()
    while min(sum(own.wall_ms) for own in times.values()) < seconds * 1e3 or len(times["bf16"].wall_ms) < 5:
        for name, step in steps.items():
            began_s, cpu_s = time.perf_counter(), time.process_time()
            step()
            times[name].cpu_ms.append((time.process_time() - cpu_s) * 1e3 / threads)
            times[name].wall_ms.append((time.perf_counter() - began_s) * 1e3)
    return times


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Times decode steps of each batch, and a prompt; prints and returns the figures."""
    names = [name for name in VARIANTS if name in ("bf16", *options.variants)]
    made = {name: build(options.model, BF16, [BF16], weights=VARIANTS[name]) for name in names}
    spec = made["bf16"][0]
    weight_bytes = {name: decoder.weight_bytes for name, (_, decoder, _) in made.items()}
    print(", ".join(f"{name} {size / 1e9:.3f} GB of weights" for name, size in weight_bytes.items()), flush=True)
    bandwidth = measure_machine(options.threads).read_bytes_per_s
    cases = [(f"decode of {rows}", make_batch(1, [options.context] * rows)) for rows in options.batch]
    cases.append((f"prompt of {options.prompt}", make_batch(options.prompt, [options.prompt])))
    figures: dict[str, Any] = {}
    for words, batch in cases:
        kv = make_kv(spec, int(batch.block_table_RN.max()) + 1, BF16)
        steps = {name: stepper(decoder, attention, batch, kv) for name, (_, decoder, attention) in made.items()}
        with OtherCpu() as other:
            times = in_turn(steps, options.seconds, options.threads)
        kv_bytes = sum(batch.seq_lens_list) * block_bytes(kv_layouts(spec, Mesh()), 1, BF16)
        table_bytes = spec.vocab_size * spec.hidden_size * 2  # ids are looked up in it, which reads next to nothing
        found: dict[str, Any] = {"other_cpu": other.share, "steps": len(times["bf16"].wall_ms)}
        for name, own in times.items():
            middle_ms, cpu_ms = map(statistics.median, own)
            found[name] = {"median_ms": middle_ms, "best_ms": min(own.wall_ms), "cpu_ms": cpu_ms}
            if max(batch.query_lens_list) == 1:
                found[name]["roofline_ms"] = (weight_bytes[name] - table_bytes + kv_bytes) / bandwidth * 1e3
        figures[words] = found
        print(f"{words}: " + ", ".join(described(found, name) for name in names) + f"; {other.share:.2f} other_cpu")
    return {"weight_bytes": weight_bytes, "read_bytes_per_s": bandwidth, "cases": figures}


def described(found: dict[str, Any], name: str) -> str:
    own, base = found[name], found["bf16"]
    ratio, best, cpu = (base[key] / own[key] for key in ("median_ms", "best_ms", "cpu_ms"))
    ratios = f"{ratio:.2f} (best {best:.2f}, cpu {cpu:.2f})"
    roofline = f", {own['roofline_ms'] / own['median_ms']:.0%} of the roofline" if "roofline_ms" in own else ""
    return f"{name} {own['median_ms']:.2f} ms = {ratios}{roofline}"


def perplexity(options: argparse.Namespace, quantization: str | None) -> tuple[float, int]:
    """Returns exp(the mean negative log probability) of the text's tokens, and their number."""
    greedy = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    flags = {} if quantization is None else {"quantization": quantization}
    with LLM(options.checkpoint, cpu_threads=options.threads, enable_prefix_caching=False, **flags) as llm:
        text = options.text.read_text(encoding="utf-8")[: options.characters]
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        windows = [ids[first : first + options.window] for first in range(0, len(ids), options.window)]
        outputs = llm.generate([window for window in windows if len(window) > 1], greedy, use_tqdm=False)
    shown = [found for output in outputs for found in output.prompt_logprobs or () if found is not None]
    logprobs = [next(iter(found.values())).logprob for found in shown]
    return math.exp(-statistics.fmean(logprobs)), len(logprobs)


def measure_perplexity(options: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the perplexity of each variant."""
    found: dict[str, Any] = {"checkpoint": options.checkpoint.name, "text": options.text.name}
    for name in ("dense", *(name for name in AT_LOAD if name in options.variants)):
        found[name], found["tokens"] = perplexity(options, None if name == "dense" else name)
        print(f"perplexity {name}: {found[name]:.4f} over {found['tokens']} tokens", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--variants",
        nargs="+",
        default=BESIDE,
        choices=VARIANTS,
        help="beside bf16",
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each variant in each case; 0: no steps")
    parser.add_argument("--checkpoint", type=Path, help="folder of a trained model, for perplexity")
    parser.add_argument("--text", type=Path, help="a text file for it")
    parser.add_argument("--characters", type=int, default=200_000, help="of the text, at most")
    parser.add_argument("--window", type=int, default=256, help="tokens that are scored together")
    options = parser.parse_args()
    if (options.checkpoint is None) != (options.text is None):
        parser.error("--checkpoint and --text go together")
    if not multiplies_int8(BF16):
        parser.error("this CPU or compiler lacks AVX2; torch multiplies int8 weights, slower than bf16")
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    if options.checkpoint is not None:
        figures["perplexity"] = measure_perplexity(options)
    if options.seconds:
        figures["steps"] = measure_steps(options)
    write_record(RESULTS / "quantization.json", options, **figures)


if __name__ == "__main__":
    main()
