"""The line that shows how far the weights are loaded: on a terminal only, over itself, and gone afterwards."""

import asyncio
import io

import pytest

from tandem.cluster.fleet.fleet_view import GroupRecord, GroupState, bytes_of, group_heartbeat
from tandem.cluster.fleet.group_reports import GroupReport, ReportWriter
from tandem.cluster.process.load_progress import LoadProgress, wipe
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.service.launcher import Console
from tandem.cluster.service.serve_app import ServeApp
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.load import build_settings

GIB = 2**30


class Screen(io.StringIO):
    """What is written, and what a user sees of it."""

    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def lines(self) -> list[str]:
        """As a terminal shows them: each part after a carriage return lies over what was there."""
        seen = []
        for written in self.getvalue().split("\n"):
            line = ""
            for part in written.split("\r"):
                line = part + line[len(part) :]
            seen.append(line.rstrip())
        return seen


def record(group: str, loaded: int, total: int, state: GroupState = "loading") -> GroupRecord:
    return GroupRecord(
        group=group, life=1, model="m", state=state, host="h", pid=1, loaded_bytes=loaded, total_bytes=total
    )


def test_the_line_is_drawn_over_itself_and_goes_when_all_is_loaded() -> None:
    screen, now_s = Screen(), 100.0
    line = LoadProgress(screen, lambda: now_s)
    line.show(0, 0)
    assert screen.getvalue() == ""
    line.show(GIB, 4 * GIB)
    assert screen.lines[0].startswith("tandem: loading weights:  25%|") and "1.07G/4.29G [00:00" in screen.lines[0]
    now_s += 10
    line.show(3 * GIB, 4 * GIB)
    assert "75%" in screen.lines[0] and "3.22G/4.29G [00:10<00:05, 215MB/s]" in screen.lines[0]
    assert screen.getvalue().endswith("\r"), "what is typed lies on it"
    line.show(4 * GIB, 4 * GIB)
    assert screen.lines == [""]


def test_the_line_is_not_drawn_again_while_nothing_is_new() -> None:
    screen = Screen()
    line = LoadProgress(screen, lambda: 0.5)
    for _ in range(3):
        line.show(1, 4)
    assert screen.getvalue().count("25%") == 1
    line.clear()
    line.clear()
    assert screen.lines == [""]
    line.show(1, 4)
    assert "25%" in screen.lines[0]


def test_no_terminal_no_line() -> None:
    screen = Screen(terminal=False)
    line = LoadProgress(screen)
    line.show(1, 4)
    line.clear()
    wipe(screen)
    assert screen.getvalue() == ""


def test_what_a_terminal_echoes_goes_with_the_line() -> None:
    screen = Screen()
    LoadProgress(screen, lambda: 0.0).show(1, 4)
    screen.write("^C")
    assert screen.lines[0].startswith("^Cndem: loading")
    wipe(screen)
    assert screen.lines == [""], "by another process, which does not know how long it is"


def test_a_terminal_that_is_gone_stops_nothing() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    line = LoadProgress(Gone())
    line.show(1, 4)
    line.clear()


def test_what_is_said_is_said_on_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sys.stdout", screen)
    console = Console()
    console.loading.show(1, 4)
    console.print_line("the private Redis server died")
    assert screen.lines == ["tandem: the private Redis server died", ""]
    console.loading.show(2, 4)
    assert "50%" in screen.lines[1]


def test_groups_that_have_not_said_yet_have_as_much_to_load_as_others() -> None:
    assert bytes_of([], 2) == (0, 0)
    assert bytes_of([record("a", 0, 0), record("b", 0, 0)], 2) == (0, 0)
    assert bytes_of([record("a", 3, 10)], 2) == (3, 20)
    assert bytes_of([record("a", 3, 10), record("b", 0, 0)], 2) == (3, 20)
    assert bytes_of([record("a", 10, 10, "serving"), record("b", 4, 10)], 2) == (14, 20)
    assert bytes_of([record(group, 5, 10) for group in "abc"], 2) == (15, 30), "more were started than were waited for"


async def test_who_waits_for_the_groups_is_told_what_they_say(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(app: ServeApp, redis: BackgroundClient) -> bool:
        return True

    monkeypatch.setattr(ServeApp, "_gateways_answer", answer)
    monkeypatch.setattr(ServeApp, "_raise_serve_failure", lambda app: None)
    facts = ServiceFacts(service_id="s", single_node=True, device="cpu", redis_url=server.url)
    app = ServeApp(build_settings("m", {"data_parallel_size": 2}), facts, private=True)
    told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    waiting = asyncio.create_task(app._wait_until_ready(lambda: None, lambda *said: told.put_nowait(said)))
    redis = BackgroundClient(server.url)
    steps = [(record("a", 0, 10), (0, 20)), (record("a", 5, 10), (5, 20)), (record("b", 1, 10), (6, 20))]
    serving = [record(group, 10, 10, "serving") for group in "ab"]
    latest: dict[str, GroupRecord] = {}

    async def send_heartbeats() -> None:
        """A record ends three seconds after its last heartbeat."""
        while True:
            for each in list(latest.values()):
                await group_heartbeat(redis, facts.service_id, lambda each=each: each).send_heartbeat()  # type: ignore[misc]
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(send_heartbeats())
    writers = [
        ReportWriter(redis, facts.service_id, lambda group=group: GroupReport(group=group, model="m"), Announcements())  # type: ignore[misc]
        for group in "ab"
    ]
    answering = [asyncio.create_task(writer.run()) for writer in writers]
    async with asyncio.timeout(60):
        for now, wanted in [*steps, (serving[0], (11, 20)), (serving[1], (20, 20))]:
            latest[now.group] = now
            while await told.get() != wanted:
                assert not waiting.done(), waiting
        assert len(await waiting) == 2
    for task in (beating, *answering):
        task.cancel()
    await redis.close()
