"""Graphs of devices that capture what their stream is given: one per bucket of tokens, replayed for any step that fits.

A step is padded to the least bucket that holds it: padded tokens compute on zeros, attend to a scratch block and write
there. Adapters are read on the device by each token's slot, so one graph serves any mix of them. Steps without a
bucket or a key run eagerly. The capture itself is the platform's; on CPUs tests put a recorder of torch's operations in
its place.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

from tandem.workers.graphs.graph_runner import Body, Captures, I, Outputs
from tandem.workers.planning.graph_room import BUCKETS, MAX_CAPTURES

log = logging.getLogger(__name__)
RUNS_BEFORE_CAPTURE: Final = 2
Replay = Callable[[], object]
CaptureGraph = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]
"""Captures what a function gives the device, run or not; returns the replay and the outputs, whose memory stays."""


class _CapturedStep(NamedTuple):
    replay: Replay
    inputs: Any
    outputs: Outputs
    body: object


class CudaGraphs:
    """The GraphRunner. before_run: is called before a step that is captured or replayed."""

    def __init__(
        self,
        before_run: Callable[[], None],
        can_replay: bool,
        capture: CaptureGraph,
        buckets: tuple[int, ...] = BUCKETS,
    ) -> None:
        self._before_run = before_run
        self.can_replay = can_replay
        self.num_replays = 0
        self._capture_graph = capture
        self._buckets = buckets
        self._captures = Captures[_CapturedStep](MAX_CAPTURES, RUNS_BEFORE_CAPTURE)

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        place = bisect_left(self._buckets, inputs.num_tokens)
        if key is None or not self.can_replay or place == len(self._buckets):
            return body(inputs)
        bucket = self._buckets[place]
        captured = self._captures.find((key, bucket))
        if captured is None:
            if not self._captures.is_due((key, bucket)):
                return body(inputs)
            captured = self._capture(inputs, bucket, body)
            if captured is None:
                return body(inputs)
            self._captures.keep((key, bucket), captured)
        captured.inputs.take(inputs)
        self._before_run()
        captured.replay()
        self.num_replays += 1
        return tuple(output[: inputs.num_tokens] for output in captured.outputs)

    def begin_layer(self) -> None:
        """Does nothing: a graph's memory is the capture's own."""

    def close(self) -> None:
        self._captures.clear()

    def _capture(self, inputs: Any, bucket: int, body: Body[Any]) -> _CapturedStep | None:
        """Returns the captured body over static inputs, whose values it may have overwritten; None when it holds what
        cannot be captured, or there is no memory for it: then steps run eagerly from now on."""
        self._before_run()
        try:
            static = inputs.static(bucket)
            body(static)  # kernels are compiled, and what is made once per step's shape exists
            replay, outputs = self._capture_graph(lambda: body(static))
        except RuntimeError as error:
            self.can_replay = False
            self._captures.clear()
            log.warning("steps are not replayed, as one could not be captured: %s", error)
            return None
        return _CapturedStep(replay, static, outputs, body)
