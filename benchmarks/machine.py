"""Best rates of this machine, measured now, and the load of other processes.

Benchmarks make their rooflines from the rates and print the load as other_cpu.
"""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

QUIET = 0.1
"""Share of the machine that other processes may take in a measurement that counts as quiet."""


@dataclass(frozen=True)
class MachineSpeed:
    """Best rates seen in a short measurement with `threads` threads. bf16: never below float32's, which CPUs without
    products of bf16 pairs multiply it by, faster than torch does there."""

    threads: int
    read_bytes_per_s: float
    bf16_flop_per_s: float
    fp32_flop_per_s: float


def best_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The least time of `repeats` calls after one that warms up, in seconds."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine(threads: int) -> MachineSpeed:
    """Measures rates with `threads` threads; read bandwidth is the best of four passes over 128 or 256 MiB."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows, columns = 16384, 4096
    matrix, vector = torch.randn(rows, columns), torch.randn(columns)
    half, half_vector = matrix.bfloat16(), vector.bfloat16()
    reads = (
        matrix.numel() * 4 / best_seconds(lambda: torch.mv(matrix, vector)),
        half.numel() * 2 / best_seconds(lambda: torch.nn.functional.linear(half_vector, half)),
        matrix.numel() * 4 / best_seconds(lambda: matrix.sum()),
        matrix.numel() * 4 / best_seconds(lambda: torch.dot(matrix.view(-1), matrix.view(-1))),
    )
    square = torch.randn(2048, 2048)
    half_square = square.bfloat16()
    flop = 2 * 2048**3
    fp32 = flop / best_seconds(lambda: square @ square)
    speed = MachineSpeed(
        threads=threads,
        read_bytes_per_s=max(reads),
        bf16_flop_per_s=max(fp32, flop / best_seconds(lambda: half_square @ half_square)),
        fp32_flop_per_s=fp32,
    )
    torch.set_num_threads(before)
    return speed


def measure_memcpy(size_bytes: int = 256 * 2**20) -> float:
    """Bytes per second that one thread copies between two buffers larger than any cache; each byte counts once."""
    source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    return size_bytes / best_seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes))


class OtherCpu:
    """Measures the share of the machine, 0 to 1, that processes outside this one's family took during the block."""

    def __init__(self) -> None:
        self.share = 0.0

    def __enter__(self) -> "OtherCpu":
        self._start = (time.perf_counter(), _busy_s(), family_cpu_s())
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, ours = time.perf_counter(), _busy_s(), family_cpu_s()
        span = (wall - self._start[0]) * (os.cpu_count() or 1)
        self.share = max(0.0, (busy - self._start[1]) - (ours - self._start[2])) / span


def wait_until_quiet(patience_s: float, window_s: float = 0.25) -> None:
    """Waits until other processes take less than QUIET of the machine for window_s, but at most patience_s."""
    deadline_s = time.perf_counter() + patience_s
    while time.perf_counter() < deadline_s:
        with OtherCpu() as other:
            time.sleep(window_s)
        if other.share < QUIET:
            return


def _busy_s() -> float:
    """CPU seconds of all processes since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def family_cpu_s() -> float:
    """CPU seconds of this process and all its living descendants."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return float(total)
