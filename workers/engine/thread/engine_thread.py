"""The engine's thread: takes requests in, steps the engine, sends tokens out; sleeps when there is no work.

    open engine -> EngineLoop: [ inbox and aborts -> turn -> one message per receiver ]* -> lost | stopped

Owned by a group's coordinator, by cluster/cli/batch/local_dispatch.py for batches without a service, and by LLM
(workers/offline/local_engine.py): their threads use submit(), abort() and call(). Everything else in here, the engine
and its executor included, is touched by this thread only. Next: workers/engine/engine_loop.py.
"""

import logging
import math
import re
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import EngineLoop
from tandem.workers.engine.thread.kv_teller import KvLinks, KvTeller
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.refusals import GROUP_ENDED, GROUP_LOST, refused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, Loss, ReplyTo, TokenDelta

log = logging.getLogger("tandem.engine")
GATEWAY_LOST_AFTER_S = 5.0
REPORT_PERIOD_S = 0.25
FLUSH_S = 2.0
"""Seconds for KV that is on its way to host memory or disk when the group stops."""
ENDED = "the group is shutting down"
OUT_OF_MEMORY = re.compile("out of ?memory", re.IGNORECASE)

RequestKey = tuple[str, int]
OnEnded = Callable[[Ended], None]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Something to do to the engine between two steps; it must be short and raise nothing."""

    run: Callable[[Engine], None]


class EngineListener(Protocol):
    """Hears of the engine of a thread. Called on that thread."""

    def opened(self) -> None:
        """Called when the engine takes requests."""
        ...

    def stats(self, stats: EngineStats, residency: Mapping[str, str]) -> None:
        """Called every REPORT_PERIOD_S, and when there is no work any more. residency: of adapters, by digest."""
        ...

    def failed(self, error: Exception, opened: bool) -> None:
        """Called when the engine has stopped by itself, or could not be opened; its requests have been answered."""
        ...


class TokenChannel(Protocol):
    """The way of tokens to those that have asked for them, by the `reply_to` of requests: a TokenSender to gateways, or
    the caller's event loop."""

    def open(self, reply_to: ReplyTo) -> None:
        """Notes that tokens will go there."""
        ...

    def send(self, batches: Iterable[tuple[ReplyTo, list[TokenDelta]]]) -> None:
        """Sends one step's deltas."""
        ...

    def receive(self) -> list[Abort]:
        """Returns the aborts that have come back."""
        ...

    def has_doubtful_link(self) -> bool:
        """Returns whether any receiver may be gone."""
        ...

    def lost(self, after_s: float) -> list[ReplyTo]:
        """Returns the receivers that have been gone for so long, and forgets them."""
        ...

    def close(self) -> None:
        """Called at the end, on the thread."""
        ...


class EngineThread(threading.Thread):
    """Runs one engine until stop() or until it fails. open_channel: makes the way of its tokens, on this thread, which
    waits in the poller. flush_s: the most seconds for KV that is on its way to host memory or disk at the end."""

    def __init__(
        self,
        listener: EngineListener,
        open_channel: Callable[[zmq.Poller, Callable[[], float]], TokenChannel],
        clock: Callable[[], float] = time.monotonic,
        *,
        flush_s: float = FLUSH_S,
    ) -> None:
        super().__init__(name="tandem-engine", daemon=True)
        self._listener = listener
        self._open_channel = open_channel
        self._clock = clock
        self._flush_s = flush_s
        self._inbox: deque[tuple[GenerationRequest, OnEnded] | Abort | EngineCall] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = False
        self._is_planned = False
        self._over = False
        self._lost: str | None = None
        self._live: dict[RequestKey, tuple[GenerationRequest, OnEnded]] = {}
        self._unheard: set[RequestKey] = set()
        """Requests whose calls were cancelled: their counts go out over the token channel."""
        self._reported_at_s = 0.0
        self._engine_loop: EngineLoop | None = None
        self._kv_teller: KvTeller | None = None

    def start_engine(self, open_engine: Callable[["EngineThread"], Engine], close_engine: Callable[[], None]) -> None:
        """Starts the thread, which opens its engine with itself as OutputSink, and closes it at the end."""
        self._open_engine = open_engine
        self._close_engine = close_engine
        self.start()

    # ---- called from other threads -------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, on_ended: OnEnded) -> None:
        """Queues a request; `on_ended` is called once, on the engine's thread."""
        self.submit_all([(request, on_ended)])

    def submit_all(self, requests: Iterable[tuple[GenerationRequest, OnEnded]]) -> None:
        """Queues requests that are taken in together, before the next step."""
        self._inbox.extend(requests)
        self._wake()
        if self._over:
            self._lose_inbox(ENDED)

    def abort(self, abort: Abort) -> None:
        """Ends a request whose call was cancelled. Its gateway gets the count as a last delta, if it still listens."""
        self._inbox.append(abort)
        self._wake()

    def call(self, run: Callable[[Engine], None]) -> None:
        """Has `run` called with the engine, on its thread; never, when that ends before."""
        self._inbox.append(EngineCall(run))
        self._wake()

    def follow(self, gateways: Sequence[ReplyTo]) -> None:
        """Tells these gateways of the KV of the engine from now on, and no others; nobody if it has no KvJournal."""

        def follow(engine: Engine) -> None:
            self._tell_kv(lambda teller: teller.follow(gateways))

        self.call(follow)

    def lose(self, message: str) -> None:
        """A rank has died or is frozen: the thread ends with GroupLost, also without work, when it asks no rank for
        anything."""
        self._lost = message
        self._wake()

    def expect_end(self) -> None:
        """A rank was told to end: the loss that follows is as planned, and requests are handed over."""
        self._is_planned = True

    @property
    def is_planned(self) -> bool:
        """True if the thread's end is, or would be, as planned."""
        return self._is_planned or self._stopping

    def stalled_s(self) -> float:
        """Seconds for which no step has finished although there is work; 0 without work."""
        return 0.0 if self._engine_loop is None else self._engine_loop.stalled_s()

    def has_worked(self) -> bool:
        """Returns whether any step has been made since the last call."""
        return self._engine_loop is not None and self._engine_loop.has_worked()

    def stuck_s(self) -> float:
        """Seconds for which the thread itself has not come round although there is work; slow ranks do not hold it."""
        return 0.0 if self._engine_loop is None else self._engine_loop.stuck_s()

    def stop(self) -> None:
        """Ends the thread after its current step; unfinished requests are handed over: their gateways continue them
        in other groups."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except OSError:
            pass  # the pipe is full (it will wake anyway) or closed (the thread is gone)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        opened = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._channel = self._open_channel(self._poller, self._clock)
        try:
            self._engine = self._open_engine(self)
            opened = True
            if self._engine.kv is not None and isinstance(self._channel, KvLinks):
                self._kv_teller = KvTeller(self._engine.kv, self._channel, self._clock)
            self._engine_loop = EngineLoop(self._engine, self, self._clock)
            self._publish(self._clock())
            self._listener.opened()
            self._engine_loop.run(lambda: self._stopping)
            self._engine_loop.flush(self._flush_s)
        except Exception as error:
            self._is_planned |= isinstance(error, GroupLost) and error.is_planned
            self._lose_inbox(ENDED)
            if self._is_planned:
                log.warning("the group ends: %s", error)
                self._hand_over()
            else:
                log.exception("the engine stopped") if opened else log.error("the engine did not start: %s", error)
                self._lose_live(f"the group stopped: {error}", self._losses(error) if opened else {})
            self._listener.failed(error, opened)
        finally:
            self._over = True
            self._lose_inbox(ENDED)
            self._hand_over()
            self._channel.close()
            if opened:
                self._engine.close()
            self._close_engine()

    def _tell_kv(self, tell: Callable[[KvTeller], None]) -> None:
        """Gateways are told, if any follow. An error there costs no request: they are told no more, and forget what
        they were told."""
        try:
            if self._kv_teller is not None:
                tell(self._kv_teller)
        except Exception:
            log.exception("gateways are told nothing more of the KV of this group")
            self._kv_teller = None

    # ---- Inbox of the engine's loop ----

    def take(self, engine: Engine) -> None:
        """Applies what has come from the replica and from gateways; reports from time to time. GroupLost once a rank
        is lost."""
        if self._lost is not None:
            raise GroupLost(self._lost)
        self._take_inbox(engine)
        self._take_channel(engine)
        self._tell_kv(KvTeller.tell)
        now_s = self._clock()
        if now_s - self._reported_at_s >= REPORT_PERIOD_S:
            self._publish(now_s)

    def wait(self, timeout_s: float | None) -> None:
        """Until a request, an abort or a change of a link arrives. Reports first if there is no work."""
        if self._stopping or self._lost is not None:
            return  # take() may have read the byte that would wake this
        if self._engine_loop is not None and not self._engine_loop.is_busy:
            self._publish(self._clock())
        if self._channel.has_doubtful_link():
            timeout_s = 1.0 if timeout_s is None else min(1.0, timeout_s)
        if self._kv_teller is not None and (kv_s := self._kv_teller.wait_s()) < math.inf:
            timeout_s = kv_s if timeout_s is None else min(kv_s, timeout_s)
        self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))

    def _take_inbox(self, engine: Engine) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Abort):
                self._unheard |= {(item.request_id, item.attempt)} & self._live.keys()
                engine.abort(item)
            elif isinstance(item, EngineCall):
                item.run(engine)
            else:
                self._add(engine, *item)

    def _add(self, engine: Engine, request: GenerationRequest, on_ended: OnEnded) -> None:
        key = (request.request_id, request.attempt)
        try:
            if key in self._live:
                raise RequestRefused("this request is already running", code="internal_error", status=500)
            if request.reply_to is not None:
                self._channel.open(request.reply_to)
            self._live[key] = (request, on_ended)
            engine.add_request(request)
        except RequestRefused as error:
            if self._live.get(key, (None, None))[0] is request:
                del self._live[key]
            on_ended(refused(request, error.status, error.code, error.param, str(error)))
        except GroupLost:
            raise
        except Exception:
            log.exception("request %s cannot be taken in", request.public_id)
            self._live.pop(key, None)
            on_ended(refused(request, 500, "internal_error", None, "The request failed in the engine."))

    def _take_channel(self, engine: Engine) -> None:
        for abort in self._channel.receive():
            engine.abort(abort)
        if self._channel.has_doubtful_link():
            for reply_to in self._channel.lost(GATEWAY_LOST_AFTER_S):
                log.warning("the gateway at %s is gone: its requests are aborted", reply_to.endpoint)
                for request, _ in list(self._live.values()):
                    if request.reply_to == reply_to:
                        engine.abort(Abort(request_id=request.request_id, attempt=request.attempt))

    # ---- OutputSink of the engine ----

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Implements OutputSink."""
        self._channel.send(by_gateway(deltas, self._reply_to_of))

    def begun(self, request: GenerationRequest, cached_tokens: int) -> None:
        """Implements build_engine()'s on_begun: tells the gateway that the request has a row, with a delta without
        tokens."""
        delta = TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=0,
            first_position=0,
            token_ids=[],
            cached_tokens=cached_tokens,
        )
        self.deltas([delta])

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Implements OutputSink."""
        key = (ended.request_id, ended.attempt)
        if key in self._unheard:
            self._unheard.discard(key)
            self.deltas([last_word(ended)])
        live = self._live.pop(key, None)
        if live is not None:
            live[1](ended)

    # ---- inside ----

    def _reply_to_of(self, delta: TokenDelta) -> ReplyTo | None:
        live = self._live.get((delta.request_id, delta.attempt))
        return live[0].reply_to if live is not None else None

    def _losses(self, error: Exception) -> dict[str, Loss]:
        """Returns what this end of the engine says of each request. Memory runs out by what all rows have, and
        transfers are of no step: then no row is to blame alone."""
        try:
            losses = self._engine.losses()
        except Exception:
            log.exception("nobody knows what was in the last step")
            return {}
        if OUT_OF_MEMORY.search(str(error)) or (isinstance(error, GroupLost) and not error.by_step):
            losses = {name: "bystander" if loss == "bystander" else "excused" for name, loss in losses.items()}
        return losses

    def _lose_live(self, message: str, losses: Mapping[str, Loss]) -> None:
        """Answers the engine's requests as lost with this group."""
        for request, on_ended in list(self._live.values()):
            loss = losses.get(request.request_id, "unknown")
            on_ended(refused(request, 503, GROUP_LOST, None, message, loss))
        self._live.clear()

    def _hand_over(self) -> None:
        """Answers the engine's requests as those of a group that ends as planned."""
        for request, on_ended in list(self._live.values()):
            on_ended(refused(request, 503, GROUP_ENDED, None, ENDED))
        self._live.clear()

    def _lose_inbox(self, message: str) -> None:
        """Answers what nobody will take in any more; also from the submitting thread, once this one has ended."""
        while self._inbox:
            try:
                item = self._inbox.popleft()
            except IndexError:
                return  # the other thread was faster
            if isinstance(item, tuple):
                item[1](refused(item[0], 503, GROUP_ENDED, None, message))

    def _publish(self, now_s: float) -> None:
        self._reported_at_s = now_s
        self._listener.stats(self._engine.stats(), self._engine.adapter_residency())


def by_gateway(
    deltas: Iterable[TokenDelta], reply_to_of: Callable[[TokenDelta], ReplyTo | None]
) -> list[tuple[ReplyTo, list[TokenDelta]]]:
    """Groups one step's deltas by receiver, in order. Deltas without a `reply_to` are left out."""
    gathered: dict[ReplyTo, list[TokenDelta]] = defaultdict(list)
    for delta in deltas:
        reply_to = reply_to_of(delta)
        if reply_to is not None:
            gathered[reply_to].append(delta)
    return list(gathered.items())


def last_word(ended: Ended) -> TokenDelta:
    """The count of a request whose answer nobody waits for, as a delta without tokens."""
    return TokenDelta(
        request_id=ended.request_id,
        attempt=ended.attempt,
        choice=0,
        first_position=ended.positions[0] if ended.positions else 0,
        token_ids=[],
        usage=ended.usage,
        course=ended.course,
    )
