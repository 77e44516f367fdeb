"""A group tells a gateway of its KV over real sockets: facts, a snapshot, changes; what is lost is told again; what was
found is compared. The journal is real, the engine a fake one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec
import pytest

from tandem.cluster.fleet.gateway_records import GatewayHeartbeat, GatewayRecord
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.group.gateway_links import GatewayLinks
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.routing.route_table import RouteNote
from tandem.cluster.routing.router_view import RouterView
from tandem.cluster.routing.told_prefixes import prompt_heads
from tandem.cluster.state.keys import gateway as gateway_key
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.offload.kv.block_key import block_key, root_key
from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.blocks.kv_journal import KvJournal
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.kv_events import KvFacts
from tandem.workers.messages.request import GenerationRequest, ReplyTo, SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeFleet, FakeGroup, FakeHandle, serving

SECRET = "cd" * 32
FACTS = KvFacts("", "revision", "float32", 16, 8)
PROMPT = list(range(600))


def request(name: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))


def keys() -> list[bytes]:
    """The indexed keys of the prompt, whole."""
    key, found = root_key(FACTS.model_revision, FACTS.kv_dtype, None, ""), []
    for place in range((len(PROMPT) - 1) // 16):
        key = block_key(key, PROMPT[place * 16 : (place + 1) * 16])
        found.append(key)
    return found[7::8]


class Pool:
    """What the fake engine has on its device."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.journal = KvJournal(FACTS.index_blocks)
        self.kv = GroupKv(FACTS, self.journal, cast(BlockPool, self), None)

    def lookup(self, key: bytes) -> int | None:
        return 0 if key in self.keys else None

    def engine(self, sink: object) -> FakeEngine:
        engine = FakeEngine(sink)
        engine.kv = self.kv
        return engine

    def store(self, *new: bytes) -> None:
        for key in new:
            self.keys.add(key)
            self.journal.mark(key)


class Place:
    """A group and a gateway."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.group = FakeGroup(SECRET, "g:1", self.pool.engine)
        self.view = RouterView()
        self.errors: list[int] = []
        self.view.prefixes.on_error = self.errors.append
        handle, fleet = FakeHandle([self.group]), FakeFleet(serving())
        self.gateway = ServeDispatch(handle, fleet, SECRET, "127.0.0.1", "tandem", view=self.view)

    def follow(self) -> None:
        self.group.thread.follow([self.gateway.reply_to])

    def told(self) -> int:
        """Tokens of the prompt that the group is known to have."""
        return sum(self.view.prefixes.overlaps(request()).overlaps.get("g", (0, 0)))

    async def until_told(self, tokens: int) -> None:
        await until(lambda: self.told() == tokens)

    def store(self, *new: bytes) -> None:
        self.group.thread.call(lambda engine: self.pool.store(*new))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    await place.group.wait_opened()
    yield place
    await place.gateway.close()
    place.group.close()


async def test_a_gateway_that_has_sent_nothing_is_told_all_and_then_what_changes(place: Place) -> None:
    one, two, *rest = keys()
    place.store(one, two)
    place.follow()
    await place.until_told(256)
    place.store(*rest)
    await place.until_told(512)


async def test_a_lost_message_brings_all_again(place: Place) -> None:
    one, two, *rest = keys()
    place.store(one)
    place.follow()
    await place.until_told(128)
    take, lost = place.view.prefixes.take, []

    def lose_one(group: str, life: int, message: object, now_s: float) -> bool:
        place.view.prefixes.take = take  # type: ignore[method-assign]
        lost.append(message)
        return False

    place.view.prefixes.take = lose_one  # type: ignore[method-assign]
    place.store(two)
    await until(lambda: lost)
    await place.until_told(256)
    place.store(*rest)
    await place.until_told(512)


async def test_a_gateway_that_comes_again_under_its_address_is_told_all(place: Place) -> None:
    place.store(*keys())
    place.group.thread.follow([ReplyTo(place.gateway.reply_to.endpoint, "an earlier life")])
    place.follow()
    await place.until_told(512)


async def test_the_first_delta_is_compared_with_the_prediction(place: Place) -> None:
    place.store(*keys()[:2])
    place.follow()
    await place.until_told(256)
    place.group.engine.cached_tokens = 300
    part = RequestPart(request=request(), choices=[], first_choice=0)
    prefix = place.view.prefixes.overlaps(part.request)
    place.view.prefixes.note("r", prefix)
    part.begin_attempt()
    place.gateway.send(part, hint_of(part.request, overlaps=prefix.overlaps))
    await until(lambda: (part.look(), part.is_complete)[1])
    assert place.errors == [256 - 300]
    place.gateway.cancel(part)
    assert not place.view.prefixes._prompts


async def test_a_group_that_is_gone_is_forgotten(place: Place) -> None:
    place.store(*keys())
    place.follow()
    await place.until_told(512)
    place.gateway.look_after()
    assert place.told() == 512
    place.gateway._fleet.records.clear()
    place.gateway.look_after()
    assert place.told() == 0


def record(gateway: str, reply_to: ReplyTo | None, kind: str = "3.m") -> GatewayRecord:
    return GatewayRecord(
        gateway=gateway,
        host="h",
        pid=1,
        ready=True,
        in_flight=0,
        metrics=b"",
        tenant_metrics=b"",
        kind=kind,
        reply_to=reply_to,
    )


async def test_all_gateways_of_the_records_are_followed(redis: BackgroundClient) -> None:
    followed: list[set[str]] = []
    links = GatewayLinks(redis, "s", "3.m", lambda ends: followed.append({end.endpoint for end in ends}))
    await links.look()
    records = [
        record("a", ReplyTo("tcp://a", "1")),
        record("b", ReplyTo("tcp://b", "2")),
        record("old", None),
        record("other", ReplyTo("tcp://c", "3"), kind="3.another"),
    ]
    beats = {one.gateway: GatewayHeartbeat(redis, "s", lambda one=one: one) for one in records}
    for beat in beats.values():
        await beat.send_heartbeat()
    await links.look()
    await links.look()
    await beats["a"].leave()
    await links.look()
    assert followed == [set(), {"tcp://a", "tcp://b"}, {"tcp://a", "tcp://b"}, {"tcp://b"}]
    for beat in beats.values():
        await beat.leave()


async def test_a_record_that_cannot_be_read_hides_no_other(
    redis: BackgroundClient, caplog: pytest.LogCaptureFixture
) -> None:
    followed: list[list[str]] = []
    links = GatewayLinks(redis, "s", "3.m", lambda ends: followed.append([end.nonce for end in ends]))
    records = record("a", ReplyTo("tcp://a", "1")), record("b", None)
    beats = [GatewayHeartbeat(redis, "s", lambda one=one: one) for one in records]
    for beat in beats:
        await beat.send_heartbeat()
    await redis.command("SET", gateway_key("s", "b"), b"\x93torn")
    for _ in range(2):
        await links.look()
    assert followed == [["1"], ["1"]] and caplog.text.count("cannot be read") == 1
    for beat in beats:
        await beat.leave()


def test_records_of_earlier_releases_are_read() -> None:
    fields = msgspec.to_builtins(record("a", None))
    del fields["reply_to"]
    assert msgspec.convert(fields, GatewayRecord).reply_to is None


def test_the_keys_here_are_those_of_the_gateway() -> None:
    assert [key[:8] for key in keys()] == list(prompt_heads(request(), FACTS))


async def test_a_gateway_that_has_the_port_of_one_that_was_killed_is_followed_alone(redis: BackgroundClient) -> None:
    """The killed one's record is there for seconds. Two links by turns to one address would lose tokens."""
    followed: list[list[str]] = []
    links = GatewayLinks(redis, "s", "3.m", lambda ends: followed.append([end.nonce for end in ends]))
    beats = {}
    for name, nonce in (("z", "killed"), ("a", "new")):
        one = record(name, ReplyTo("tcp://a", nonce))
        beats[name] = GatewayHeartbeat(redis, "s", lambda one=one: one)
        await beats[name].send_heartbeat()
        await links.look()
    await beats["z"].leave()
    await links.look()
    assert followed == [["killed"], ["new"], ["new"]]
    await beats["a"].leave()


async def test_a_group_whose_kv_cannot_be_told_serves_on(place: Place) -> None:
    place.store(*keys())
    place.follow()
    await place.until_told(512)
    place.group.thread.call(lambda engine: setattr(place.pool.journal, "take_changes", None))
    await until(lambda: place.group.thread._kv_teller is None or place.group.failures)
    place.follow()
    part = RequestPart(request=request(), choices=[], first_choice=0)
    part.begin_attempt()
    place.gateway.send(part, hint_of(part.request))
    await until(lambda: part.look() or part.is_complete)
    assert part.is_complete and not place.group.failures
    place.gateway.cancel(part)


async def test_errors_of_the_index_end_no_request_and_no_watch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("found", "tick"):
        monkeypatch.setattr(place.view.prefixes, name, lambda *args: 1 / 0)
    part = RequestPart(request=request(), choices=[], first_choice=0)
    part.begin_attempt()
    place.gateway.send(part, hint_of(part.request))
    place.gateway.look_after()
    await until(lambda: (part.look(), part.is_complete)[1])
    place.gateway.cancel(part)


async def test_a_request_that_cannot_be_sent_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError("no room")

    def sent() -> None:
        part = RequestPart(request=request(), choices=[], first_choice=0, route_note=RouteNote())
        place.view.prefixes.note("r", place.view.prefixes.overlaps(part.request))
        part.begin_attempt()
        try:
            place.gateway.send(part, hint_of(part.request))
        finally:
            place.gateway.cancel(part)

    monkeypatch.setattr(FakeHandle, "remote", refuse)
    with pytest.raises(OSError, match="no room"):
        sent()
    place.gateway.refuse_all(RequestRefused("closing", code="service_unavailable", status=503))
    with pytest.raises(RequestRefused, match="closing"):
        sent()
    view, gateway = place.view, place.gateway
    kept = (view.prefixes._prompts, view.sent_to, view.notes, gateway._charges._charges, gateway._parts)
    assert not any(kept), kept
