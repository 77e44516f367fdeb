"""RecordedEngine: an Engine that keeps what it is told, reads and answers on a Tape, so that it can be replayed.

The engine is a function of its calls (requests, aborts, turns, what comes from the rest of the cluster), the readings
of its clock and the messages of its ranks. All three pass here: calls as methods, the others as wrappers that
recorded_engine() gives to build_engine(). An engine that is not recorded has none of this.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import msgspec

from tandem.configs.schema import EngineSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.engine.live_requests import OnBegun, OutputSink
from tandem.workers.engine.recording.call_records import (
    BoundRow,
    CallRecord,
    ChargesInput,
    DrainInput,
    EngineInput,
    PinnedInput,
    RankMessage,
    RequestInput,
    ResetInput,
    TurnInput,
    WeightsInput,
    error_word,
)
from tandem.workers.engine.recording.state_codec import StateEncoder
from tandem.workers.engine.recording.tape import Tape
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest
from tandem.workers.messages.step import StepPlan
from tandem.workers.messages.transfer import TransferOp

log = logging.getLogger("tandem.engine")
STATE = [one.name for one in fields(Engine)]
"""The parts of an engine, which are its state."""
T = TypeVar("T")


class CallRecorder(StepObserver):
    """Takes down what the engine reads and gives in one call: as its clock, its Executor and an observer of steps."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self.is_open = False  # what is read outside of calls decides nothing
        self._bound: list[BoundRow] = []
        self._reset()

    def _reset(self) -> None:
        self._readings: list[float] = []
        self._polled: list[RankMessage | None] = []
        self._plans: list[StepPlan] = []
        self._ops: list[TransferOp] = []
        self._num_questions = 0

    def end(self, given: EngineInput, error: BaseException | None) -> CallRecord:
        """Ends a call, and returns its record."""
        self.is_open = False
        word = None if error is None else error_word(error)
        record = CallRecord(
            given, self._readings, self._polled, self._plans, self._ops, self._num_questions, self._bound, word
        )
        self._reset()
        if self._bound:
            self._bound = []
        return record

    # ---- the clock ----

    def read(self) -> float:
        """Returns the time, as the engine's clock."""
        now_s = self._clock()
        if self.is_open:
            self._readings.append(now_s)
        return now_s

    # ---- Executor ----

    def start(self) -> ExecutorReady:
        """Implements Executor."""
        return self._executor.start()

    def submit(self, plan: StepPlan) -> None:
        """Implements Executor."""
        self._plans.append(plan)
        self._executor.submit(plan)

    def transfer(self, op: TransferOp) -> None:
        """Implements Executor."""
        self._ops.append(op)
        self._executor.transfer(op)

    def count_experts(self) -> None:
        """Implements Executor."""
        self._num_questions += 1
        self._executor.count_experts()

    def poll(self, timeout_s: float) -> RankMessage | None:
        """Implements Executor."""
        message = self._executor.poll(timeout_s)
        self._polled.append(message)
        return message

    def close(self) -> None:
        """Implements Executor."""
        self._executor.close()

    # ---- StepObserver ----

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Implements StepObserver: notes whose the plan's new rows are."""
        if not plan.new_rows:
            return
        by_row = {seq.row: seq for seq in step.sequences}
        for init in plan.new_rows:
            seq = by_row[init.row]
            request = seq.state.request
            self._bound.append(BoundRow(request.request_id, request.attempt, seq.choice))


@dataclass(eq=False, kw_only=True)
class RecordedEngine(Engine):
    """An Engine on a tape."""

    recorder: CallRecorder
    tape: Tape
    begun: OnBegun
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder, init=False)
    _buffer: bytearray = field(default_factory=bytearray, init=False)

    def add_request(self, request: GenerationRequest) -> None:
        self._call(RequestInput(request), lambda: super(RecordedEngine, self).add_request(request))

    def abort(self, abort: Abort) -> None:
        self._call(abort, lambda: super(RecordedEngine, self).abort(abort))

    def reset_prefix_cache(self) -> bool:
        return self._call(ResetInput(), super().reset_prefix_cache)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self._call(WeightsInput({**weights}), lambda: super(RecordedEngine, self).set_weights(weights))

    def drain_charges(self) -> dict[str, float]:
        return self._call(DrainInput(), super().drain_charges)

    def merge_remote_charges(self, charges: Mapping[str, float]) -> None:
        self._call(ChargesInput({**charges}), lambda: super(RecordedEngine, self).merge_remote_charges(charges))

    def set_pinned_adapters(self, refs: Iterable[AdapterRef]) -> None:
        pinned = list(refs)  # a set has another order in another process
        self._call(PinnedInput(pinned), lambda: super(RecordedEngine, self).set_pinned_adapters(pinned))

    def turn(self, timeout_s: float) -> bool:
        if self.tape.is_due:
            self._begin_segment()
        recorder, error = self.recorder, None
        recorder.is_open = True
        try:
            return super().turn(timeout_s)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._write(recorder.end(TurnInput(timeout_s), error))

    # ---- inside ----

    def _call(self, given: EngineInput, run: Callable[[], T]) -> T:
        if self.tape.is_due:
            self._begin_segment()
        recorder, error = self.recorder, None
        recorder.is_open = True
        try:
            return run()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._write(recorder.end(given, error))

    def _write(self, record: CallRecord) -> None:
        if self.tape.is_off:
            return
        try:
            self._encoder.encode_into(record, self._buffer)
            self.tape.append(self._buffer)
        except Exception as error:
            self._give_up(error)

    def _begin_segment(self) -> None:
        try:
            self.tape.begin(self._state())
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Goes on without the recorder: whatever is wrong with it, the requests have nothing to do with it."""
        log.error("nothing is recorded any more: %s: %s", type(error).__name__, error)
        self.tape.switch_off()

    def _state(self) -> bytes:
        outside = {
            "ranks": self.recorder,
            "sink": self.sink,
            "clock": self.clock,
            "begun": self.begun,
        }
        if self.step_log is not None:
            outside["step_log"] = self.step_log
        return StateEncoder(outside).encode({name: getattr(self, name) for name in STATE})


def recorded_engine(
    settings: EngineSettings,
    facts: ModelFacts,
    executor: Executor,
    ready: ExecutorReady,
    sink: OutputSink,
    clock: Callable[[], float],
    on_begun: OnBegun,
    tape: Tape,
) -> RecordedEngine:
    """Returns what build_engine() does, recorded on a tape."""
    recorder = CallRecorder(executor, clock)
    read = recorder.read  # one object: parts of the engine share it
    built = build_engine(settings, facts, recorder, ready, sink, read, on_begun)
    if built.step_log is not None:
        built.step_log.clock = clock  # not on the tape: a replay writes no log, and would read less
    parts = {one.name: getattr(built, one.name) for one in fields(Engine) if one.init}
    parts["observers"] = (*built.observers, recorder)
    return RecordedEngine(**parts, recorder=recorder, tape=tape, begun=on_begun)
