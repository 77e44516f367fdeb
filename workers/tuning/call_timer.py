"""CallTimer: a Timer of a device that captures: ten calls in a graph, so that no launch is waited for."""

from collections.abc import Callable

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.graphs.cuda_graphs import CaptureGraph

CALLS = 10
REPEATS = 5
AHEAD = 2048
"""Rows and columns of the products that calls are queued behind."""


def device_seconds(accelerator: Accelerator, work: Callable[[], object], repeats: int = 10) -> float:
    """Returns the least time of a call on the device, after three that warm up."""
    times = []
    for turn in range(3 + repeats):
        begin = accelerator.event(timed=True)
        work()
        end = accelerator.event(timed=True)
        end.wait()
        if turn >= 3:
            times.append(end.seconds_since(begin))
    return min(times)


class CallTimer:
    """A Timer. capture: the device's."""

    def __init__(self, accelerator: Accelerator, capture: CaptureGraph) -> None:
        self._accelerator = accelerator
        self._capture = capture

    def seconds(self, run: Callable[[int], object]) -> float:
        def calls() -> tuple[()]:
            for call in range(CALLS):
                run(call)
            return ()

        calls()  # what is made at the first call is there
        replay, _ = self._capture(calls)
        return device_seconds(self._accelerator, replay, REPEATS) / CALLS


def queued_seconds(accelerator: Accelerator, device: torch.device, call: Callable[[], object]) -> float:
    """Returns the time of a call on the device, the least of some turns. Makes it as often whatever it takes, so that
    all ranks may time a sum; calls are queued behind products, of a third of a millisecond on a device of 2022, so that
    none waits for its launch, nor is captured, which one rank could fail to do."""
    ahead = torch.zeros(AHEAD, AHEAD, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(2 + REPEATS):
        for _ in range(16):
            ahead @ ahead
        begin = accelerator.event(timed=True)
        for _ in range(CALLS):
            call()
        end = accelerator.event(timed=True)
        end.wait()
        times.append(end.seconds_since(begin) / CALLS)
    return min(times[2:])
