"""Graphs on CPUs: decode steps with the same key replay captured kernel calls.

Steps of one key call the same kernels on the same memory; only the inputs differ, which are copied to the captured
ones. Replay skips the Python between the kernels (workers/kernels/cpu/cpu_calls.py). Adapters are part of a key, as
their kernels take the tokens of each from the host. Steps of layers with other operations than kernels, views and
copies are not replayed.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from tandem.workers.graphs.graph_runner import Body, Captures, I, Outputs
from tandem.workers.kernels.cpu.cpu_calls import Arena, Capture, capturing

log = logging.getLogger(__name__)
MAX_ROWS = 64
MAX_CAPTURES = 64
RUNS_BEFORE_CAPTURE = 3
"""Steps of a graph key that run before one is captured: a capture takes as long as about three replays save."""


class CapturedStep(NamedTuple):
    """A captured step: its calls, the memory of its inputs and results, and its body, which holds the cache."""

    calls: Capture
    inputs: Any
    outputs: Outputs
    body: object


class CpuGraphs:
    """The GraphRunner. before_run: is called before a step that is captured or replayed."""

    def __init__(self, before_run: Callable[[], None], can_replay: bool) -> None:
        self._before_run = before_run
        self.can_replay = can_replay
        self.num_replays = 0
        self._arena = Arena()
        self._is_capturing = False
        self._captures = Captures[CapturedStep](MAX_CAPTURES, RUNS_BEFORE_CAPTURE)

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        if key is None or not self.can_replay or inputs.num_tokens > MAX_ROWS:
            return body(inputs)
        key = (key, inputs.num_tokens, torch.get_num_threads())
        captured = self._captures.find(key)
        if captured is not None:
            return self._replay(captured, inputs)
        return self._capture(key, inputs, body) if self._captures.is_due(key) else body(inputs)

    def begin_layer(self) -> None:
        if self._is_capturing:
            self._arena.turn()

    def close(self) -> None:
        self._captures.clear()

    def _capture(self, key: Hashable, inputs: I, body: Body[I]) -> Outputs:
        static: Any = inputs.static()
        self._before_run()
        self._is_capturing = True
        try:
            with capturing(self._arena) as calls:
                outputs = body(static)
        finally:
            self._is_capturing = False
        if calls.is_whole:
            self._captures.keep(key, CapturedStep(calls, static, outputs, body))
        else:
            self.can_replay = False
            log.info("decode steps are not replayed: a layer contains operations that cannot be captured")
        return outputs

    def _replay(self, captured: CapturedStep, inputs: I) -> Outputs:
        captured.inputs.take(inputs)
        self._before_run()
        captured.calls.replay()
        self.num_replays += 1
        return captured.outputs
