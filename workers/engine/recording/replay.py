"""Replay: the real engine again, over a recording in place of clock, inbox and ranks; its plans are compared.

    state -> Engine;  for each call: [ the same call -> plans, ops compared -> the same clock readings and answers ]

Nothing is computed: the ranks' answers are the recorded ones. With ranks beside it (ranks_beside.py) the plans are
computed too, and their token ids are compared.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import msgspec

from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.engine.recording.call_records import (
    CallRecord,
    ChargesInput,
    DrainInput,
    PinnedInput,
    RankMessage,
    RequestInput,
    ResetInput,
    TurnInput,
    WeightsInput,
    error_word,
)
from tandem.workers.engine.recording.difference import Difference, first_difference, words_of
from tandem.workers.engine.recording.state_codec import StateError, decode_state
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, TokenDelta
from tandem.workers.messages.step import StepPlan
from tandem.workers.messages.transfer import CopyKV, TransferOp


class Diverged(Exception):
    """The replay is not what was recorded; the words say where."""


class EndOfRecord(Exception):
    """A call goes on where the recorded one ended with an exception."""


class Beside(Protocol):
    """Ranks that carry out what a replay gives its own. Called in the order of the recording."""

    def submit(self, plan: StepPlan) -> None:
        """Called with each plan, once it was found equal."""
        ...

    def transfer(self, op: TransferOp) -> None:
        """Called with each op, once it was found equal."""
        ...

    def answered(self, message: RankMessage) -> str | None:
        """Called with each recorded answer, before the engine gets it. Returns what is different, in words."""
        ...


class ReplayReport(NamedTuple):
    """The findings of a replay. num_calls, num_steps: that were equal. difference: the first, in words."""

    num_calls: int
    num_steps: int
    difference: str | None


class Silence:
    """An OutputSink for nobody."""

    def deltas(self, deltas: list[TokenDelta]) -> None:
        del deltas

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        del ended, request

    def begun(self, request: GenerationRequest, cached_tokens: int) -> None:
        del request, cached_tokens


class _StepLogOfNobody(StepObserver):
    def close(self) -> None:
        """Has no file."""


class RecordedRanks(StepObserver):
    """The clock, the ranks and the observer that a recorded engine had, of one record at a time."""

    def __init__(self, beside: Beside | None = None) -> None:
        self.num_steps = 0
        self._beside = beside
        self._name_of: Callable[[int], str] = str
        self._record: CallRecord | None = None
        self._read = self._polled = self._planned = self._moved = self._asked = 0

    def begin(self, record: CallRecord, name_of: Callable[[int], str]) -> None:
        """Begins a call. name_of: says whose a row is."""
        self._record, self._name_of = record, name_of
        self._read = self._polled = self._planned = self._moved = self._asked = 0

    @property
    def _now(self) -> CallRecord:
        assert self._record is not None
        return self._record

    def end(self) -> None:
        """Ends a call. Diverged if it took less than the recorded one."""
        record = self._now
        counts = {
            "plans": (len(record.plans), self._planned),
            "ops of transfers": (len(record.ops), self._moved),
            "questions for experts": (record.num_questions, self._asked),
            "looks at the ranks": (len(record.polled), self._polled),
            "readings of the clock": (len(record.clock), self._read),
        }
        for what, (recorded, replayed) in counts.items():
            if recorded != replayed:
                steps = ", ".join(f"step {plan.step_id}" for plan in record.plans[replayed:]) if what == "plans" else ""
                raise Diverged(f"{what}{f' ({steps})' * bool(steps)}\n  recorded: {recorded}\n  replayed: {replayed}")

    # ---- the clock ----

    def read(self) -> float:
        """Returns the recorded reading."""
        if self._record is None:
            return 0.0
        readings = self._record.clock
        if self._read >= len(readings):
            raise self._too_many("readings of the clock", len(readings))
        self._read += 1
        return readings[self._read - 1]

    # ---- Executor ----

    def start(self) -> ExecutorReady:
        raise AssertionError("a replay has no ranks to start")

    def submit(self, plan: StepPlan) -> None:
        """Implements Executor."""
        plans = self._now.plans
        if self._planned >= len(plans):
            shown = f"step {plan.step_id}, rows {[work.row for work in plan.work]}"
            raise Diverged(f"a plan more than was recorded ({shown})\n  recorded: {len(plans)}\n  replayed: {shown}")
        recorded = plans[self._planned]
        if found := first_difference(recorded, plan):
            raise Diverged(words_of(f"step {recorded.step_id}", found, self._name_of))
        self._planned += 1
        self.num_steps += 1
        if self._beside is not None:
            self._beside.submit(plan)

    def transfer(self, op: TransferOp) -> None:
        """Implements Executor."""
        ops = self._now.ops
        recorded = _in_order(ops[self._moved]) if self._moved < len(ops) else None
        if recorded != _in_order(op):
            found = first_difference(recorded, _in_order(op)) or Difference("", repr(recorded), repr(op))
            raise Diverged(words_of(f"ticket {op.ticket} ({type(op).__name__})", found, self._name_of))
        self._moved += 1
        if self._beside is not None:
            self._beside.transfer(op)

    def count_experts(self) -> None:
        """Implements Executor."""
        self._asked += 1

    def poll(self, timeout_s: float) -> RankMessage | None:
        """Implements Executor."""
        polled = self._now.polled
        if self._polled >= len(polled):
            raise self._too_many("looks at the ranks", len(polled))
        message = polled[self._polled]
        self._polled += 1
        if message is not None and self._beside is not None and (wrong := self._beside.answered(message)):
            raise Diverged(wrong)
        return message

    def close(self) -> None:
        """Implements Executor."""

    def _too_many(self, what: str, recorded: int) -> Exception:
        if self._now.error is not None:
            return EndOfRecord(self._now.error)
        return Diverged(f"{what}\n  recorded: {recorded}\n  replayed: more")


def _in_order(op: TransferOp) -> TransferOp:
    """Returns an op whose lists are compared in any order where the order says nothing."""
    return msgspec.structs.replace(op, dropped=sorted(op.dropped)) if isinstance(op, CopyKV) else op


def outside_of(ranks: RecordedRanks) -> Mapping[str, object]:
    """Returns what a recorded state has been left without, over recorded ranks."""
    sink = Silence()
    return {
        "ranks": ranks,
        "sink": sink,
        "clock": ranks.read,
        "begun": sink.begun,
        "step_log": _StepLogOfNobody(),
    }


def engine_of(state: bytes, outside: Mapping[str, object]) -> Engine:
    """Returns the engine of a recorded state. StateError for bytes that are none, or that of another version's."""
    engine: Engine = object.__new__(Engine)
    parts: Any = decode_state(state, outside)
    here = {one.name for one in fields(Engine)}
    if type(parts) is not dict or parts.keys() != here:
        others = here.symmetric_difference(parts) if type(parts) is dict else here
        words = f"engines of this version are of other parts ({', '.join(sorted(map(str, others)))})"
        raise StateError(f"the state of the engine in the recording cannot be read: {words}")
    for name, part in parts.items():
        setattr(engine, name, part)
    return engine


def replay(state: bytes, calls: Iterable[CallRecord], beside: Beside | None = None) -> ReplayReport:
    """Replays calls from a state on, up to the first difference."""
    ranks, num_calls = RecordedRanks(beside), 0
    engine = engine_of(state, outside_of(ranks))
    for record in calls:
        ranks.begin(record, lambda row: _whose(engine, row))
        try:
            error = _run(engine, record)
            ranks.end()
            if error != record.error:
                raise Diverged(f"how the call ended\n  recorded: {record.error}\n  replayed: {error}")
        except Diverged as found:
            what = type(record.input).__name__.removesuffix("Input").lower()
            return ReplayReport(num_calls, ranks.num_steps, f"call {num_calls} ({what}): {found}")
        num_calls += 1
    return ReplayReport(num_calls, ranks.num_steps, None)


def _run(engine: Engine, record: CallRecord) -> str | None:
    """Makes one call; returns the word for the exception that it ended with."""
    try:
        _call(engine, record)
    except Diverged:
        raise
    except EndOfRecord as end:
        return str(end)
    except Exception as error:
        if error_word(error) != record.error:
            raise Diverged(
                f"{type(error).__name__}: {error}\n  recorded: {record.error}\n  replayed: it ended"
            ) from error
        return record.error
    return None


def _call(engine: Engine, record: CallRecord) -> None:
    given = record.input
    match given:
        case TurnInput(timeout_s=timeout_s):
            engine.turn(timeout_s)
        case RequestInput(request=request):
            engine.add_request(request)
        case Abort():
            engine.abort(given)
        case ResetInput():
            engine.reset_prefix_cache()
        case WeightsInput(weights=weights):
            engine.set_weights(weights)
        case DrainInput():
            engine.drain_charges()
        case ChargesInput(charges=charges):
            engine.merge_remote_charges(charges)
        case PinnedInput(adapters=adapters):
            engine.set_pinned_adapters(adapters)


def _whose(engine: Engine, row: int) -> str:
    """Returns whose a row is in the replay, in words."""
    for state in engine.requests:
        for seq in state.sequences:
            if seq.row == row:
                return f"request {state.request.request_id}, choice {seq.choice}"
    return "of no request"
