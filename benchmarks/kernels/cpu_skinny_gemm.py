"""Dense products on CPU with all matrices of a model, by our kernel (skinny GEMM or row GEMM) and by oneDNN, or
by torch where oneDNN packs no bf16.

    python -m benchmarks.kernels.cpu_skinny_gemm [--model qwen3-0.6b] [--rows 1 4 8 16 32 64] [--threads N] [--cpu-time]

One pass multiplies each layer's matrices and the head once, as a decode step does; each side has its packed copy. Both
and a plain read of as many bytes (the roofline of few rows) alternate pass by pass; milliseconds are medians. other_cpu
is the share of the machine that other processes took meanwhile.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES
from tandem.configs.environment import imitate_cpu
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import DenseMethod, LinearMethod, MakeMethod, PackedMethod, can_pack
from tandem.workers.kernels.cpu.cpu_skinny_gemm import MAX_ROWS, skinny_gemm
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform, multiplies_by_row


def matrix_sizes(spec: ArchSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of every product of a decode step, in order."""
    attention = spec.layers[0].attention.num_heads * spec.head_dim
    merged = attention + 2 * spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.layers[0].mlp.width
    layer = [(merged, hidden), (hidden, attention), (2 * inner, hidden), (hidden, inner)]
    return layer * spec.num_layers + [(spec.vocab_size, hidden)]


def in_turn(
    ways: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each way, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, call in ways.items():
            start = clock()
            call()
            if repeat:
                times[name].append(clock() - start)
    return {name: statistics.median(all_of) for name, all_of in times.items()}


def measure(
    sizes: list[tuple[int, int]], make: MakeMethod, rows: list[int], repeats: int, clock: Callable[[], float]
) -> None:
    """Prints a line per number of rows."""
    peer = "oneDNN" if can_pack(torch.bfloat16) else "torch"
    make_peer: Callable[[], LinearMethod] = PackedMethod if can_pack(torch.bfloat16) else DenseMethod
    pairs = []
    for outputs, inputs in sizes:
        weight = torch.randn(outputs, inputs).mul_(0.02).bfloat16()
        pairs.append((make_peer(), make((), ParallelContext.single())))
        for method in pairs[-1]:
            method.take(weight, None)
    num_bytes = sum(2 * outputs * inputs for outputs, inputs in sizes)
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    for count in rows:
        inputs_of = {width: torch.randn(count, width).bfloat16() for _, width in sizes}
        given = [inputs_of[width] for _, width in sizes]

        def passing(side: int, given: list[torch.Tensor] = given) -> Callable[[], object]:
            return lambda: [pair[side].apply(x) for pair, x in zip(pairs, given, strict=True)]

        with OtherCpu() as other, torch.inference_mode():
            found = in_turn({peer: passing(0), "kernel": passing(1), "read": memory.sum}, repeats, clock)
        print(
            f"{count:3d} rows: {peer} {found[peer] * 1e3:7.2f} ms, kernel {found['kernel'] * 1e3:7.2f} ms "
            f"({found['kernel'] / found[peer]:.2f} of it), read {found['read'] * 1e3:6.2f} ms "
            f"({num_bytes / found['read'] / 1e9:.1f} GB/s), other_cpu {other.share:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of all threads: for --threads 1, when busy")
    options = parser.parse_args()
    imitate_cpu()
    torch.set_num_threads(options.threads)
    by_row = multiplies_by_row(torch.bfloat16)
    if not by_row and skinny_gemm(torch.bfloat16) is None:
        parser.error(
            "this CPU, compiler or build of torch lacks a feature that the kernel needs; oneDNN multiplies alone"
        )
    if wrong := [count for count in options.rows if count < 1 or (count > MAX_ROWS and not by_row)]:
        parser.error(f"--rows {wrong[0]}: from 1 to {MAX_ROWS}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(SHAPES[options.model]))
        sizes = matrix_sizes(load_spec(folder))
    name = "row GEMM" if by_row else "skinny GEMM"
    print(f"{options.model} bf16, {name}, {options.threads} threads, {len(sizes)} products a pass")
    measure(
        sizes,
        partial(CpuPlatform().linear, dtype=torch.bfloat16),
        options.rows,
        options.repeats,
        time.process_time if options.cpu_time else time.perf_counter,
    )


if __name__ == "__main__":
    main()
