"""States of an engine: what is shared, circular and ordered stays so, and bytes of somebody else run nothing."""

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import harness, request

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.recording.recorded_engine import STATE
from tandem.workers.engine.recording.replay import RecordedRanks, engine_of, outside_of
from tandem.workers.engine.recording.state_codec import REFERENCE, StateEncoder, StateError, decode_state
from tandem.workers.engine.recording.tape import PARTS, Tape, calls_of
from tests.support.engine_invariants import check_invariants


def again(value: Any, outside: dict[str, object] | None = None) -> Any:
    return decode_state(StateEncoder(outside or {}).encode(value), outside or {})


def test_containers_keep_kind_order_and_what_they_share() -> None:
    shared = [1, 2.5, None, b"x", "y", True]
    value: dict[Any, Any] = {
        "list": [shared, shared],
        3: OrderedDict(b=shared, a=1),
        "deque": deque([shared, 2], maxlen=5),
        "count": Counter({"b": 2, "a": 1}),
        "default": defaultdict(int, x=1),
        "set": {1, 2},
        "range": range(1, 9, 2),
        ("tuple", Blocker.KV): frozenset({4}),
        "big": 2**63 - 1,
    }
    value["self"] = value
    found = again(value)
    assert [*found] == [*value] and found["self"] is found
    assert found["list"][0] is found["list"][1] is found[3]["b"] is found["deque"][0]
    assert found["list"][0] == shared and found["deque"].maxlen == 5 and list(found[3]) == ["b", "a"]
    for name in ("count", "default", "set", "range", ("tuple", Blocker.KV), "big"):
        assert found[name] == value[name] and type(found[name]) is type(value[name])
    found["default"]["new"] += 1


def test_objects_are_made_without_constructors_and_methods_are_theirs() -> None:
    histogram, outside = Histogram((1.0, 2.0)), object()
    histogram.observe(1.5)
    heard = list[str]()
    value = [histogram, histogram.observe, Awaited(Blocker.KV, 7), heard, heard.append, outside]
    found = again(value, {"clock": outside})
    found[1](0.5)
    assert found[0].counts == [1, 1, 0] and found[2] == value[2] and found[5] is outside
    found[4]("x")
    assert found[3] == ["x"] and not heard


def test_an_engine_goes_on_from_its_state_as_itself() -> None:
    """It holds its invariants, and the same objects are shared: blocks, queue and counters are of one engine."""
    h = harness(num_blocks=16, asynchronous=True)
    for name in "abcdef":
        h.add(request(name, 14, 12, n=2))
    for _ in range(7):
        h.step()
    sink, clock = h.engine.sink, h.engine.clock
    outside = {"ranks": h.executor, "sink": sink, "clock": clock, "begun": h.engine.requests._on_begun}
    state = StateEncoder(outside).encode({name: getattr(h.engine, name) for name in STATE})
    other = engine_of(state, outside_of(RecordedRanks()))
    check_invariants(other)
    assert other.scheduler.waiting is other.grammars._waited.waiting and other.manager is other.scheduler._manager
    assert other.stats().used_blocks == h.engine.stats().used_blocks > 0
    assert [step.step_id for step in other.in_flight_steps] == [step.step_id for step in h.engine.in_flight_steps]


def state_of(node: list[Any], shapes: list[list[str]] | None = None) -> bytes:
    return msgspec.msgpack.encode([shapes or [], [node]])


NODE_0 = msgspec.msgpack.Ext(REFERENCE, bytes(4))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([[], [["list", [msgspec.msgpack.Ext(REFERENCE, b"\0\0\0\7")], None]]]),
        state_of(["global", "os:system"]),
        state_of(["global", "tandem.offload.kv.disk_io:remove_block"]),
        state_of(["global", "tandem.workers.engine.engine:os"]),
        state_of(["global", "tandem.workers.engine.build_engine:_step_log"]),
        state_of(["global", "tandem.workers.engine.recording.recording_file:_remove_old"]),
        state_of(["class", 0, []], [["subprocess:Popen"]]),
        state_of(["class", 0, []], [["tandem.offload.kv.disk_tier:Path"]]),
        state_of(["class", 0, []], [["tandem.workers.engine.engine:deque"]]),
        msgspec.msgpack.encode([[], [["path", "kept"], ["method", NODE_0, "unlink"]]]),
        msgspec.msgpack.encode([[], [["stack"], ["method", NODE_0, "callback"]]]),
        msgspec.msgpack.encode([[], [["list", [], None], ["method", NODE_0, "clear"]]]),
        state_of(["tuple", [NODE_0], None]),
        state_of(["class", 0, []], [["tandem.workers.engine.engine:gone"]]),
        state_of(["tuple of", "tandem.workers.engine.observers.step_log:StepLog", ["written"]]),
        state_of(["enum", "tandem.workers.engine.engine:Engine", "turn"]),
        state_of(["message", "tandem.workers.messages.request:Abort", b"no"]),
        state_of(["message", "tandem.workers.engine.recording.tape:Tape", msgspec.msgpack.encode({"max_bytes": 9})]),
        state_of(["outside", "secrets"]),
        state_of(["eval", "1"]),
    ],
)
def test_bytes_that_are_no_state_are_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError):
        decode_state(data, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [[], {}, dict.fromkeys([*STATE[1:], "former"])])
def test_a_state_of_other_parts_is_another_versions(parts: object) -> None:
    with pytest.raises(StateError, match="cannot be read: engines of this version are of other parts"):
        engine_of(StateEncoder({}).encode(parts), outside_of(RecordedRanks()))


def test_what_no_state_may_have_is_named() -> None:
    with pytest.raises(StateError, match="cannot be part of a recording"):
        StateEncoder({}).encode([lambda: None])


def test_a_tape_takes_its_last_segments_and_its_memory_again() -> None:
    tape = Tape(4000)
    for number in range(PARTS + 2):
        assert tape.is_due
        tape.begin(b"state %d" % number)
        count = 0
        while not tape.is_due:
            tape.append(bytearray(b"%d-%d" % (number, count)) * 20)
            count += 1
    whole, last = tape.take(), tape.take(1)
    assert whole is not None and last is not None
    assert whole.state == b"state 2" and not whole.is_whole and last.state == b"state 4"
    assert whole.calls[-1] == last.calls[-1] and len(last.calls) < len(whole.calls)
    assert whole.calls[0] == b"2-0" * 20 and calls_of(bytearray()) == []
    long = Tape(400)
    long.begin(b"")
    long.append(bytearray(b"x" * (2**20 + 2**17)))
    copy = long.take()
    assert copy is not None and copy.calls == [b"x" * (2**20 + 2**17)] and copy.is_whole
