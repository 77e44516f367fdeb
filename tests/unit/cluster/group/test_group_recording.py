"""A group's recorder: its file, what a signal, a loss and an operator's order bring, and a disk that is full."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_events import GroupEvent
from tandem.cluster.fleet.recording_orders import RecordingFollower, order_recording
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.group.coordinator import Coordinator
from tandem.cluster.group.group_recording import GroupRecording, SignalPipe
from tandem.cluster.logs.log_files import LogPlace
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.schema import EngineSettings, ModelSettings, RecordMode
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.recording.recorded_engine import RecordedEngine
from tandem.workers.engine.recording.recording_file import read_recording
from tandem.workers.engine.recording.replay import Silence, replay
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tests.support.fake_group import FakeFleet, FakeHandle
from tests.support.no_ranks import NoRanks
from tests.unit.gateway.rig import gateway

SETTINGS = EngineSettings(model=ModelSettings(model="none"))
FACTS = ModelFacts(1000, 1000, (1,), "none", "none")


def facts_of(folder: Path, record_mib: int = 1, record: RecordMode = "redacted") -> ServiceFacts:
    place = LogPlace(base=str(folder), run="run-1")
    (folder / "run-1").mkdir(exist_ok=True)
    return ServiceFacts(
        single_node=True, device="cpu", service_id="s", logs=place, record_mib=record_mib, record=record
    )


def worked(recording: GroupRecording, steps: int = 6) -> Engine:
    """An engine of this recorder that has computed some steps."""
    ranks = NoRanks(8, 64, 1, 0, False)
    engine = recording.engine(SETTINGS, FACTS, ranks, ranks.start(), Silence())  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=50)
    engine.add_request(GenerationRequest(request_id="r", prompt_token_ids=[77] * 40, sampling=sampling))
    for _ in range(steps):
        engine.turn(0.0)
    return engine


async def test_a_file_has_what_it_says_and_replays(tmp_path: Path) -> None:
    for mode in ("full", "redacted"):
        recording = GroupRecording(facts_of(tmp_path, record=mode), "g1", lambda: 1_800_000_000.25)
        assert isinstance(worked(recording), RecordedEngine)
        written = await recording.write()
        path = Path(written.file)
        assert (
            path.parent == tmp_path / "run-1" and path.name.startswith("group-g1-202") and path.suffix == ".recording"
        )
        header, state, calls = read_recording(path)
        assert (header.group, header.mode, header.num_calls, header.written_s) == ("g1", mode, 7, 1_800_000_000.25)
        assert written.num_bytes == path.stat().st_size and written.is_whole and header.num_blocks == 64
        report = replay(state, calls)
        assert report.difference is None and report.num_steps >= 6
        assert (bytes([77] * 40) in path.read_bytes()) is (mode == "full")


async def test_without_the_flag_nothing_is_recorded(tmp_path: Path) -> None:
    recording = GroupRecording(facts_of(tmp_path, record_mib=0), "g1")
    assert type(worked(recording)) is type(build_engine(SETTINGS, FACTS, *_ranks(), Silence()))
    assert msgspec.json.decode(await recording.answer()) == {
        "error": "this group records nothing; --record-mib was not given"
    }
    assert await recording.write_at_loss() == ""
    assert not list(tmp_path.rglob("*.recording"))


def _ranks() -> tuple[NoRanks, Any]:
    ranks = NoRanks(8, 64, 1, 0, False)
    return ranks, ranks.start()


async def test_a_loss_names_its_file_and_a_full_disk_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = GroupRecording(facts_of(tmp_path), "g1")
    worked(recording)
    words = await recording.write_at_loss()
    (path,) = tmp_path.rglob("*.recording")
    assert words == f"; its last steps are in {path}" and str(path) in caplog.text

    def full(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.workers.engine.recording.recording_file.os.replace", full)
    words = await recording.write_at_loss()
    assert words.startswith("; its last steps are lost: the recording ") and words.endswith("No space left on device")
    assert words.removeprefix("; its last steps are lost: ") in caplog.text
    assert "No space left" in msgspec.json.decode(await recording.answer())["error"]
    await recording.write_at_signal()
    assert [*tmp_path.rglob("*.recording*")] == [path]


async def test_a_lost_group_leaves_before_its_recording_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is sent to it in the seconds that it stays for the file; the word of its loss names that."""
    done, has_left, exits = list[str](), asyncio.Event(), list[int]()

    class Lost:
        _loop, _group = asyncio.get_running_loop(), "g1"
        _thread, _recording = SimpleNamespace(is_planned=False), SimpleNamespace()

        async def _leave(self) -> None:
            has_left.set()

        async def _write_event(self, event: GroupEvent) -> None:
            done.append(f"{event.kind}: {event.reason}")

    async def write() -> str:
        async with asyncio.timeout(10):
            await has_left.wait()
        return "; in a file"

    Lost._recording.write_at_loss = write
    monkeypatch.setattr("tandem.cluster.group.coordinator.os._exit", exits.append)
    await Coordinator._exit(Lost(), RuntimeError("a rank has died"))  # type: ignore[arg-type]
    assert done == ["lost: a rank has died; in a file"] and exits == [1]


async def test_what_is_wrong_with_a_recording_is_told_in_no_words_of_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = GroupRecording(facts_of(tmp_path), "g1")
    engine: Any = worked(recording)

    def broken(*unused: Any) -> None:
        raise KeyError("a client's text")

    monkeypatch.setattr("tandem.cluster.group.group_recording.redacted", broken)
    assert "KeyError in broken" in msgspec.json.decode(await recording.answer())["error"]
    await recording.write_at_signal()
    assert "KeyError in broken" in await recording.write_at_loss()
    assert caplog.text.count("KeyError in broken") == 2 and "client's" not in caplog.text
    engine.tape.switch_off()
    assert "has failed" in msgspec.json.decode(await recording.answer())["error"]
    assert not list(tmp_path.rglob("*.recording*"))


async def test_a_recording_that_takes_long_holds_no_lost_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, may_go_on = GroupRecording(facts_of(tmp_path), "g1"), threading.Event()
    worked(recording)
    monkeypatch.setattr("tandem.cluster.group.group_recording.LOST_S", 0.01)
    monkeypatch.setattr("tandem.cluster.group.group_recording.redacted", lambda *parts: may_go_on.wait(10))
    assert "was not written within" in await recording.write_at_loss()
    may_go_on.set()


async def test_a_signal_reads_no_thread_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand signals end a process with all_threads, which reads frames while their threads leave them."""
    asked = list[dict[str, Any]]()
    monkeypatch.setattr("faulthandler.register", lambda number, file, **options: asked.append(options))
    SignalPipe(asyncio.get_running_loop(), lambda: None).close()
    assert asked == [{"all_threads": False}]


async def test_signals_reach_the_loop_from_whatever_thread_it_runs_on() -> None:
    """pytest's loop is on the main thread; a replica's is not."""
    heard, loops = [], list[asyncio.AbstractEventLoop]()

    async def listen() -> None:
        loop, is_heard = asyncio.get_running_loop(), asyncio.Event()
        pipe = SignalPipe(loop, lambda: (heard.append(threading.current_thread().name), is_heard.set()))
        loops.append(loop)
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(is_heard.wait(), 10)
        finally:
            pipe.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), name="a replica")
    thread.start()
    await asyncio.to_thread(thread.join)
    assert heard == ["a replica"], "two signals at once are one call"


class OneList:
    """Redis with one list and values; `away`: it does not answer."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.values: dict[str, bytes] = {}
        self.away = False

    async def command(self, *parts: Any) -> Any:
        if self.away:
            raise RedisUnavailable("away")
        if parts[0] == "LRANGE":
            return list(self.entries)
        if parts[0] == "SET":
            assert parts[3:] == ("PX", keys.RECORDING_ANSWER_TTL_MS)
            self.values[parts[1]] = parts[2]
        return self.values.get(parts[1])

    async def pipeline(self, commands: list[Any]) -> list[Any]:
        if self.away:
            raise RedisUnavailable("away")
        self.entries.append(commands[0][2].encode())
        return [1] * len(commands)


async def test_an_order_reaches_its_group_once_and_brings_the_answer() -> None:
    redis, asked = OneList(), list[str]()

    def follower(group: str) -> RecordingFollower:
        async def write() -> bytes:
            asked.append(group)
            return b'{"file": "x"}'

        return RecordingFollower(redis, "s", group, write, Announcements())  # type: ignore[arg-type]

    first, second = follower("g1"), follower("g2")
    ordered = asyncio.create_task(order_recording(redis, "s", "g2"))  # type: ignore[arg-type]
    while not redis.entries:
        await asyncio.sleep(0)
    for each in (first, second, first, second):
        await each.look()
    assert await ordered == b'{"file": "x"}' and asked == ["g2"]
    assert await order_recording(redis, "s", "gone", timeout_s=0.02) is None  # type: ignore[arg-type]


class AnsweringFleet(FakeFleet):
    """A fleet of group g1 whose answer to an order is the test's."""

    def __init__(self) -> None:
        super().__init__({"g1": GroupRecord(group="g1", life=1, model="m", state="serving", host="n1", pid=1)})
        self.answer: bytes | None = b'{"file": "x", "mode": "full"}'

    async def order_recording(self, group: str) -> bytes | None:
        assert group == "g1"
        if self.answer == b"away":
            raise RedisUnavailable("away")
        return self.answer


async def test_what_an_operator_hears() -> None:
    fleet: Any = AnsweringFleet()
    handle: Any = FakeHandle([])
    dispatch = ServeDispatch(handle, fleet, "cd" * 32, "127.0.0.1", "tandem")
    try:
        assert await dispatch.record("g1") == {"group": "g1", "node": "n1", "file": "x", "mode": "full"}
        for group, answer, status, words in (
            ("g2", b"", 404, "no group 'g2'"),
            ("g1", b'{"error": "it is off"}', 409, "it is off"),
            ("g1", None, 503, "has not answered in time"),
            ("g1", b"away", 503, "because Redis"),
        ):
            fleet.answer = answer
            with pytest.raises(RequestRefused, match=words) as refused:
                await dispatch.record(group)
            assert refused.value.status == status
    finally:
        await dispatch.close()


async def test_the_route_needs_an_admin_key_and_takes_no_query() -> None:
    async with gateway(auth=StaticKeys(["user"], ["root"])) as rig:
        rig.backend.recordings["g1"] = {"group": "g1", "node": "n1", "file": "x"}
        path, key = "/admin/groups/g1/record", {"authorization": "Bearer root"}
        answer = await rig.client.post(path, headers=key)
        assert (answer.status_code, answer.json()["object"], answer.json()["file"]) == (200, "recording", "x")
        assert (await rig.client.post(path)).status_code == 401
        assert (await rig.client.post(path, headers={"authorization": "Bearer user"})).status_code == 403
        assert (await rig.client.post(f"{path}?full=1", headers=key)).status_code == 400
        assert (await rig.client.post("/admin/groups/g2/record", headers=key)).status_code == 404
