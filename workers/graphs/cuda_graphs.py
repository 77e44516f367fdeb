"""Graphs of devices that capture what their stream is given: one per bucket of tokens, replayed for any step that fits.

All captures are made at the start (rank/start/captures.py), by the ranks of a stage together, and none later. A step is
padded to the least bucket that holds it: padded tokens compute on zeros, attend to a scratch block and write there.
Adapters are read on the device by each token's slot, so one graph serves any mix of them. The layers' collectives are
in the graph; a rank that cannot compute a step launches it on padding alone. The capture itself is the platform's; on
CPUs tests put a recorder of torch's operations in its place.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tandem.parallel.exchange.step_collectives import PaddedReplay, StepCollectives
from tandem.workers.graphs.graph_runner import Body, I, Outputs
from tandem.workers.planning.graph_room import BUCKETS

Replay = Callable[[], object]
CaptureGraph = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]
"""Captures what a function gives the device, run or not; returns the replay and the outputs, whose memory stays."""


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """A PaddedReplay: a graph of the layers, which holds those of a step's collectives that are in `exchanges`."""

    graph: Replay
    inputs: Any
    outputs: Outputs
    body: object  # which holds the cache
    exchanges: range
    tp: StepCollectives
    before_run: Callable[[], None]

    def replay(self) -> None:
        self.before_run()
        self.tp.replay(self.graph, len(self.exchanges))

    def launch(self) -> None:
        self.inputs.pad()
        self.replay()


class CudaGraphs:
    """A StartGraphs. before_run: is called before a step that is captured or replayed. tp: what the layers sum
    with."""

    def __init__(
        self,
        before_run: Callable[[], None],
        can_replay: bool,
        tp: StepCollectives,
        capture: CaptureGraph,
        buckets: tuple[int, ...] = BUCKETS,
    ) -> None:
        self._before_run = before_run
        self.can_replay = can_replay
        self.num_replays = 0
        self._tp = tp
        self._capture_graph = capture
        self._buckets = buckets
        self._exchanges = range(0)
        self._captures: dict[Hashable, CapturedLayers] = {}

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        captured = self._find(key, inputs.num_tokens)
        assert self._tp.size == 1 or captured is self._tp.padded, "its peers run this step in another way"
        if captured is None:
            first = self._tp.num_done
            outputs = body(inputs)
            self._exchanges = range(first, self._tp.num_done)
            return outputs
        captured.inputs.take(inputs)
        captured.replay()
        self.num_replays += 1
        return tuple(output[: inputs.num_tokens] for output in captured.outputs)

    def padded(self, key: Hashable | None, num_tokens: int) -> PaddedReplay | None:
        return self._find(key, num_tokens)

    def begin_layer(self) -> None:
        """Does nothing: a graph's memory is the capture's own."""

    def capture(self, key: Hashable, num_tokens: int, make_inputs: Callable[[], I], body: Body[I]) -> str | None:
        tp = self._tp
        self._before_run()
        try:
            with tp.apart(num_tokens, self._exchanges):
                static = make_inputs().static(num_tokens)
                body(static)  # kernels are compiled, and what is made once per step's shape exists
        except torch.OutOfMemoryError as error:
            return str(error)
        try:
            graph, outputs = self._capture_graph(lambda: body(static))
        except RuntimeError as error:  # it cannot be captured, or there is no memory for it
            return str(error)
        captured = CapturedLayers(graph, static, outputs, body, self._exchanges, tp, self._before_run)
        self._captures[key, num_tokens] = captured
        return None

    def launch(self, key: Hashable, num_tokens: int) -> None:
        self._captures[key, num_tokens].launch()

    def drop(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        for key in keys:
            self._captures.pop(key, None)

    def close(self) -> None:
        self._captures.clear()

    def _find(self, key: Hashable | None, num_tokens: int) -> CapturedLayers | None:
        place = bisect_left(self._buckets, num_tokens)
        if key is None or not self.can_replay or place == len(self._buckets):
            return None
        return self._captures.get((key, self._buckets[place]))
