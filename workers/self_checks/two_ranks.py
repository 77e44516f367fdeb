"""Checks the collectives between two ranks on this machine: this process is rank 0, a child is rank 1.

python -m tandem.workers.self_checks.two_ranks PORT [DEVICE]
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.configs.limits import listen
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import Collectives
from tandem.parallel.exchange.shared_memory import SharedMemoryCollectives
from tandem.parallel.exchange.small_sums import SmallSums
from tandem.parallel.groups import init_parallel
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.self_checks.outcome import Check, require

HOST = "127.0.0.1"
ROUNDS, WIDTH = 50, 4096
CHILD_END_S = 10.0


def rank_checks() -> list[Check]:
    return [Check("all-reduce of two ranks", lambda: sum_of_two(CpuPlatform()))]


@contextmanager
def _joined(rank: int, port: int, platform: Platform, **more: object) -> Iterator[ParallelContext]:
    context = init_parallel(rank, 2, 2, 1, HOST, port, platform.backend, **more)  # type: ignore[arg-type]
    try:
        yield context
    finally:
        context.tp.close()
        context.shut_down()


def _run(context: ParallelContext, platform: Platform) -> tuple[torch.Tensor, float]:
    """Returns the sum of all rounds and the seconds of the fastest round."""
    total, best_s = platform.zeros((WIDTH,), torch.float32), float("inf")
    for turn in range(ROUNDS):
        mine = torch.arange(WIDTH, dtype=torch.float32, device=platform.device) * (context.rank + 1) + turn
        platform.accelerator.synchronize()
        started_s = time.perf_counter()
        total += context.tp.all_reduce(mine)
        platform.accelerator.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return total, best_s


def sum_of_two(platform: Platform) -> str:
    """Returns what two ranks on that kind of device found, which have a device each where these are not shared."""
    listener = listen(HOST)
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "tandem.workers.self_checks.two_ranks", str(port), platform.name]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        with _joined(0, port, platform, listener=listener) as context:
            total, best_s = _run(context, platform)
            way = _way(context.tp.group, platform)
            expected = ROUNDS * 3 * torch.arange(WIDTH, dtype=torch.float32) + ROUNDS * (ROUNDS - 1)
            require(torch.equal(total.cpu(), expected), "two ranks got a wrong sum")
            status = child.wait(CHILD_END_S)  # in here: the store of the rendezvous is this process's
    finally:
        child.kill()
        child.wait()
    require(status == 0, f"the second rank ended with exit status {status}")
    return f"through {way}, {best_s * 1e6:.0f} us for {WIDTH * 4 // 1024} KiB"


def _way(group: Collectives, platform: Platform) -> str:
    if isinstance(group, SharedMemoryCollectives):
        return "shared memory"
    if isinstance(group, SmallSums):
        return f"one shot up to {group.most_bytes // 1024} KiB, {platform.backend.name} above"
    return platform.backend.name


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, given_port, kind = sys.argv
    settings = EngineSettings(model=ModelSettings(model=""), device=DeviceSettings(device=kind, cpu_threads=1))  # type: ignore[arg-type]
    own = open_platform(settings, rank=1, ranks_on_node=2)
    with _joined(1, int(given_port), own) as joined:
        _run(joined, own)
