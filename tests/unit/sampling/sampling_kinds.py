"""Every implementation of SamplingOps that this machine can run: torch's, and C for its CPU and for older ones."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.configs.environment import CpuIsa
from tandem.workers.kernels.cpu import cpu_build
from tandem.workers.kernels.cpu.cpu_calls import NUMBER, POINTER
from tandem.workers.kernels.cpu.cpu_sampling import SCRATCH_FLOATS, CpuSampling
from tandem.workers.kernels.gumbel_noise import gumbel_noise
from tandem.workers.kernels.sampling_ops import Draws, RandomRows, SamplingOps, TorchSampling, Truncation
from tandem.workers.kernels.step_arrays import sending_with
from tests.unit.sampling.numpy_twin import Floats

AT_ONCE = sending_with(lambda host: host)
HAS_COMPILER = cpu_build.obstacle(torch.float32) is None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
NATIVE = "-march=native"
FLAGS = {
    "avx2": (NATIVE, *cpu_build.HIDING[CpuIsa.AVX2]),
    "sse2": (),
    "no intrinsics": ("-U__SSE2__",),
}
"""Flags beside those of every kernel, for CPUs that lack what this one may have."""
COMPILED = ("compiled", *FLAGS)
KINDS = ["torch", *(pytest.param(kind, marks=needs_compiler) for kind in COMPILED)]
BLOCK = 64
VOCABS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK + 17]


def kinds_here() -> list[str]:
    return ["torch", *COMPILED] if HAS_COMPILER else ["torch"]


@cache
def library(kind: str) -> ctypes.CDLL:
    """The kernels for this CPU, or the same source without some of its instructions."""
    if kind == "compiled":
        found = cpu_build.cpu_sampling_library()
        assert found is not None
        return found
    source = Path(cpu_build.__file__).parent / "src" / "cpu_sampling.c"
    shared = [flag for flag in (*cpu_build.FLAGS, *cpu_build.UNFUSED) if flag != NATIVE]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(cpu_build._compiler()), *shared, *FLAGS[kind], "-DELEMENT=0", "-DSTORED=0", str(source)]
        subprocess.run([*command, "-o", f"{folder}/x.so", "-lm"], check=True)
        return ctypes.CDLL(f"{folder}/x.so")


@cache
def ops_of(kind: str) -> SamplingOps:
    return TorchSampling() if kind == "torch" else CpuSampling(library(kind))


def draws_of(rows: int, **columns: object) -> Draws:
    """The draws of the first rows; each column is given once for all of them, or for each."""

    def column(name: str, dtype: type, default: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.broadcast_to(np.asarray(columns.get(name, default), dtype), rows).copy()

    return Draws.of(
        column("places", np.int64, 0) if "places" in columns else np.arange(rows),
        temperature=column("temperature", np.float64, 1.0),
        top_k=column("top_k", np.int64, 0),
        top_p=column("top_p", np.float64, 1.0),
        min_p=column("min_p", np.float64, 0.0),
        seed=column("seed", np.uint64, 0),
        choice=column("choice", np.int64, 0),
    )


def draw_now(
    ops: SamplingOps,
    logits: torch.Tensor,
    best: torch.Tensor,
    ids: torch.Tensor,
    draws: Draws,
    positions: Sequence[int],
) -> None:
    ops.prepare_draw(draws, AT_ONCE)(logits, best, ids, torch.tensor(positions))


def draw(kind: str, logits: torch.Tensor, positions: Sequence[int], **columns: object) -> list[int]:
    """One draw per row at its position, or of one row at each."""
    rows = len(positions)
    logits = logits.expand(rows, -1).clone()
    best, ids = ops_of(kind).best(logits)
    draw_now(ops_of(kind), logits, best, ids, draws_of(rows, **columns), positions)
    return [int(i) for i in ids]


def truncation_of(draws: Draws) -> Truncation:
    return Truncation(draws, RandomRows.sent(draws, AT_ONCE), AT_ONCE)


def lowest_of(kind: str, logits: Floats, **limits: float) -> float:
    """The least exponent that a row keeps."""
    draws, best = draws_of(1, **limits), float(logits.max())
    if kind == "torch":
        return float(truncation_of(draws).lowest(torch.from_numpy(logits)[None], torch.tensor([best]))[0])
    function = library(kind)["lowest_of"]
    function.restype = ctypes.c_float
    one = ctypes.c_float
    function.argtypes = [POINTER, NUMBER, one, one, one, NUMBER, ctypes.c_double, *[POINTER] * 3]
    room = [np.full(len(logits) + SCRATCH_FLOATS, np.nan, np.float32) for _ in range(3)]
    row, *buffers = (array.ctypes.data for array in (logits, *room))
    return float(
        function(
            row, len(logits), best, draws.factor[0], draws.lowest[0], int(draws.top_k[0]), draws.top_p[0], *buffers
        )
    )


def noise_by(kind: str, seed: int, choice: int, position: int, vocab: int) -> Floats:
    """The noise of ids below `vocab`."""
    if kind == "torch":
        bits = torch.tensor([np.array(seed, np.uint64).view(np.int64).item()])
        return gumbel_noise(bits, torch.tensor([choice]), torch.tensor([position]), vocab)[0].numpy()
    function = library(kind)["gumbel_noise"]
    function.restype = None
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, NUMBER, NUMBER, POINTER]
    found = np.empty(vocab, np.float32)
    function(seed, choice, position, 0, vocab, found.ctypes.data)
    return found
