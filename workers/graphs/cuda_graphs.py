"""Graphs of devices that capture what their stream is given: whole steps, one per bucket of tokens, replayed for any
step that fits.

All captures are made at the start (rank/start/captures.py), by the ranks of a stage together, and none later. A step is
padded to the least bucket that holds it: padded tokens attend to a scratch block and write there. Adapters are read on
the device by each token's slot, so one graph serves any mix of them. The step's collectives are in the graph; a rank
that cannot compute it launches it on padding alone. The capture itself is the platform's; on CPUs tests put a recorder
of torch's operations in its place.
"""

from collections.abc import Callable, Hashable, Iterable

import torch

from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.graphs.graph_runner import Body, I, Outputs, StaticStep, StepReplay

Replay = Callable[[], object]
CaptureGraph = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]
"""Captures what a function gives the device, run or not; returns the replay and the outputs, whose memory stays."""


class CudaGraphs:
    """A StartGraphs. before_run: is called before a step that is captured or replayed. tp: what a step sums with."""

    def __init__(
        self, before_run: Callable[[], None], can_replay: bool, tp: StepCollectives, capture: CaptureGraph
    ) -> None:
        self._before_run = before_run
        self.can_replay = can_replay
        self.num_replays = 0
        self._tp = tp
        self._capture_graph = capture
        self._captures: dict[Hashable, dict[int, StepReplay]] = {}

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        return body(inputs)

    def begin_layer(self) -> None:
        """Does nothing: a graph's memory is the capture's own."""

    def capture(self, key: Hashable, step: StaticStep) -> str | None:
        self._before_run()
        step.pad()
        try:
            with self._tp.apart(step.num_tokens, step.num_samples, by_shards=step.by_shards):
                step.run()  # kernels are compiled, and what is made once per step's shape exists
        except torch.OutOfMemoryError as error:
            return str(error)
        try:
            graph, outputs = self._capture_graph(step.run)
        except RuntimeError as error:  # it cannot be captured, or there is no memory for it
            return str(error)
        exchanges = range(self._tp.num_exchanges or 0)
        self._captures.setdefault(key, {})[step.num_tokens] = StepReplay(
            graph, step, outputs, exchanges, self._tp, self._before_run
        )
        return None

    def capture_apart(self, body: Callable[[], Outputs]) -> tuple[Replay, Outputs] | str:
        try:
            body()
            return self._capture_graph(body)
        except RuntimeError as error:
            return str(error)

    def find(self, key: Hashable | None, num_tokens: int) -> StepReplay | None:
        found = self._captures.get(key, {}) if self.can_replay else {}
        bucket = min((bucket for bucket in found if bucket >= num_tokens), default=None)
        return None if bucket is None else found[bucket]

    def drop(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        for key, num_tokens in keys:
            self._captures.get(key, {}).pop(num_tokens, None)

    def close(self) -> None:
        self._captures.clear()
