"""Sender and receiver over real sockets: order, numbering, nonces, secrets, aborts, a gateway that goes away."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from tandem.cluster.wire.token_channel import TokenReceiver, TokenSender
from tandem.configs.limits import Ports
from tandem.workers.engine.thread.engine_thread import by_gateway
from tandem.workers.messages.channel import ChannelContext, bind_router
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import Abort, ReplyTo, TokenDelta

SECRET = "ab" * 32


def delta(request_id: str, first: int = 0, tokens: list[int] | None = None) -> TokenDelta:
    return TokenDelta(request_id=request_id, attempt=0, choice=0, first_position=first, token_ids=tokens or [1])


class End:
    """A receiver and what it got."""

    def __init__(self, secret: str = SECRET) -> None:
        self.got: list[tuple[bytes, list[TokenDelta]]] = []
        self.gaps: list[bytes] = []
        self.receiver = TokenReceiver(
            secret, "127.0.0.1", lambda s, d: self.got.append((s, d)), lambda s: self.gaps.append(s)
        )


@pytest.fixture
async def end() -> AsyncIterator[End]:
    end = End()
    yield end
    end.receiver.close()


@pytest.fixture
def poller() -> zmq.Poller:
    return zmq.Poller()


@pytest.fixture
def sender(poller: zmq.Poller) -> "object":
    sender = TokenSender(SECRET, "group:1", poller, time.monotonic)
    yield sender
    sender.close()


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_deltas_arrive_in_order_and_numbered(end: End, sender: TokenSender) -> None:
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    for i in range(2000):
        sender.send([(reply_to, [delta("r", i)])])
    await until(lambda: len(end.got) == 2000)
    assert [d[0].first_position for _, d in end.got] == list(range(2000))
    assert end.gaps == []
    assert {s for s, _ in end.got} == {b"group:1"}


async def test_a_missing_number_is_reported(end: End, sender: TokenSender) -> None:
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    sender.send([(reply_to, [delta("r", 0)])])
    sender._links[reply_to.endpoint].next_number += 1  # as if one had been dropped on the way
    sender.send([(reply_to, [delta("r", 2)])])
    await until(lambda: len(end.got) == 2)
    assert end.gaps == [b"group:1"]


async def test_a_forgotten_sender_that_speaks_again_is_no_gap(end: End, sender: TokenSender) -> None:
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    for i in range(2):
        sender.send([(reply_to, [delta("r", i)])])
    await until(lambda: len(end.got) == 2)
    end.receiver.forget(b"group:1")
    end.receiver.forget(b"nobody")
    for i in range(2, 4):
        sender.send([(reply_to, [delta("r", i)])])
    await until(lambda: len(end.got) == 4)
    assert end.gaps == []


async def test_words_for_an_earlier_life_are_dropped(end: End, sender: TokenSender) -> None:
    old = ReplyTo(end.receiver.reply_to.endpoint, "old")
    sender.open(old)
    sender.send([(old, [delta("r")])])
    sender.open(end.receiver.reply_to)  # a new gateway at the same address
    sender.send([(old, [delta("r")])])
    sender.send([(end.receiver.reply_to, [delta("new")])])
    await until(lambda: end.got)
    assert [d[0].request_id for _, d in end.got] == ["new"]


async def test_aborts_travel_back(end: End, sender: TokenSender, poller: zmq.Poller) -> None:
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    sender.send([(reply_to, [delta("r")])])
    await until(lambda: end.got)
    abort = Abort(request_id="r", attempt=0, keep_positions=3)
    end.receiver.send_abort(b"group:1", abort)
    end.receiver.send_abort(b"nobody", abort)  # a group that is gone
    got: list[Abort] = []
    await until(lambda: got.extend(sender.receive()) or got)
    assert got == [abort]
    assert sender.receive() == []


@pytest.mark.realtime
async def test_a_wrong_secret_gets_nothing_through(poller: zmq.Poller) -> None:
    end = End("cd" * 32)
    sender = TokenSender(SECRET, "group:1", poller, time.monotonic)
    sender.open(end.receiver.reply_to)
    sender.send([(end.receiver.reply_to, [delta("r")])])
    await asyncio.sleep(0.3)  # nothing comes: time for it to come
    assert end.got == []
    sender.close()
    end.receiver.close()


async def test_a_gateway_that_is_gone_is_noticed(sender: TokenSender, poller: zmq.Poller) -> None:
    end = End()
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    sender.send([(reply_to, [delta("r")])])
    await until(lambda: end.got)
    assert sender.lost(0.0) == []
    end.receiver.close()

    def noticed() -> bool:
        poller.poll(5)
        sender.receive()
        return sender.has_doubtful_link()

    await until(noticed)
    assert sender.lost(60.0) == []
    assert sender.lost(0.0) == [reply_to]
    assert not sender.has_doubtful_link()
    sender.send([(reply_to, [delta("r")])])  # to nobody: no error


def test_one_message_per_gateway() -> None:
    a, b = ReplyTo("tcp://a", "1"), ReplyTo("tcp://b", "2")
    homes = {"x": a, "y": b, "z": a, "lost": None}
    deltas = [delta(name) for name in ("x", "y", "lost", "z", "x")]
    gathered = {r.endpoint: [d.request_id for d in ds] for r, ds in by_gateway(deltas, lambda d: homes[d.request_id])}
    assert gathered == {"tcp://a": ["x", "z", "x"], "tcp://b": ["y"]}


def test_what_nobody_has_closed_does_not_hang_the_garbage_collector() -> None:
    """As after an error in the middle: a context and its open socket in one cycle."""

    class Left:
        def __init__(self) -> None:
            self.context, self.itself = ChannelContext(), self
            self.socket, _ = bind_router(self.context, SECRET)

    def leave() -> None:
        Left()
        with pytest.warns(ResourceWarning, match="Unclosed socket"):
            gc.collect()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(10)
    assert not leaving.is_alive()


async def test_kv_events_come_in_turn_and_by_themselves(sender: TokenSender) -> None:
    told: list[object] = []
    receiver = TokenReceiver(SECRET, "127.0.0.1", lambda s, d: None, told.append, on_kv=lambda s, m: told.append(m))
    reply_to = receiver.reply_to
    sender.open(reply_to)
    messages = [KvFacts(reply_to.nonce, "m", "d", 16, 8), *(KvEvents(reply_to.nonce, n) for n in (1, 5))]
    assert sender.tell(reply_to, KvEvents("an earlier life", 1))
    for message in messages:
        assert sender.tell(reply_to, message)
    sender.send([(reply_to, [delta("r")])])
    await until(lambda: len(told) == 3)
    assert told == messages, "a number that is missing among them is no gap of tokens"
    assert not sender.tell(ReplyTo(reply_to.endpoint, "another life"), messages[0])
    assert not sender.tell(ReplyTo("tcp://127.0.0.1:1", "nobody"), messages[0])
    receiver.close()


async def test_a_gateway_asks_for_a_snapshot(end: End, sender: TokenSender) -> None:
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    sender.send([(reply_to, [delta("r")])])
    await until(lambda: end.got)
    end.receiver.ask_kv(b"group:1")
    end.receiver.ask_kv(b"group:1")
    asked: list[ReplyTo] = []
    await until(lambda: sender.receive() or asked.extend(sender.need_snapshot()) or asked)
    assert set(asked) == {reply_to} and sender.need_snapshot() == []


async def test_a_link_that_is_there_again_needs_a_snapshot(sender: TokenSender, poller: zmq.Poller) -> None:
    end = End()
    reply_to = end.receiver.reply_to
    sender.open(reply_to)
    sender.send([(reply_to, [delta("r")])])
    await until(lambda: end.got)
    sender.receive()
    end.receiver.close()

    def is_doubtful() -> bool:
        poller.poll(5)
        sender.receive()
        return sender.has_doubtful_link()

    await until(is_doubtful)
    assert not sender.tell(reply_to, KvEvents(reply_to.nonce, 1)) and sender.need_snapshot() == []
    context, port = ChannelContext(), int(reply_to.endpoint.rpartition(":")[2])
    again, _ = bind_router(context, SECRET, ports=Ports(port, port))
    await until(lambda: not is_doubtful())
    assert sender.need_snapshot() == [reply_to] and sender.tell(reply_to, KvEvents(reply_to.nonce, 1))
    again.close(0)
    context.term()
