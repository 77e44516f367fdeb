"""The cost of --batch-invariant: CPU milliseconds of decode steps and of prompts beside the usual mode's, in turns.

    python -m benchmarks.engine.invariance [--batch 1 8 32] [--prompt 128 512 1024] [--seconds 4]

One decoder of a known shape with random weights for each mode and dtype; modes take turns step by step, head included.
Times are CPU time of this process, all threads together: on a machine that others use too, time on the clock would be
theirs as well. Ratios are of medians; `best` are those of the least times.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.engine.decode_step import build, make_batch, make_kv, measure, stepper
from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES
from benchmarks.record import RESULTS, write_record
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.cpu_invariant import InvariantCpuPlatform

MODES = ("usual", "invariant")


def measure_dtype(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Times both modes in one dtype; prints and returns the figures by case."""
    platforms = (CpuPlatform(), InvariantCpuPlatform())
    made = [build(options.model, dtype, [dtype], platform=platform) for platform in platforms]
    spec = made[0][0]
    cases = [(f"decode of {rows}", make_batch(1, [options.context] * rows)) for rows in options.batch]
    cases += [(f"prompt of {tokens}", make_batch(tokens, [tokens])) for tokens in options.prompt]
    figures: dict[str, Any] = {}
    for words, batch in cases:
        kv = make_kv(spec, int(batch.block_table_RN.max()) + 1, dtype)
        steps = [stepper(decoder, attention, batch, kv) for _, decoder, attention in made]
        with OtherCpu() as other:
            times = measure(steps, options.seconds, time.process_time)
        found: dict[str, Any] = {"other_cpu": other.share, "steps": len(times[0])}
        for mode, own in zip(MODES, times, strict=True):
            found[mode] = {"median_ms": statistics.median(own) * 1e3, "best_ms": min(own) * 1e3}
        figures[words] = found
        usual, invariant = (found[mode] for mode in MODES)
        print(
            f"{str(dtype).removeprefix('torch.')}, {words}: {usual['median_ms']:.1f} CPU ms, invariant "
            f"{invariant['median_ms']:.1f} = {invariant['median_ms'] / usual['median_ms']:.2f} times "
            f"(best {invariant['best_ms'] / usual['best_ms']:.2f}); {other.share:.2f} other_cpu",
            flush=True,
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", choices=sorted(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of CPU time, of each mode in each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {name: measure_dtype(options, getattr(torch, name)) for name in options.dtype}
    write_record(RESULTS / f"invariance-{options.model}.json", options, figures=figures)


if __name__ == "__main__":
    main()
