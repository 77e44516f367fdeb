"""Recorded engines replay to the same plans: from their beginning or from any state, with ids and without."""

import random
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import harness, request
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_loads import MODES, calls_of_copy, load, recorded_harness

from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.engine.adapters.adapter_state import Adapter
from tandem.workers.engine.base.arrivals import digest_of
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.recording.call_records import CallRecord, RequestInput
from tandem.workers.engine.recording.recorded_engine import RecordedEngine, recorded_engine
from tandem.workers.engine.recording.redaction import redacted
from tandem.workers.engine.recording.replay import replay
from tandem.workers.engine.recording.state_codec import StateError
from tandem.workers.engine.recording.tape import Tape, TapeCopy
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.step import StepResult
from tandem.workers.messages.transfer import DropGrammar, Failure

SECRET = b"a key of this test"


class OftenTape(Tape):
    """A tape that begins a segment once it has so many calls, however long its state is."""

    def __init__(self, calls: int) -> None:
        super().__init__(2**16)
        self._calls, self._left = calls, 0

    @property
    def is_due(self) -> bool:
        return self._left == 0 and not self.is_off

    def begin(self, state: bytes) -> None:
        super().begin(state)
        self._left = self._calls

    def append(self, call: bytearray) -> None:
        super().append(call)
        self._left -= 1


def recorded(seed: int, mode: str, tape: Tape, num_requests: int = 40) -> TapeCopy:
    rng = random.Random(seed)
    load(recorded_harness(rng, tape, MODES[mode]), rng, num_requests)
    copy = tape.take()
    assert copy is not None
    return copy


def assert_replays(copy: TapeCopy) -> None:
    for each in (copy, redacted(copy, SECRET)):
        calls = calls_of_copy(each)
        report = replay(each.state, calls)
        assert report.difference is None, report.difference
        assert report.num_calls == len(calls) and report.num_steps == sum(len(call.plans) for call in calls)


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_load_replays_from_the_beginning(mode: str) -> None:
    copy = recorded(5, mode, Tape(2**24))
    calls = calls_of_copy(copy)
    assert copy.is_whole and sum(len(call.plans) for call in calls) > 150
    assert_replays(copy)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(sorted(MODES)), calls=st.integers(1, 60))
def test_a_tape_that_has_lost_its_beginning_replays(seed: int, mode: str, calls: int) -> None:
    """The state of the engine in the middle of everything is enough."""
    copy = recorded(seed, mode, OftenTape(calls), num_requests=25)
    assert not copy.is_whole or len(copy.calls) <= 4 * calls
    assert_replays(copy)


def test_a_small_tape_wraps_and_keeps_the_last_steps() -> None:
    copies = []
    for tape in (Tape(60_000), Tape(2**24)):
        h = harness(build=lambda *parts, tape=tape: recorded_engine(*parts, tape))
        for i in range(30):
            h.add(request(f"r{i}", 5, 20), request(f"s{i}", 5, 20))
            h.run()
        copy = tape.take()
        assert copy is not None
        copies.append(copy)
    small, whole = copies
    assert whole.is_whole and not small.is_whole
    assert small.calls == whole.calls[-len(small.calls) :], "the end of the whole recording"
    assert 30_000 < sum(map(len, small.calls)) < 80_000
    assert_replays(small)


def test_a_defect_of_the_scheduler_shows_as_the_first_different_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tenant's requests the last to come is admitted first: the plan that shows it is named, and whose rows."""
    copy = recorded(8, "plain", Tape(2**24))
    calls = calls_of_copy(copy)

    def place(seq: Sequence) -> tuple[int, bool, int, int]:
        return seq.order[0], seq.bound_step == 0, -seq.order[1], seq.order[2]

    monkeypatch.setattr("tandem.workers.engine.waiting.arrival_queue._place", place)
    for each in (copy, redacted(copy, SECRET)):
        report = replay(each.state, calls_of_copy(each))
        assert report.difference is not None and 0 < report.num_calls < len(calls)
        where, recorded_words, replayed_words = report.difference.splitlines()
        assert re.match(r"call \d+ \(turn\): step \d+, new_rows.*\(row \d: request r\d+, choice \d\)", where), where
        assert recorded_words.startswith("  recorded: ") and replayed_words.startswith("  replayed: ")
        assert recorded_words[12:] != replayed_words[12:]


def test_a_redacted_recording_has_no_token_of_anybody() -> None:
    """Prompts, answers, grammars and adapters' sources of a marked load are nowhere in the bytes; nor are true keys
    of blocks."""
    rng, tape = random.Random(3), Tape(2**24)
    h = recorded_harness(rng, tape, MODES["plain"])
    load(h, rng, 30)
    copy = tape.take()
    assert copy is not None
    hidden = redacted(copy, SECRET)
    blob = b"".join((hidden.state, *hidden.calls))
    for word in (b"sober", b"strict", b"pepper", b"password"):
        assert word in b"".join(copy.calls) and word not in blob
    keys = [key for key in h.engine.manager.pool._keys if key is not None]
    assert keys and not any(key in blob for key in keys)
    tokens = {token for call in calls_of_copy(hidden) for token in _tokens(call)}
    assert {token for token in tokens if token < 2**32} <= {0, 1}, "a small number is a token id"
    assert len(tokens) > 20, "blocks have hashes"
    assert redacted(copy, b"another key").calls != hidden.calls


def test_a_grammar_that_the_engine_has_forgotten_is_hidden_too() -> None:
    """A digest is a plain hash, by which anybody could try out a grammar."""
    tape = OftenTape(10**6)
    h = harness(build=lambda *parts: recorded_engine(*parts, tape))
    h.executor.grammars.refuses = lambda text: Failure("content", f"{text} is wrong")
    h.add(request("a", 9, 4, grammar="a client's grammar"))
    h.run()
    h.engine.grammars._waited.start(DropGrammar(digest=digest_of("one that was dropped")))
    assert isinstance(h.engine, RecordedEngine) and h.engine.grammars._refused and not h.engine.grammars.texts()
    hidden = redacted(TapeCopy(h.engine._state(), [], False), SECRET)
    for text in ("a client's grammar", "one that was dropped"):
        assert text.encode() not in hidden.state and digest_of(text).encode() not in hidden.state
    assert replay(hidden.state, []).difference is None


def _tokens(call: CallRecord) -> list[int]:
    found = [token for plan in call.plans for row in (*plan.new_rows, *plan.work) for token in row.token_ids]
    found += [t for plan in call.plans for row in plan.new_rows for t in row.sampling.stop_token_ids]
    for answer in call.polled:
        if isinstance(answer, StepResult):
            found += [token for row in answer.rows for token in (*row.token_ids, *row.draft_ids)]
    if isinstance(call.input, RequestInput):
        request = call.input.request
        found += [*request.prompt_token_ids, *(t for one in request.resume_token_ids for t in one)]
        found += request.sampling.stop_token_ids
    return found


def test_the_end_of_a_lost_group_is_on_the_tape() -> None:
    """The turn in which the ranks were lost is the last call, with its plans; the replay ends in the same way."""
    rng, tape = random.Random(4), Tape(2**24)
    h = recorded_harness(rng, tape, MODES["plain"])
    load(h, rng, 5)
    ranks = h.executor.poll
    h.add(request("last", 9, 40))
    for _ in range(4):
        h.step()

    def poll(timeout_s: float) -> Any:
        raise GroupLost("rank 0 has died")

    h.executor.poll = poll  # type: ignore[method-assign]
    with pytest.raises(GroupLost):
        h.engine.turn(0.0)
    h.executor.poll = ranks  # type: ignore[method-assign]
    copy = tape.take()
    assert copy is not None
    last = calls_of_copy(copy)[-1]
    assert last.error == "GroupLost"
    assert_replays(copy)


def test_what_is_read_outside_of_calls_is_not_on_the_tape() -> None:
    rng, tape = random.Random(4), Tape(2**24)
    h = recorded_harness(rng, tape, MODES["plain"])
    h.add(request("a", 9, 40))
    assert isinstance(h.engine, RecordedEngine)
    for _ in range(5):
        assert h.engine.idle_s >= 0.0
        h.engine.stats(), h.engine.losses(), h.engine.adapter_residency()
        h.step()
    copy = tape.take()
    assert copy is not None
    assert_replays(copy)


def test_an_engine_with_a_step_log_replays(tmp_path: Path) -> None:
    """The log reads a clock too, and a replay writes none."""
    tape = Tape(2**20)
    h = harness(build=lambda *parts: recorded_engine(*parts, tape), step_log=str(tmp_path / "steps"))
    h.add(request("a", 9, 12), request("b", 5, 20))
    h.run()
    copy = tape.take()
    assert copy is not None and (tmp_path / "steps").stat().st_size
    assert_replays(copy)


QUERIES = {"has_work", "is_copying", "idle_s", "in_flight_steps", "stats", "max_len", "losses", "adapter_residency"}
OF_TURNS = {"flush_transfers"}
OF_NO_STATE = {"close"}


def test_every_method_that_changes_an_engine_is_recorded() -> None:
    """A new one has to be recorded, or to be named here as one that changes nothing."""
    public = {name for name in vars(Engine) if not name.startswith("_")} - {one.name for one in fields(Engine)}
    assert public == QUERIES | OF_TURNS | OF_NO_STATE | {name for name in vars(RecordedEngine) if name in public}


@pytest.mark.parametrize("part", ["_state", "_encoder"])
def test_a_recorder_that_fails_costs_no_request(part: str, caplog: pytest.LogCaptureFixture) -> None:
    rng, tape = random.Random(4), OftenTape(20)
    h = recorded_harness(rng, tape, MODES["plain"])
    load(h, rng, 3)

    class Broken:
        def __call__(self) -> bytes:
            raise StateError("it cannot be encoded")

        def encode_into(self, *unused: object) -> None:
            raise OverflowError("it cannot be encoded")

    setattr(h.engine, part, Broken())
    h.add(request("late", 9, 40))
    h.run()
    assert h.sink.reasons["late", 0] == "length" and tape.take() is None
    assert caplog.text.count("nothing is recorded any more") == 1


def test_a_record_survives_its_encoding() -> None:
    copy = recorded(1, "plain", Tape(2**24), num_requests=6)
    for call in copy.calls:
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(call, type=CallRecord)) == call


def test_who_uses_an_adapter_is_asked_in_the_order_of_rows() -> None:
    """A set's order is that of addresses, which no recording has."""
    adapter = Adapter(AdapterRef(name="a", digest="a", source="a"))
    h = harness(max_num_queued_reqs=100)
    h.add(*(request(f"r{i}", 3) for i in range(40)))
    states = list(h.engine.requests)
    for state in states:
        adapter.users[state] = None
    assert [seq.state for seq in adapter.used_by()] == states


def test_what_is_forgotten_frees_its_slots_in_order() -> None:
    """A set's order is that of hashes with the process's own seed."""
    tier = HostTier(40, make_policy("lru"))
    keys = [bytes([i]) * 16 for i in range(40)]
    for key in keys:
        tier.prepare_store(key, 1.0)
        tier.complete_store(key)
    slots = [tier.slot(key) for key in keys]
    h = harness()
    manager, costs = h.engine.manager, CopyCosts(1.0)
    transfers = TransferManager(lambda op: None, 1, h.clock)
    table = manager.new_table(None, "")
    table.keys += keys
    KVOffload(manager, TieredStore(tier), transfers, costs, h.clock).forget(table)
    assert [tier.prepare_store(key[:8], 1.0) for key in keys] == slots[::-1]
