"""CallTimer: a Timer of a device that captures: ten calls in a graph, so that no launch is waited for."""

from collections.abc import Callable

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.graphs.cuda_graphs import CaptureGraph

CALLS = 10
REPEATS = 5


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
