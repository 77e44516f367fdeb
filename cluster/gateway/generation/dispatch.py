"""The gateway's Backend: requests go out through the Serve handle, tokens come back over the token channel.

Each request has an owner task that holds its handle call until the end, so that nothing depends on an await inside a
handler that a disconnect cancels. When a group dies the request goes to another one with the tokens delivered so far,
and the reader sees neither gap nor duplicate; a request that loses two groups is refused as poisoned.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tandem.cluster.adapters.adapter_metrics import add_adapters
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.fleet.engine_metrics import Families, add_engines
from tandem.cluster.fleet.fleet_view import FleetView, channel_name
from tandem.cluster.gateway.generation.token_stream import RequestStream
from tandem.cluster.wire.token_channel import GROUP_ENDED, GROUP_LOST, TokenReceiver
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, TokenDelta

log = logging.getLogger("tandem.groups")
GAP_S = 1.0
SILENT_S = 3.5
"""A group whose record is missing (3 s after its last heartbeat) is lost when it has sent no token for this long."""
CANCEL_AFTER_S = 5.0
NO_GROUP_S = 30.0
MAX_GROUPS_LOST = 2
REDISPATCH_S = 0.2


class Call(Protocol):
    """One handle call in flight."""

    async def answer(self) -> bytes:
        """The coordinator's answer. Raises when it, or the connection to it, broke."""
        ...

    def cancel(self) -> None: ...


class Caller(Protocol):
    """Makes handle calls; Serve's router chooses the group."""

    def call(self, payload: bytes, missing: Sequence[str] = ()) -> Call:
        """`missing`: groups to choose only when there is no other."""
        ...


class _Loss(NamedTuple):
    """Why an attempt failed. `ran`: the request may have been the cause."""

    message: str
    ran: bool = True


class _Attempt:
    """One dispatch of a request: its number, its call, the group that runs it."""

    def __init__(self, stream: RequestStream, request: GenerationRequest, call: Call, began_s: float) -> None:
        self.stream = stream
        self.began_s = began_s
        self.request = request
        self.call = call
        self.sender: bytes | None = None
        self.held_aborts: list[Abort] = []
        self.aborted = False
        self.any_abort = False
        self.lost = asyncio.Event()
        self.why_lost = "a message was missing for 1 s"


class GroupClient:
    """All groups of the service, for one gateway. Create and use on one event loop; close() at the end."""

    def __init__(
        self,
        caller: Caller,
        fleet: FleetView,
        secret: str,
        host: str,
        metrics_prefix: str,
        adapters: Callable[[], AdapterService | None] = lambda: None,
    ) -> None:
        self._caller = caller
        self._fleet = fleet
        self._metrics_prefix = metrics_prefix
        self._adapters = adapters
        self._receiver = TokenReceiver(secret, host, self._on_deltas, self._on_gap)
        self._attempts: dict[str, _Attempt] = {}
        self._owners: set[asyncio.Task[None]] = set()
        self._last_message_s: dict[bytes, float] = {}
        self._group_seen = False
        self._refusal: RequestRefused | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Ended).decode
        self._loop = asyncio.get_running_loop()
        self.on_moved: Callable[[], None] = lambda: None
        """Called for each request that goes on with another group."""

    async def submit(self, request: GenerationRequest) -> RequestStream:
        """See cluster/gateway/generation/backend.py."""
        if self._refusal is not None:
            raise self._refusal
        if not self._may_dispatch():
            raise RequestRefused("no worker group is ready", code="service_unavailable", status=503)
        if request.request_id in self._attempts:
            raise RequestRefused("this request id is in use", code="internal_error", status=500)
        stream = RequestStream(request, self._on_close)
        attempt = self._dispatch(stream, request)
        task = self._loop.create_task(self._own(attempt), name=f"own {request.request_id}")
        self._owners.add(task)
        task.add_done_callback(self._owners.discard)
        return stream

    async def abort(self, abort: Abort) -> None:
        """See cluster/gateway/generation/backend.py."""
        attempt = self._attempts.get(abort.request_id)
        if attempt is None:
            return
        attempt.aborted |= abort.choice is None
        if attempt.sender is None and abort.choice is None and abort.keep_positions is None:
            attempt.stream.finish(None)
            attempt.call.cancel()  # its group is not known yet, and its answer is no longer needed
        else:
            self._send_abort(attempt, abort)

    def ready(self) -> bool:
        return any(record.is_ready for record in self._fleet.records.values())

    def has_requests(self) -> bool:
        return bool(self._attempts)

    def load(self) -> Mapping[str, float | int | str]:
        records = list(self._fleet.records.values())
        return {
            "num_requests_running": sum(r.running for r in records),
            "num_requests_waiting": sum(r.waiting for r in records),
            "outstanding_tokens": sum(r.outstanding_tokens for r in records),
            "kv_cache_usage_perc": max((r.kv_used for r in records), default=0.0),
            "groups": len(records),
            "requests_in_this_gateway": len(self._attempts),
            "redis": "away" if self._fleet.redis_unavailable else "here",
        }

    async def metrics(self, *, with_tenants: bool) -> str:
        records, redis_unavailable = list(self._fleet.records.values()), self._fleet.redis_unavailable
        adapter_service = self._adapters()

        def text() -> str:
            families = Families(self._metrics_prefix)
            add_engines(families, records, redis_unavailable, with_tenants=with_tenants)
            if adapter_service is not None:
                add_adapters(families, records, adapter_service, with_tenants=with_tenants)
            return families.text()

        return await asyncio.to_thread(text)  # a tenth of a second with a thousand tenants

    def refuse_all(self, refusal: RequestRefused) -> None:
        """Ends every stream with `refusal`, after the tokens delivered, and refuses later requests."""
        self._refusal = refusal
        for attempt in list(self._attempts.values()):
            attempt.stream.fail(refusal)

    def lose_silent(self) -> None:
        """Moves the streams of groups without heartbeats and tokens, when there is another group. A group that sends
        tokens works, even if its heartbeats do not reach Redis."""
        if not self._any_serving():
            return
        silent_before_s = self._loop.time() - SILENT_S
        for record in self._fleet.missing_for():
            sender = channel_name(record.group, record.life).encode()
            if self._last_message_s.get(sender, silent_before_s) > silent_before_s:
                continue
            for attempt in self._attempts.values():
                if attempt.sender == sender and not attempt.lost.is_set():
                    attempt.why_lost = f"group {record.group} gives no sign of life"
                    attempt.lost.set()

    async def close(self) -> None:
        """Ends every stream as lost and every owner task."""
        for attempt in list(self._attempts.values()):
            attempt.stream.fail(GroupLost("the gateway is shutting down"))
        owners = list(self._owners)
        for task in owners:
            task.cancel()
        await asyncio.gather(*owners, return_exceptions=True)
        self._receiver.close()

    def _may_dispatch(self) -> bool:
        """True once there may be a group: Serve's router has the groups even when Redis has not."""
        self._group_seen = self._group_seen or self._any_serving()
        return self._group_seen or self._fleet.redis_unavailable

    def _any_serving(self) -> bool:
        return any(record.state == "serving" for record in self._fleet.records.values())

    # ---- one request ---------------------------------------------------------------------------------------------

    def _dispatch(self, stream: RequestStream, request: GenerationRequest) -> _Attempt:
        request = msgspec.structs.replace(request, reply_to=self._receiver.reply_to)
        missing = [record.group for record in self._fleet.missing_for()]
        call = self._caller.call(self._encode(request), missing)
        attempt = _Attempt(stream, request, call, self._loop.time())
        self._attempts[request.request_id] = attempt
        return attempt

    async def _own(self, attempt: _Attempt) -> None:
        """Until the request has ended: waits for its call, moves it when its group is lost."""
        stream, losses = attempt.stream, 0
        try:
            while True:
                loss = await self._outcome(attempt)
                if loss is None or stream.is_over:
                    return
                if attempt.aborted:
                    stream.finish(None)
                    return
                losses += loss.ran
                attempt.call.cancel()  # a group that is given up for a gap still works on it
                log.warning("request %s lost its group: %s", attempt.request.request_id, loss.message)
                if losses >= MAX_GROUPS_LOST:
                    message = f"{losses} groups were lost while they ran this request"
                    stream.fail(RequestRefused(message, code="request_poisoned", status=500))
                    return
                if await stream.wait_over(REDISPATCH_S):  # by then the router knows which group is gone
                    return
                attempt.call.cancel()  # a group that lives after all stops
                attempt = self._dispatch(stream, self._resumption(attempt))
                self.on_moved()
        finally:
            attempt.call.cancel()
            self._attempts.pop(attempt.request.request_id, None)

    async def _outcome(self, attempt: _Attempt) -> _Loss | None:
        """None when the request has ended one way or the other; else how its group was lost."""
        answer = self._loop.create_task(attempt.call.answer())
        lost = self._loop.create_task(attempt.lost.wait())
        try:
            await self._first_of(attempt, answer, lost)
            if not answer.done():
                return _Loss(attempt.why_lost) if attempt.lost.is_set() else None
            try:
                ended = self._decode(answer.result())
            except asyncio.CancelledError:  # of the call, by an abort; this task's own would be raised above
                return _Loss("its call was cancelled")
            except Exception as error:  # whatever way Ray or Serve reports a dead replica
                return _Loss(f"{type(error).__name__}: {error}".splitlines()[0])
            return await self._settle(attempt, ended)
        finally:
            answer.cancel()
            lost.cancel()

    async def _first_of(self, attempt: _Attempt, answer: "asyncio.Task[bytes]", lost: "asyncio.Task[bool]") -> None:
        """Waits for the answer or a loss; while no group at all is there, gives up after a while."""
        while True:
            done, _ = await asyncio.wait({answer, lost}, timeout=NO_GROUP_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if attempt.sender is None and not self._any_serving():
                refused = RequestRefused("no worker group became ready", code="service_unavailable", status=503)
                attempt.stream.fail(refused)
                return

    async def _settle(self, attempt: _Attempt, ended: Ended) -> _Loss | None:
        """The coordinator has answered: waits for the deltas that are still on their way."""
        stream = attempt.stream
        if ended.refused is not None:
            status, code, param, message = ended.refused
            if code in (GROUP_LOST, GROUP_ENDED):
                return _Loss(message, ran=code == GROUP_LOST)
            stream.fail(RequestRefused(message, code=code, status=status, param=param))
            return None
        # An aborted request has no last delta: the answer has its usage. Else the answer overtook the last delta.
        known = attempt.any_abort and stream.has_all(ended)
        if known or await stream.wait_over(GAP_S) or attempt.aborted or stream.has_all(ended):
            stream.finish(ended)
            return None
        return _Loss("its last tokens did not arrive within 1 s")

    def _resumption(self, attempt: _Attempt) -> GenerationRequest:
        """The request for another group: tokens delivered count as generated, and after a first token the queue timeout
        no longer applies."""
        delivered, left_s = attempt.stream.delivered, attempt.request.deadline_s
        if left_s is not None:
            left_s = None if any(delivered) else max(0.0, left_s - (self._loop.time() - attempt.began_s))
        return msgspec.structs.replace(
            attempt.request,
            attempt=attempt.request.attempt + 1,
            resume_token_ids=[list(tokens) for tokens in delivered],
            deadline_s=left_s,
        )

    # ---- deltas and aborts ---------------------------------------------------------------------------------------

    def _on_deltas(self, sender: bytes, deltas: list[TokenDelta]) -> None:
        if sender in self._last_message_s:
            self._last_message_s[sender] = self._loop.time()
        by_request: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, own in by_request.items():
            attempt = self._attempts.get(request_id)
            if attempt is None or own[0].attempt != attempt.request.attempt:
                continue  # late deltas of a request that has ended or moved
            if attempt.sender is None:
                self._learn_sender(attempt, sender)
            if not attempt.stream.take(own):
                self._loop.call_later(GAP_S, attempt.lost.set)

    def _learn_sender(self, attempt: _Attempt, sender: bytes) -> None:
        attempt.sender = sender
        if sender not in self._last_message_s:
            self._meet(sender)
        held, attempt.held_aborts = attempt.held_aborts, []
        finished = [i for i, done in enumerate(attempt.stream.finished) if done]
        for choice in finished:  # of a resumed request: ended before, by a stop string perhaps
            kept = len(attempt.stream.delivered[choice])
            held.append(Abort(request_id=attempt.request.request_id, attempt=0, choice=choice, keep_positions=kept))
        for abort in held:
            self._send_abort(attempt, abort)

    def _meet(self, sender: bytes) -> None:
        """Registers a coordinator at its first message, and forgets those that have left the fleet."""
        living = {channel_name(r.group, r.life).encode() for r in self._fleet.records.values()}
        living |= {attempt.sender for attempt in self._attempts.values() if attempt.sender is not None}
        for gone in self._last_message_s.keys() - living:
            self._receiver.forget(gone)
            del self._last_message_s[gone]
        self._last_message_s[sender] = self._loop.time()

    def _on_gap(self, sender: bytes) -> None:
        """A message of this sender was lost: its content is unknown, so all streams of the sender count as lost."""
        log.warning("a message from %s is missing", sender.decode(errors="replace"))
        for attempt in self._attempts.values():
            if attempt.sender == sender:
                self._loop.call_later(GAP_S, attempt.lost.set)

    def _send_abort(self, attempt: _Attempt, abort: Abort) -> None:
        attempt.any_abort = True
        abort = msgspec.structs.replace(abort, attempt=attempt.request.attempt)
        if attempt.sender is None:
            attempt.held_aborts.append(abort)
        else:
            self._receiver.send_abort(attempt.sender, abort)

    def _on_close(self, stream: RequestStream) -> None:
        """The reader left. Before its end: stop the work; by cancelling the call when the group is not known yet."""
        attempt = self._attempts.get(stream.request.request_id)
        if attempt is None or attempt.stream is not stream or stream.complete:
            return
        attempt.aborted = True
        if attempt.sender is None:
            attempt.call.cancel()
            return
        self._send_abort(attempt, Abort(request_id=stream.request.request_id, attempt=0))
        self._loop.call_later(CANCEL_AFTER_S, attempt.call.cancel)
