"""Products of the matrices of some layers with weights in every form, in turns: kernels alone, without an engine.

    python -m benchmarks.kernels.weight_forms [--model qwen3-0.6b] [--rows 1 8 64 256 1024] [--layers 2] [--threads 1]

Milliseconds are CPU time of a layer, medians; in brackets how many times as fast as bf16. Of how the CPU multiplies
bf16, and of what a form needs, says `tandem doctor`. other_cpu is the share of the machine that others took meanwhile.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.kernels.cpu_skinny_gemm import in_turn, matrix_sizes
from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES
from tandem.configs.environment import imitate_cpu
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import method_of

BF16 = torch.bfloat16
MATRICES = 4
"""Of a layer."""
FORMS: dict[str, Scheme | None] = {
    "bf16": None,
    "int8": Int8Rows(),
    "w8a8": Int8Rows(inputs=Inputs.INT8),
    "int4": Coded(group=128, zeros=True),
    "w4a8": Coded(group=128, zeros=True, inputs=Inputs.INT8),
    "nf4": Coded(Codes.NF4, group=64),
}


def made(form: str, outputs: int, inputs: int) -> LinearMethod:
    """A random weight in a form."""
    scheme = FORMS[form]
    weight = Param(name="x", shape=(outputs, inputs), role="x", source=Source(("x",)), merge="x", scheme=scheme)
    method = method_of(BF16, scheme)((weight,), ParallelContext.single())
    method.take(torch.randn(outputs, inputs).mul_(0.02).to(BF16), None)
    return method


def passing(methods: list[LinearMethod], given: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: [method.apply(x) for method, x in zip(methods, given, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    imitate_cpu()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(SHAPES[options.model]))
        sizes = matrix_sizes(load_spec(folder))[: MATRICES * options.layers]
    forms = {form: [made(form, *size) for size in sizes] for form in dict.fromkeys(("bf16", *options.forms))}
    kinds = ", ".join(f"{form} {type(methods[0]).__name__}" for form, methods in forms.items())
    print(f"{options.model}, {options.threads} threads: {kinds}")
    for rows in options.rows:
        given = [torch.randn(rows, inputs).to(BF16) for _, inputs in sizes]
        with OtherCpu() as other, torch.inference_mode():
            ways = {form: passing(methods, given) for form, methods in forms.items()}
            found = in_turn(ways, options.repeats, time.process_time)
        words = [f"{form} {s / options.layers * 1e3:.2f} ms ({found['bf16'] / s:.2f})" for form, s in found.items()]
        print(f"{rows:4d} rows: {', '.join(words)}; other_cpu {other.share:.2f}", flush=True)


if __name__ == "__main__":
    main()
