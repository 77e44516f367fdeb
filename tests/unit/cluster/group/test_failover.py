"""What a request loses when its group is lost, full or taken down: nothing. Generations over real engine threads."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import msgspec
import psutil
import pytest

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.gateway.generation import generation as generation_module
from tandem.cluster.gateway.generation import part as part_module
from tandem.cluster.gateway.generation import serve_dispatch
from tandem.cluster.gateway.generation.draining_groups import DrainingGroups
from tandem.cluster.gateway.generation.failover import MOST_LOSSES
from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.generation.quarantine import MOST, Quarantine, digest_of
from tandem.cluster.group import coordinator
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.wire.version import OtherVersion, kind_of, with_version, without_version
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tandem.workers.messages.errors import GroupLost, QueueFull, RequestRefused
from tandem.workers.messages.request import Ended, GenerationRequest, SamplingParams, TokenDelta, Usage
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeFleet, FakeGroup, FakeHandle, serving
from tests.support.plain_generation import Client, Reading

SECRET = "ef" * 32


class SlowEngine(FakeEngine):
    """No more steps than `most`, one each two milliseconds or so."""

    most = math.inf

    def turn(self, timeout_s: float) -> bool:
        time.sleep(0.002)  # this engine is slow
        return self.steps < self.most and super().turn(timeout_s)


class Service:
    """Some groups and a gateway without HTTP. Used as a context manager."""

    def __init__(self, engine: Callable[[Any], Any] = SlowEngine, groups: int = 2, **more: Any) -> None:
        self.groups = [FakeGroup(SECRET, f"g{i}:1", engine) for i in range(groups)]
        self.caller = FakeHandle(self.groups)
        self.fleet = FakeFleet({})
        for i in range(groups):
            self.fleet.records |= serving(f"g{i}")
        self.client = Client(self.caller, self.fleet, SECRET, "127.0.0.1", "tandem", **more)

    async def __aenter__(self) -> "Service":
        for group in self.groups:
            await group.wait_opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for group in self.groups:
            group.close()


def asked(name: str, max_tokens: int = 50, prompt: list[int] | None = None, **more: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, n=more.pop("n", 1))
    return GenerationRequest(request_id=name, prompt_token_ids=prompt or [100], sampling=params, **more)


async def read(stream: AsyncIterator[list[TokenDelta]]) -> list[int]:
    """All tokens, whose positions have neither gap nor repeat."""
    async with asyncio.timeout(60):
        deltas = [delta async for deltas in stream for delta in deltas]
    assert [d.first_position for d in deltas if d.token_ids] == sorted(
        {d.first_position for d in deltas if d.token_ids}
    )
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def settled(client: Client) -> None:
    await until(lambda: len(client.books.rows) == len(client.books.opened))


# ---- groups that the test plays itself ----


class ToldGroups:
    """A handle whose groups do what the test says."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.hints: list[RouteHint] = []
        self.calls: list[asyncio.Future[bytes]] = []

    def options(self, **_: Any) -> "ToldGroups":
        return self

    def remote(self, message: bytes, hint: RouteHint) -> "asyncio.Future[bytes]":
        self.requests.append(msgspec.msgpack.decode(without_version(message), type=GenerationRequest))
        self.hints.append(hint)
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


class Told:
    """One gateway over such groups. say(): deltas of the present attempt; end(): its answer."""

    def __init__(self, **more: Any) -> None:
        self.groups = ToldGroups()
        self.fleet = FakeFleet(serving("g0") | serving("g1"))
        self.client = Client(self.groups, self.fleet, SECRET, "127.0.0.1", "tandem", **more)
        self.aborts: list[Any] = []
        self.client._receiver.send_abort = lambda sender, abort: self.aborts.append((sender, abort))  # type: ignore[method-assign]

    async def attempt(self, number: int) -> GenerationRequest:
        await until(lambda: len(self.groups.requests) > number)
        return self.groups.requests[number]

    def say(self, *deltas: tuple[int, int, list[int]], begun: bool = False, end: str | None = None) -> None:
        """(choice, first position, tokens) of one step."""
        request = self.groups.requests[-1]
        built = [
            TokenDelta(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=choice,
                first_position=first,
                token_ids=tokens,
                finish_reason=end,  # type: ignore[arg-type]
                usage=Usage(1, 1) if end is not None else None,
            )
            for choice, first, tokens in deltas
        ]
        if begun:
            built.append(
                TokenDelta(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    choice=0,
                    first_position=0,
                    token_ids=[],
                    cached_tokens=5,
                )
            )
        self.client._on_deltas(f"g{len(self.groups.requests) - 1}:1".encode(), built)

    def end(
        self, *refused: Any, number: int = -1, loss: Any = None, group: str = "", positions: list[int] | None = None
    ) -> None:
        request = self.groups.requests[number]
        n = request.sampling.n
        ended = Ended(
            request_id=request.request_id,
            attempt=request.attempt,
            positions=positions or [0] * n,
            finish_reasons=["abort"] * n,
            usage=Usage(len(request.prompt_token_ids), 0, 7),
            refused=refused or None,  # type: ignore[arg-type]
            loss=loss,
            group=group,
        )
        self.groups.calls[number].set_result(with_version(msgspec.msgpack.encode(ended)))

    def kill(self) -> None:
        self.groups.calls[-1].set_exception(ConnectionResetError("the replica died"))


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    told = Told()
    yield told
    await told.client.close()


SHORT = GatewayTimes(drain_s=0.2)
"""Nothing more is to come, and nobody should wait long for it."""
FULL = (429, "slow_down", None, "the queue is full")
LOST = (503, "group_lost", None, "rank 0 has died")
ENDED = (503, "group_ended", None, "the group is shutting down")


# ---- full groups ----


async def test_a_group_that_is_full_is_not_the_last_word(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.end(*FULL, group="g0")
    second = await told.attempt(1)
    assert told.groups.hints[1].avoid == ("g0",)
    assert second.attempt == 0 and not second.is_resumed, "it passes the other group's limits as any other"
    told.say((0, 0, [1]), end="length")
    assert await read(stream) == [1]
    await stream.aclose()


async def test_only_when_every_group_is_full_the_client_hears_of_it(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    for number in range(2):
        await told.attempt(number)
        told.end(*FULL, group=f"g{number}")
    with pytest.raises(RequestRefused, match="queue is full") as caught:
        await read(stream)
    assert (caught.value.status, len(told.groups.calls)) == (429, 2)
    await stream.aclose()


async def test_an_engine_without_a_name_is_asked_once(told: Told) -> None:
    """As that of run-batch: there is no other."""
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.end(*FULL)
    with pytest.raises(RequestRefused, match="queue is full"):
        await read(stream)
    assert len(told.groups.calls) == 1
    await stream.aclose()


async def test_a_wait_that_was_too_long_is_not_begun_again_elsewhere(told: Told) -> None:
    stream = await told.client.submit(asked("r", deadline_s=0.05))
    await told.attempt(0)
    await asyncio.sleep(0.06)  # longer than its deadline
    told.end(503, "service_unavailable", None, "the request waited 0.05 s", group="g0")
    with pytest.raises(RequestRefused, match="waited"):
        await read(stream)
    await stream.aclose()


async def test_a_stream_that_moves_to_a_full_group_is_let_in() -> None:
    class FullEngine(SlowEngine):
        def add_request(self, request: GenerationRequest) -> None:
            if self.full and not request.is_resumed:
                raise QueueFull("the queue is full")
            super().add_request(request)

        full = False

    async with Service(FullEngine) as service:
        stream = await service.client.submit(asked("r", 100))
        got = [token for delta in await anext(stream) for token in delta.token_ids]
        service.groups[1].engine.full = True
        service.groups[0].die()
        assert got + await read(stream) == list(range(100, 200))
        await stream.aclose()


async def test_a_stream_that_its_group_can_no_longer_serve_goes_on_where_it_was(told: Told) -> None:
    """Its request paused, and its adapter could not be brought to the device again."""
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [1, 2]), begun=True)
    told.end(503, "service_unavailable", None, "adapter 'a' cannot be served", group="g0", positions=[2])
    second = await told.attempt(1)
    assert (second.attempt, second.begun, second.resume_token_ids) == (1, True, [[1, 2]])
    told.say((0, 2, [3]), end="length")
    assert await read(stream) == [1, 2, 3]
    await stream.aclose()


# ---- aborts across a move ----


async def test_a_client_that_leaves_while_its_request_moves_is_not_started_again(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [7]))
    assert await anext(stream)
    told.kill()
    await until(lambda: not stream.part.is_sent)  # it is between two groups
    await stream.aclose()
    await settled(told.client)
    assert len(told.groups.calls) == 1
    (row,) = told.client.books.rows
    assert (row.terminal, row.usage) == ("abort", Usage(1, 1))


async def test_a_choice_that_was_stopped_stays_stopped_in_the_next_group(told: Told) -> None:
    """Whether the stop string was found before the group died, or while the request moved."""
    stream = await told.client.submit(asked("r", n=3))
    await told.attempt(0)
    told.say((0, 0, [7, 8]), (1, 0, [9]), (2, 0, [4, 5]))
    await anext(stream)
    stream.stop(0, 1)
    assert [abort.choice for _, abort in told.aborts] == [0]
    told.kill()
    await until(lambda: not stream.part.is_sent)
    stream.stop(2, 2)
    moved = await told.attempt(1)
    assert moved.ended_choices == [0, 2] and moved.resume_token_ids == [[7], [9], [4, 5]]
    told.say((1, 1, [10]), end="length")
    assert await read(stream) == [10]
    await stream.aclose()
    await settled(told.client)
    assert told.client.books.rows[0].usage == Usage(1, 5, 1 * 0 + told.client.books.rows[0].cached_tokens)


async def test_a_stop_string_before_the_new_group_is_known_reaches_it(told: Told) -> None:
    stream = await told.client.submit(asked("r", n=2))
    await told.attempt(0)
    told.say((0, 0, [7]), (1, 0, [8]))
    await anext(stream)
    told.kill()
    await told.attempt(1)
    stream.stop(0, 1)
    assert not told.aborts, "nobody knows the group yet"
    told.say(begun=True)
    assert [(sender, abort.choice, abort.attempt) for sender, abort in told.aborts] == [(b"g1:1", 0, 1)]
    await stream.aclose()


async def test_nobody_asks_another_group_for_a_request_whose_text_has_ended(told: Told) -> None:
    stream = await told.client.submit(asked("r", n=2))
    await told.attempt(0)
    told.say((0, 0, [7]), (1, 0, [8]))
    await anext(stream)
    stream.stop(0, 1)
    stream.stop(1, 1)
    told.kill()
    assert await read(stream) == []
    await stream.aclose()
    await settled(told.client)
    assert len(told.groups.calls) == 1
    assert (told.client.books.rows[0].terminal, told.client.books.rows[0].completion_tokens) == ("stop", 2)


# ---- whole steps ----


async def test_a_step_with_a_gap_is_not_taken_by_halves(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_dispatch, "GAP_S", 0.01)
    stream = await told.client.submit(asked("r", n=2))
    await told.attempt(0)
    told.say((0, 0, [100]), (1, 0, [200]))
    told.say((0, 1, [101]), (1, 2, [202]))  # the message with choice 1's second token was lost
    moved = await told.attempt(1)
    assert moved.resume_token_ids == [[100], [200]], "choice 0's second token was not delivered"
    assert not moved.suspect, "a message was lost, no group"
    told.say((0, 1, [101]), (1, 1, [201]))
    told.say((0, 2, [102]), (1, 2, [202]), end="length")
    async with asyncio.timeout(60):
        deltas = [delta async for deltas in stream for delta in deltas]
    by_choice = {c: [t for d in deltas if d.choice == c for t in d.token_ids] for c in (0, 1)}
    assert by_choice == {0: [100, 101, 102], 1: [200, 201, 202]}
    await stream.aclose()


# ---- counted once ----


async def test_a_moved_request_is_counted_as_the_first_group_has_begun_it(told: Told) -> None:
    stream = await told.client.submit(asked("r", prompt=[1, 2, 3]))
    await told.attempt(0)
    told.say(begun=True)  # 5 of its prompt tokens were cached there
    told.say((0, 0, [7]))
    await anext(stream)
    told.kill()
    moved = await told.attempt(1)
    assert moved.begun
    told.say((0, 1, [8]), end="length")
    await read(stream)
    assert await stream.generation.usage() == Usage(3, 2, cached_tokens=5)
    await stream.aclose()
    await settled(told.client)
    assert told.client.books.rows[0].usage == Usage(3, 2, cached_tokens=5)


async def test_a_request_that_only_queued_is_begun_by_the_next_group(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.kill()
    moved = await told.attempt(1)
    assert not moved.begun and not moved.suspect
    await stream.aclose()


# ---- bills ----


async def test_a_prompt_that_was_computed_is_billed_although_no_token_came(told: Told) -> None:
    told.client.times = SHORT
    for name, begun in (("computed", True), ("queued", False)):
        stream = await told.client.submit(asked(name, prompt=[1, 2, 3]))
        await until(lambda name=name: told.groups.requests and told.groups.requests[-1].request_id == name)
        if begun:
            told.say(begun=True)
        await stream.aclose()
        if begun:
            await until(lambda: told.aborts)
            told.end()
        await settled(told.client)
    bills = {row.id: row.usage for row in told.client.books.rows}
    assert bills == {"computed": Usage(3, 0, cached_tokens=5), "queued": Usage(0, 0)}


async def test_the_word_that_it_has_begun_is_awaited_when_a_client_leaves_at_once(told: Told) -> None:
    told.client.times = SHORT
    stream = await told.client.submit(asked("r", prompt=[1, 2, 3]))
    await told.attempt(0)
    await stream.aclose()
    await asyncio.sleep(0)
    told.say(begun=True)  # was on its way
    await settled(told.client)
    assert told.client.books.rows[0].usage == Usage(3, 0, cached_tokens=5)


async def test_a_call_that_ends_with_an_error_because_it_was_cancelled_is_no_loss(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve has an exception of its own for it; the group's count comes over the token channel."""
    told.client.times = SHORT

    class Call:
        """Words it as Serve does."""

        def __init__(self, answer: "asyncio.Future[bytes]") -> None:
            self.cancel = answer.cancel
            self._answer = answer

        def __await__(self) -> Generator[Any, None, bytes]:
            try:
                return (yield from self._answer.__await__())
            except asyncio.CancelledError:
                raise RuntimeError("the request was cancelled") from None

    plain = told.groups.remote
    monkeypatch.setattr(told.groups, "remote", lambda *args, **named: Call(plain(*args, **named)))
    stream = await told.client.submit(asked("r", prompt=[1, 2, 3]))
    await told.attempt(0)
    closing = asyncio.create_task(stream.aclose())
    await until(lambda: told.groups.calls[0].done())
    for _ in range(5):
        await asyncio.sleep(0)
    told.say(begun=True)
    await closing
    await settled(told.client)
    assert told.client.books.rows[0].usage == Usage(3, 0, cached_tokens=5)


async def test_the_count_of_a_group_is_billed_although_it_has_said_nothing_before() -> None:
    """The word that the prompt is computed may be as late as the step before it is long."""
    async with Service(groups=1) as service:
        service.groups[0].engine.most = 0
        service.groups[0].engine.begun.add(("r", 0))
        stream = await service.client.submit(asked("r", prompt=[1, 2, 3]))
        await until(lambda: service.groups[0].engine.live)
        await stream.aclose()
        await settled(service.client)
        assert [row.usage for row in service.client.books.rows] == [Usage(3, 0)]


# ---- planned ends ----


async def test_a_group_that_is_told_to_stop_hands_over_which_is_no_strike() -> None:
    async with Service(groups=3) as service:
        stream = await service.client.submit(asked("r", 400))
        got = [token for delta in await anext(stream) for token in delta.token_ids]
        for number in range(2):
            service.groups[number].thread.stop()
            await until(lambda number=number: service.groups[number + 1].requests)
            (moved,) = service.groups[number + 1].requests
            assert not moved.suspect
            got += [token for delta in await anext(stream) for token in delta.token_ids]
        assert got + await read(stream) == list(range(100, 500))
        await stream.aclose()


class EndingEngine(SlowEngine):
    """One of its ranks is told to end, in the middle of a step."""

    is_told = False

    def turn(self, timeout_s: float) -> bool:
        if self.is_told:
            raise GroupLost("rank 1: it was told to end", by_step=False, is_planned=True)
        return super().turn(timeout_s)


@pytest.mark.parametrize("by", ["the rank's last message", "the watch over its process"])
async def test_a_rank_that_is_told_to_end_is_no_strike(by: str) -> None:
    async with Service(EndingEngine) as service:
        stream = await service.client.submit(asked("r", 300))
        got = [token for delta in await anext(stream) for token in delta.token_ids]
        first = service.groups[0]
        if by == "the rank's last message":
            first.engine.is_told = True
        else:
            first.thread.expect_end()
            first.thread.lose("rank 1 of group g0 was told to end")
        await until(lambda: service.groups[1].requests)
        (moved,) = service.groups[1].requests
        assert not moved.suspect and first.thread.is_planned
        assert got + await read(stream) == list(range(100, 400))
        await stream.aclose()


# ---- groups of another version ----


async def test_a_group_of_another_version_is_left_alone_which_is_no_strike(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await told.client.submit(asked("r", 3))
    read_all = asyncio.create_task(read(stream))
    for number, group in enumerate(("g0", "", "", "", "", "", "", "")):  # an older release does not even say its name
        request = await told.attempt(number)
        assert not request.suspect
        told.groups.calls[number].set_exception(OtherVersion("7" if group else "", group))
    await told.attempt(8)
    assert "g0" in told.groups.hints[8].avoid and not told.client.has_group(("g1",)), "for every request from here"
    told.say((0, 0, [1, 2, 3]), end="length")
    told.end(positions=[3])
    assert await read_all == [1, 2, 3]
    (line,) = [line for line in caplog.messages if "group g0 cannot be used" in line]
    assert "version 7 of the token channel" in line
    told.fleet.records = serving("g0")
    assert not told.client.ready() and not told.client.has_group()
    await stream.aclose()


async def test_requests_of_a_group_that_serve_takes_down_move_before_it_is_killed() -> None:
    now_s = 100.0
    running: set[str] = {"g0", "g1"}
    draining = DrainingGroups(lambda: running, 10.0, lambda: now_s)
    async with Service(draining=draining) as service:
        service.groups[0].engine.most = 50
        stream = await service.client.submit(asked("r", 100))
        got = [token for delta in await anext(stream) for token in delta.token_ids]
        service.client.look_after()
        running.remove("g0")
        service.client.look_after()
        now_s += 7.9
        service.client.look_after()
        assert not service.groups[1].requests, "it has time to finish there"
        now_s += 0.2
        service.client.look_after()
        assert got + await read(stream) == list(range(100, 200))
        (moved,) = service.groups[1].requests
        assert not moved.suspect and service.caller.hints[-1].avoid == ("g0",)
        await stream.aclose()


async def test_a_group_that_is_killed_while_it_is_taken_down_is_no_loss() -> None:
    running: set[str] = {"g0", "g1"}
    told = Told(draining=DrainingGroups(lambda: running, 10.0, time.monotonic))
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [7]))
    told.client.look_after()
    running.remove("g0")
    told.client.look_after()
    told.kill()
    assert not (await told.attempt(1)).suspect
    await stream.aclose()
    await told.client.close()


def of_model(digest: str, group: str) -> dict[str, GroupRecord]:
    return {group: msgspec.structs.replace(serving(group)[group], kind=kind_of(digest))}


async def test_requests_stay_in_a_group_that_is_taken_down_when_the_new_version_has_another_model() -> None:
    """A gateway of the old version: the stream ends where it is, and what comes is for no group of the new one."""
    now_s = 100.0
    running: set[str] = {"g0", "g1"}
    draining = DrainingGroups(lambda: running, 10.0, lambda: now_s)
    async with Service(draining=draining, model="a") as service:
        service.fleet.records = of_model("a", "g0") | of_model("b", "g1")
        service.client.look_after()
        stream = await service.client.submit(asked("r", 60))
        got = [token for delta in await anext(stream) for token in delta.token_ids]
        running.remove("g0")
        service.client.look_after()
        now_s += 60.0
        service.client.look_after()
        assert got + await read(stream) == list(range(100, 160))
        assert not service.groups[1].requests and "g1" in service.caller.hints[-1].avoid
        assert not service.client.has_group(draining.groups)
        await stream.aclose()


async def test_a_gateway_tells_its_own_model_from_the_one_before() -> None:
    told = Told(model="b")
    told.fleet.records = of_model("a", "g0")
    assert not told.client.has_group() and not told.client.ready()
    assert told.client.is_outnumbered()
    told.fleet.records |= of_model("b", "g1")
    assert told.client.has_group() and told.client.ready() and not told.client.is_outnumbered()
    told.fleet.records |= of_model("a", "g2")
    assert told.client.is_outnumbered(), "one group would have the requests of three"
    told.fleet.records = {}
    assert not told.client.is_outnumbered(), "requests are held"
    told.fleet.records = of_model("", "g0")
    assert told.client.has_group() and not told.client.is_outnumbered(), "a release that does not say"
    await told.client.close()


async def test_a_gateway_that_has_seen_only_another_model_holds_requests() -> None:
    told = Told(model="b")
    told.fleet.records = of_model("a", "g0")
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    assert told.client.held == 1
    await stream.aclose()
    await told.client.close()


async def test_held_requests_are_counted() -> None:
    told = Told(model="b")
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    assert told.client.held == 0, "it waits in a queue"
    told.fleet.records = of_model("a", "g0")
    assert told.client.held == 1
    told.fleet.records = of_model("b", "g1")
    assert told.client.held == 0
    await stream.aclose()
    await told.client.close()


def test_a_group_that_serve_does_not_list_yet_is_not_taken_down() -> None:
    running: set[str] | None = None
    groups = DrainingGroups(lambda: running, 1.0, time.monotonic)
    groups.refresh(serving("g0").values())
    running = set()
    groups.refresh(serving("g0").values())
    assert not groups.groups
    running = {"g0"}
    groups.refresh(serving("g0").values())
    running = set()
    groups.refresh(serving("g0").values())
    assert set(groups.groups) == {"g0"}
    groups.refresh([])
    assert not groups.groups, "it is gone"


# ---- held while groups come back ----


async def test_requests_are_held_for_as_long_as_groups_take_to_load(told: Told) -> None:
    assert told.client.hold_s == serve_dispatch.LEAST_HOLD_S
    record = told.fleet.records["g0"]
    told.fleet.records["g0"] = msgspec.structs.replace(record, load_s=200.0)
    assert told.client.hold_s == 410.0
    told.fleet.records = {}
    assert told.client.hold_s == 410.0, "the groups are gone, what is known of them is not"
    told.fleet.records = {"g1": msgspec.structs.replace(record, group="g1", state="loading", load_s=0.0)}
    assert told.client.hold_s == 3 * 410.0, "one is on its way, maybe on a busier machine"


@pytest.mark.parametrize(("age_s", "counts_s"), [(51.0, 51.0), (3600.0, coordinator.BOOT_S), (-5.0, 0.0)])
def test_what_a_group_takes_to_load_begins_with_its_process(
    monkeypatch: pytest.MonkeyPatch, age_s: float, counts_s: float
) -> None:
    """Not with the coordinator in it, which is made after the imports; one of an idle process of Ray's, or with a
    clock that was set back, has no absurd time."""
    now_s, created_s = time.monotonic(), time.time() - age_s
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created_s)
    began_s = coordinator.process_began_s()
    assert began_s == pytest.approx(now_s - counts_s, abs=time.monotonic() - now_s + 0.01)


async def test_the_queue_timeout_bounds_how_long_a_request_is_held(told: Told) -> None:
    stream = await told.client.submit(asked("r", deadline_s=0.2))
    told.fleet.records = {}
    began_s = time.monotonic()
    with pytest.raises(RequestRefused, match="no worker group became ready"):
        await read(stream)
    assert time.monotonic() - began_s >= 0.1
    await stream.aclose()


async def test_a_held_request_goes_on_when_a_group_is_back(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [7]))
    records, told.fleet.records = told.fleet.records, {}
    for number in range(1, 9):  # as Serve's router, which fails calls to a dead group until it knows
        told.kill()
        await told.attempt(number)
    told.fleet.records = records
    told.say((0, 1, [8]), end="length")
    assert await read(stream) == [7, 8]
    await stream.aclose()


async def test_calls_that_fail_for_ever_end_the_request(told: Told) -> None:
    """As when the coordinator cannot read it."""
    stream = await told.client.submit(asked("r", deadline_s=0.7))
    reading = asyncio.create_task(read(stream))
    number = 0
    while not reading.done():
        if len(told.groups.calls) > number:
            told.kill()
            number += 1
        await asyncio.sleep(0.005)
    with pytest.raises(RequestRefused, match="no worker group took"):
        await reading
    assert 2 <= number <= 6, "not as fast as it can"
    await stream.aclose()


async def test_tokens_that_a_lost_group_had_sent_are_taken_and_a_frozen_ones_are_not(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [7]))
    told.end(*LOST, loss="suspect")
    await until(lambda: stream.part.is_sent and stream.part.ended is not None)
    told.say((0, 1, [8]))  # its answer has overtaken it
    assert (await told.attempt(1)).resume_token_ids == [[7, 8]]
    told.say((0, 2, [9]))
    told.kill()
    await until(lambda: not stream.part.is_sent)
    told.say((0, 3, [666]))
    assert (await told.attempt(2)).resume_token_ids == [[7, 8, 9]]
    await stream.aclose()


# ---- a query of death ----


async def test_a_query_of_death_ends_two_groups_and_no_other_request() -> None:
    async with Service(groups=4) as service:
        innocents = [await service.client.submit(asked(f"r{i}", 300, [1000 * (i + 1)])) for i in range(24)]
        firsts = [await anext(stream) for stream in innocents]
        bad = await service.client.submit(asked("bad", prompt=[666]))
        with pytest.raises(RequestRefused) as caught:
            await read(bad)
        assert (caught.value.status, caught.value.code) == (500, "request_poisoned")
        await bad.aclose()
        again = await service.client.submit(asked("again", prompt=[666]))
        with pytest.raises(RequestRefused, match="not run again"):
            await read(again)
        await again.aclose()
        answers = await asyncio.gather(*map(read, innocents))
        for i, (first, rest) in enumerate(zip(firsts, answers, strict=True)):
            whole = [token for delta in first for token in delta.token_ids] + rest
            assert whole == list(range(1000 * (i + 1), 1000 * (i + 1) + 300)), f"r{i}"
        for stream in innocents:
            await stream.aclose()
        dead = [group for group in service.groups if group.failures]
        assert len(dead) == 2 and all(isinstance(group.failures[0][0], GroupLost) for group in dead)
        assert "again" not in [request.request_id for group in service.groups for request in group.requests]
        await settled(service.client)
        assert sorted(row.terminal for row in service.client.books.rows) == ["error", *["length"] * 24]


@pytest.mark.parametrize("loss", ["suspect", "bystander"])
async def test_a_copy_of_a_query_of_death_is_not_tried_in_a_third_group(told: Told, loss: str) -> None:
    """As of a client that asks again before it is answered. loss: the copy's, when the first one is convicted."""
    first = await judged(told, "suspect")
    await told.attempt(1)
    copy = await told.client.submit(asked("copy"))
    await told.attempt(2)
    told.end(*LOST, number=2, loss=loss)
    told.end(*LOST, number=1, loss="alone")
    for stream in (first, copy):
        with pytest.raises(RequestRefused) as caught:
            await read(stream)
        assert (caught.value.status, caught.value.code) == (500, "request_poisoned")
        await stream.aclose()
    assert len(told.groups.requests) == 3


async def test_a_stream_that_is_past_where_its_group_was_lost_goes_on_although_its_prompt_is_in_quarantine(
    told: Told,
) -> None:
    """Others who sent this prompt asked for something else of it."""
    stream = await judged(told, "suspect", "bystander", tokens=PROBATION_TOKENS)
    told.client.quarantine.add(asked("other"))
    await told.attempt(2)
    told.say((0, 2 * PROBATION_TOKENS, [1]), end="length")
    assert len(await read(stream)) == 2 * PROBATION_TOKENS + 1
    await stream.aclose()


async def judged(told: Told, *losses: str | None, tokens: int = 0) -> Reading:
    """A request whose groups are lost one after the other, each with a row of it; None: the coordinator is killed."""
    stream = await told.client.submit(asked("r", 1000))
    position = 0
    for number, loss in enumerate(losses):
        await told.attempt(number)
        told.say(begun=True)
        if tokens:
            told.say((0, position, list(range(tokens))))
            position += tokens
        if loss is None:
            told.kill()
        else:
            told.end(*LOST, loss=loss)
    return stream


@pytest.mark.parametrize("last", ["alone", None])
async def test_who_ends_a_group_alone_is_convicted(told: Told, last: str | None) -> None:
    """When nobody knows in which step it ended, only the second time: the first may have been an accident."""
    stream = await judged(told, "suspect", last, *([] if last else [last]))
    with pytest.raises(RequestRefused) as caught:
        await read(stream)
    assert caught.value.code == "request_poisoned"
    assert [request.suspect for request in told.groups.requests] == [False, True, *([] if last else [True])]
    assert told.client.quarantine.digests() == [digest_of(asked("other"))]
    await stream.aclose()


@pytest.mark.parametrize("losses", [["bystander"] * 5, ["suspect", "bystander", "suspect", "bystander"]])
async def test_nobody_is_convicted_of_what_others_did(told: Told, losses: list[str]) -> None:
    stream = await judged(told, *losses)
    last = await told.attempt(len(losses))
    assert last.suspect == ("suspect" in losses), "it has not been cleared"
    told.say((0, 0, [1]), end="length")
    assert await read(stream) == [1]
    await stream.aclose()


async def test_who_has_run_past_where_its_group_ended_is_cleared(told: Told) -> None:
    """Coordinators that are killed one after the other, under a stream that goes on between."""
    stream = await judged(told, *[None] * 9, tokens=PROBATION_TOKENS)
    last = await told.attempt(9)
    assert last.attempt == 9
    told.say((0, 9 * PROBATION_TOKENS, [1]), end="length")
    assert len(await read(stream)) == 9 * PROBATION_TOKENS + 1
    await stream.aclose()


@pytest.mark.parametrize("tokens", [0, PROBATION_TOKENS - 1])
@pytest.mark.parametrize("losses", [["excused"] * 6, ["excused", "bystander", *["excused"] * 5]])
async def test_a_request_under_which_memory_runs_out_for_ever_ends(told: Told, losses: list[str], tokens: int) -> None:
    """It is not to blame alone, and must not go on."""
    stream = await judged(told, *losses, tokens=tokens)
    with pytest.raises(RequestRefused) as caught:
        await read(stream)
    assert (caught.value.status, caught.value.code) == (503, "service_unavailable")
    assert not told.client.quarantine.digests()
    await stream.aclose()


@pytest.mark.parametrize("tokens", [0, PROBATION_TOKENS - 1])
async def test_a_request_under_which_groups_are_lost_for_ever_is_convicted(told: Told, tokens: int) -> None:
    """Although it ran alone in none of their last steps."""
    stream = await judged(told, *["suspect"] * 5, "excused", tokens=tokens)
    with pytest.raises(RequestRefused) as caught:
        await read(stream)
    assert (caught.value.status, caught.value.code) == (500, "request_poisoned")
    assert told.client.quarantine.digests() == [digest_of(asked("other"))]
    await stream.aclose()


async def test_what_ends_groups_before_it_has_a_row_does_not_go_on_for_ever(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "AT_ONCE_S", -1.0)  # each attempt counts as a long one
    stream = await told.client.submit(asked("r"))
    for number in range(MOST_LOSSES):
        await told.attempt(number)
        told.kill()
    with pytest.raises(RequestRefused, match="6 worker groups were lost") as caught:
        await read(stream)
    assert (caught.value.status, len(told.groups.calls)) == (503, MOST_LOSSES)
    assert not told.client.quarantine.digests()
    await stream.aclose()


async def test_a_token_shows_that_groups_do_not_end_before_its_row(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_module, "AT_ONCE_S", -1.0)
    stream = await told.client.submit(asked("r"))
    for number in range(2 * MOST_LOSSES - 2):
        await told.attempt(number)
        if number == MOST_LOSSES - 2:
            told.say((0, 0, [7]))
        told.kill()
    await told.attempt(2 * MOST_LOSSES - 2)
    told.say((0, 1, [8]), end="length")
    assert await read(stream) == [7, 8]
    await stream.aclose()


async def test_a_request_that_no_engine_takes_in_ends_alone() -> None:
    class ChokingEngine(SlowEngine):
        def add_request(self, request: GenerationRequest) -> None:
            if request.prompt_token_ids == [13]:
                raise TypeError("'<' not supported")
            super().add_request(request)

    async with Service(ChokingEngine) as service:
        stream = await service.client.submit(asked("r", 100))
        await anext(stream)
        bad = await service.client.submit(asked("bad", 10**9, prompt=[13]))
        with pytest.raises(RequestRefused) as caught:
            await read(bad)
        assert (caught.value.status, caught.value.code) == (500, "internal_error")
        await bad.aclose()
        assert (await read(stream))[-1] == 199
        await stream.aclose()
        seen = [request.request_id for group in service.groups for request in group.requests]
        assert sorted(seen) == ["bad", "r"]
        await until(lambda: not any(group.engine.live for group in service.groups))  # its thread is behind its tokens
        assert not any(group.failures for group in service.groups)
        await settled(service.client)
        assert {row.id: row.terminal for row in service.client.books.rows} == {"r": "length", "bad": "error"}


async def test_each_choice_has_to_pass_where_its_group_was_lost(told: Told) -> None:
    stream = await told.client.submit(asked("r", n=3))
    await told.attempt(0)
    told.say((0, 0, [7]), (1, 0, [7]), (2, 0, [7]))
    await anext(stream)
    stream.stop(2, 1)
    told.end(*LOST, loss="suspect")
    assert (await told.attempt(1)).suspect
    told.say((0, 1, [8] * 9), (1, 1, [8] * (PROBATION_TOKENS - 1)))
    told.end(*LOST, loss="bystander")
    assert (await told.attempt(2)).suspect, "its second choice may do it yet"
    told.say((0, 10, [8] * PROBATION_TOKENS), (1, PROBATION_TOKENS, [8] * PROBATION_TOKENS))
    told.end(*LOST, loss="bystander")
    assert not (await told.attempt(3)).suspect, "its third one has ended"
    await stream.aclose()


async def test_an_answer_that_is_complete_is_neither_judged_nor_sent_again(told: Told) -> None:
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.end(*LOST, loss="alone")
    await until(lambda: stream.part.is_sent and stream.part.ended is not None)
    told.say((0, 0, [7]), end="length")  # its answer has overtaken it
    await until(lambda: stream.generation._num_over)
    assert not told.client.quarantine.digests()
    assert await read(stream) == [7]
    await stream.aclose()
    await settled(told.client)
    assert (told.client.books.rows[0].terminal, len(told.groups.calls)) == ("length", 1)


async def test_tokens_after_an_abort_are_awaited_no_longer_than_they_take(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "GAP_S", 3600.0)
    stream = await told.client.submit(asked("r"))
    await told.attempt(0)
    told.say((0, 0, [7]))
    await anext(stream)
    stream.stop(0, 1)
    told.end(positions=[2])
    await until(lambda: not stream.part.is_sent or stream.part.ended is not None)
    await asyncio.sleep(0)
    told.say((0, 1, [8]))  # the answer to the abort has overtaken it
    await until(lambda: stream.generation._num_over)
    await stream.aclose()


async def test_a_generation_whose_task_is_cancelled_is_settled_once(told: Told) -> None:
    stream = await told.client.submit(asked("r", prompt=[1, 2]))
    await told.attempt(0)
    told.say((0, 0, [7]))
    await anext(stream)
    released: list[bool] = []
    stream.generation._held.callback(released.append, True)
    await told.client.tasks.close(0.0)
    assert [(row.id, row.usage) for row in told.client.books.rows] == [("r", Usage(2, 1))]
    assert released == [True] and not len(told.client.tasks)


def test_memory_that_runs_out_and_failing_transfers_convict_nobody() -> None:
    from tandem.workers.engine.thread.engine_thread import EngineThread

    class Engine:
        def losses(self) -> dict[str, str]:
            return {"a": "alone", "s": "suspect", "b": "bystander"}

    thread: Any = EngineThread.__new__(EngineThread)
    thread._engine = Engine()
    for error in (
        GroupLost("rank 1 failed: torch.OutOfMemoryError: CUDA out of memory"),
        GroupLost("rank 1: its lane channel failed: KeyError: 'placement'", by_step=False),
    ):
        assert thread._losses(error) == {"a": "excused", "s": "excused", "b": "bystander"}
    assert thread._losses(GroupLost("rank 1 has died")) == Engine().losses()


def test_quarantine_is_by_prompt_and_adapter_for_an_hour_and_shared() -> None:
    now_s, others = 0.0, [digest_of(asked("r", prompt=[9]))]
    quarantine = Quarantine(lambda: now_s, lambda: others)
    bad = asked("a", 7, [1, 2])
    quarantine.add(bad)
    for same in (asked("b", 99, [1, 2]), asked("c", prompt=[9])):
        with pytest.raises(RequestRefused):
            quarantine.check([asked("ok", prompt=[3]), same])
    quarantine.check([asked("d", prompt=[1, 2, 3]), asked("e", prompt=[1])])
    others.clear()
    now_s = 3601.0
    quarantine.check([bad])
    for number in range(MOST + 5):
        quarantine.add(asked("x", prompt=[number]))
    assert len(quarantine.digests()) == MOST
