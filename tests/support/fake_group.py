"""A whole group without Ray: the real engine thread over a fake engine, called like a Serve handle."""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import msgspec

from tandem.cluster.fleet.fleet_view import GroupRecord, StartFailure
from tandem.cluster.fleet.group_events import GroupTally
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.wire.token_channel import TokenSender
from tandem.cluster.wire.version import with_version, without_version
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.messages.request import Abort, Ended, GenerationRequest
from tests.support.fake_engine import FakeEngine


class FakeGroup:
    """`die()` is what kill -9 does to a replica: its calls break, its tokens stop."""

    def __init__(self, secret: str, name: str, engine: Callable[[Any], Any] = FakeEngine) -> None:
        self.engine: Any = None
        self.failures: list[tuple[Exception, bool]] = []
        self.last_stats: EngineStats | None = None
        self.last_residency: Mapping[str, str] = {}
        self.calls: set[asyncio.Future[Any]] = set()
        self.requests: list[GenerationRequest] = []
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._make = engine
        self.name = name
        self.thread = self.started(secret, name)

    def started(self, secret: str, name: str, clock: Callable[[], float] = time.monotonic) -> EngineThread:
        """A thread with a new engine."""
        thread = EngineThread(self, partial(TokenSender, secret, name), clock)
        thread.start_engine(self._open, lambda: None)
        return thread

    async def wait_opened(self) -> None:
        async with asyncio.timeout(30):
            await self._opened.wait()

    def opened(self) -> None:
        self._loop.call_soon_threadsafe(self._opened.set)

    def stats(self, stats: EngineStats, residency: Mapping[str, str]) -> None:
        self.last_stats = stats
        self.last_residency = residency

    def failed(self, error: Exception, opened: bool) -> None:
        self.failures.append((error, opened))

    async def generate(self, payload: bytes) -> bytes:
        request = msgspec.msgpack.decode(payload, type=GenerationRequest)
        self.requests.append(request)
        ended: asyncio.Future[Ended] = self._loop.create_future()
        self.calls.add(ended)

        def answer(value: Ended) -> None:
            self._loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(value))

        self.thread.submit(request, answer)
        try:
            answered = await ended
            if answered.refused is not None:
                answered = msgspec.structs.replace(answered, group=self.name)
            return msgspec.msgpack.encode(answered)
        except asyncio.CancelledError:
            self.thread.abort(Abort(request_id=request.request_id, attempt=request.attempt))
            raise
        finally:
            self.calls.discard(ended)

    def die(self) -> None:
        for call in list(self.calls):
            call.set_exception(ConnectionResetError("the replica died"))
        self.thread.stop()

    def close(self) -> None:
        self.thread.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _open(self, sink: Any) -> Any:
        self.engine = self._make(sink)
        return self.engine


class FakeCall:
    """A call of a handle. As with Serve's, only cancel() ends it: it does not care who waits for its answer."""

    def __init__(self, answer: "asyncio.Future[bytes]") -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, bytes]:
        return with_version((yield from asyncio.shield(self._answer).__await__()))

    def cancel(self) -> None:
        self._answer.cancel()


class FakeHandle:
    """Sends each call to the next group of the list, past those that its hint avoids if there are others."""

    def __init__(self, groups: list[FakeGroup]) -> None:
        self.groups = groups
        self.made = 0
        self.hints: list[RouteHint] = []

    def options(self, **_: Any) -> "FakeHandle":
        return self

    def remote(self, message: bytes, hint: RouteHint) -> FakeCall:
        self.hints.append(hint)
        turn = self.made % len(self.groups)
        order = [*self.groups[turn:], *self.groups[:turn]]
        group = min(order, key=lambda group: group.name.split(":")[0] in hint.avoid)
        self.made += 1
        payload = bytes(without_version(message))
        return FakeCall(asyncio.get_running_loop().create_task(group.generate(payload)))


class FakeFleet:
    """FleetView's face with records of the test's choosing."""

    def __init__(self, records: dict[str, GroupRecord]) -> None:
        self.records = records
        self.missing: list[GroupRecord] = []
        self.reports: list[GroupReport] = []
        self.redis_unavailable = False
        self.start_failure: StartFailure | None = None
        self.tally = GroupTally()

    async def read_reports(self, answer_s: float = 1.0) -> list[GroupReport]:
        return self.reports

    async def read_tally(self, answer_s: float = 1.0) -> GroupTally:
        return self.tally

    def missing_for(self, seconds: float = 0.0) -> list[GroupRecord]:
        return self.missing


def serving(group: str = "g") -> dict[str, GroupRecord]:
    return {group: GroupRecord(group=group, life=1, model="m", state="serving", host="h", pid=1)}
