"""First tokens on the engine over TimedRanks: what waiting for rows and for places on the device costs by itself.

The engine is the one that is measured, with its own rules of admission; only its ranks and its clock are not. Used by
lora_zipf.py, beside what it measures.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.timed_ranks import LoadTimes, StepTimes, TimedRanks
from benchmarks.service.trace_replay.trace import Arrival
from tandem.configs.schema import EngineSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import RESULT_WAIT_S
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.request import Ended, GenerationRequest, TokenDelta

IDLE_S = 0.001
"""The time that passes in a turn in which the engine waits for nothing but time."""


@dataclass(frozen=True)
class MeasuredEngine:
    """What ranks that were measured said of themselves, the pages of an adapter there, and the times of their steps."""

    settings: EngineSettings
    facts: ModelFacts
    ready: ExecutorReady
    pages: int
    times: StepTimes

    @property
    def places(self) -> int:
        """Adapters that the device has room for."""
        return self.ready.adapter_pages // self.pages

    def first_tokens_ms(self, warm: Sequence[Arrival], arrivals: Sequence[Arrival], seed: int = 0) -> list[float]:
        """Milliseconds to the first token of each arrival, after those that warm, if loads took no time."""
        ranks = TimedRanks(self.ready, self.times.again(seed), LoadTimes(self.pages))
        sink = FirstTokens(ranks)
        engine = build_engine(self.settings, self.facts, ranks, self.ready, sink, ranks.clock)
        run(engine, ranks, warm)
        begin_s = ranks.now_s
        run(engine, ranks, arrivals)
        return [1e3 * (sink.first_s[one.request.request_id] - begin_s - one.due_s) for one in arrivals]


class FirstTokens:
    """OutputSink that notes when each request had its first token, by the ranks' clock."""

    def __init__(self, ranks: TimedRanks) -> None:
        self._ranks = ranks
        self.first_s: dict[str, float] = {}

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.first_s.setdefault(delta.request_id, self._ranks.now_s)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None, ended


def run(engine: Engine, ranks: TimedRanks, arrivals: Sequence[Arrival]) -> None:
    """Runs every request to its end, as replay() does by the machine's clock."""
    begin_s = ranks.now_s
    coming = deque((begin_s + arrival.due_s, arrival.request) for arrival in arrivals)
    while coming or engine.has_work():
        while coming and coming[0][0] <= ranks.now_s:
            engine.add_request(coming.popleft()[1])
        before_s = ranks.now_s
        if not engine.has_work():
            ranks.poll(coming[0][0] - before_s)
        elif not engine.turn(RESULT_WAIT_S) and ranks.now_s == before_s:
            ranks.now_s += IDLE_S
