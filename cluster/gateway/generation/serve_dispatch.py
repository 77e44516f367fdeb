"""ServeDispatch: requests go out through the Serve handle, tokens come back over the token channel.

It knows which group runs which attempt, and ends the attempts of groups that are lost, silent or on their way out. What
follows from an end is the Generation's decision. One event loop only. Next: routing/router/serve_router.py picks the
group; in the group cluster/group/coordinator.py; here part.py, which takes the deltas.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from tandem.cluster.adapters.adapter_metrics import add_adapters
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.fleet.engine_metrics import Families, add_engines, add_groups
from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord, channel_name, read_channel_name
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.generation.dispatch import DrainState
from tandem.cluster.gateway.generation.draining_groups import DrainingGroups, Drains
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.tasks import Aside
from tandem.cluster.ray_private.separate_calls import call_separately
from tandem.cluster.routing.route_charges import RouteCharges
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteTable
from tandem.cluster.routing.router_view import RouterView
from tandem.cluster.scaling.scaling_watch import ScalingWatch
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.wire.token_channel import TokenReceiver
from tandem.cluster.wire.version import OtherVersion, kind_of, with_version, without_version
from tandem.configs.limits import ANY_PORTS, Ports
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.refusals import GROUP_UNUSABLE, lost, refused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, Loss, TokenDelta

log = logging.getLogger("tandem.groups")
GAP_S = 1.0
SILENT_S = 3.5
"""A group whose record is missing (3 s after its last heartbeat) is lost when it has sent no token for this long."""
UNREACHED_S = 10.0
"""A call that has not arrived for this long, although its group lives, will not."""
CANCEL_AFTER_S = 5.0
LEAST_HOLD_S = 30.0
WAKING_S = 300.0
"""Time for a load in a service that may sleep, at least: a node may have to be launched for it, which no group has
seen. Not while one could not start."""
WHILE_LOADING = 3.0
"""Times the usual hold: while a group is seen to load."""
MOST_BY_VALUE = 2**20
"""Bytes of a request that travel in the call itself. Replicas take at most 4 MiB there; the rest of the message is
small. Larger ones go through Ray's object store, which costs milliseconds and has no limit."""


class ServeDispatch:
    """All groups of the service, for one gateway. Create and use on one event loop; close() at the end.

    handle: Serve's, of the coordinator deployment; its router (cluster/routing) picks the group by the hint. adapters:
    whose metrics are shown. draining: groups that Serve is taking down. model: digest of the gateway's. view: of this
    process's router. may_sleep: there may be no group, and then the first request brings one. load_s: what a group took
    to load last, 0 if that is not known. scaling: shows why there are as many groups as there are.
    """

    def __init__(
        self,
        handle: Any,
        fleet: FleetView,
        secret: str,
        host: str,
        metrics_prefix: str,
        adapters: Callable[[], AdapterService | None] = lambda: None,
        draining: DrainingGroups | None = None,
        model: str = "",
        view: RouterView | None = None,
        ports: Ports = ANY_PORTS,
        may_sleep: bool = False,
        load_s: float = 0.0,
        scaling: ScalingWatch | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._decode = msgspec.msgpack.Decoder(Ended).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._model = model
        self._kind = kind_of(model)
        self._by_value = handle.options(method_name="generate", _by_reference=False)
        self._by_reference = handle.options(method_name="generate", _by_reference=True)
        self._fleet = fleet
        self._metrics_prefix = metrics_prefix
        self._adapters = adapters
        self._draining = draining if draining is not None else DrainingGroups(lambda: None, 0.0, self.loop.time)
        self.view = view if view is not None else RouterView()
        self._charges = RouteCharges(lambda request_id, tokens: self.view.correct(request_id, tokens))
        self._receiver = TokenReceiver(secret, host, self._on_deltas, self._on_gap, ports, self._on_kv)
        self.reply_to = self._receiver.reply_to
        self._parts: dict[str, RequestPart] = {}
        self._unusable: set[str] = set()
        self._last_message_s: dict[bytes, float] = {}
        self._longest_load_s = load_s
        self._may_sleep = may_sleep
        self._scaling = scaling
        self._drains = Drains(fleet, drain_s)
        self._refusal: RequestRefused | None = None

    # ---- Dispatch ------------------------------------------------------------------------------------------------
    # Serve's router has the groups even when Redis has not. Requests are held in its queue while there is none; at the
    # start too, as another gateway may know the first one already. Where there need be none it has Serve start one.

    def send(self, part: RequestPart, hint: RouteHint) -> None:
        if self._refusal is not None:
            raise self._refusal
        reply_to = self.reply_to
        request = part.request = msgspec.structs.replace(part.request, reply_to=reply_to)
        self._parts[request.request_id] = part  # before all that cancel() takes back
        self._charges.begin(request)
        hint = self._routed(request, hint)
        payload = self._encode(request)
        method = self._by_value if len(payload) <= MOST_BY_VALUE else self._by_reference
        self.view.sent_to[request.request_id] = None
        if part.route_note is not None:
            self.view.notes[request.request_id] = part.route_note
        part.call = call_separately(lambda: method.remote(with_version(payload, model=self._model), hint=hint))
        part.answer = Aside(self._answer(part), part.news.set)

    def _routed(self, request: GenerationRequest, hint: RouteHint) -> RouteHint:
        """The hint as the router gets it: with the cost, and all groups that are to be avoided."""
        missing = (record.group for record in self._fleet.missing_for())
        avoid = {*hint.avoid, *missing, *self._draining.groups, *self._unusable}
        cost, gateway = self._charges.cost(request), self._receiver.reply_to.nonce
        return msgspec.structs.replace(hint, cost_tokens=cost, gateway=gateway, avoid=tuple(sorted(avoid)))

    def abort(self, abort: Abort) -> None:
        """Implements Dispatch. While the group is not known, an abort of one choice is held, and the whole request is
        ended by cancelling the call: the group then sends its count as a last delta, if it has the request."""
        part = self._parts.get(abort.request_id)
        if part is None:
            return  # close() has cancelled it
        if part.sender is not None:
            self._receiver.send_abort(part.sender, abort)
            return
        part.held_aborts.append(abort)
        if abort.choice is None and abort.keep_positions is None:
            _drop(part)

    def cancel(self, part: RequestPart) -> None:
        self.view.prefixes.forget(part.request.request_id)  # noted before it was sent, if it was
        if self._parts.get(part.request.request_id) is part:
            del self._parts[part.request.request_id]
            self.view.sent_to.pop(part.request.request_id, None)
            self.view.notes.pop(part.request.request_id, None)
            self._charges.end(part.request.request_id, part.mean_tokens, was_cut=part.was_cut)
        if part.is_complete and part.ended is None:
            self.loop.call_later(CANCEL_AFTER_S, _drop, part)  # its answer is due
            return
        if not part.is_complete:
            _drop(part)
        part.call = part.answer = None  # a body of thousands of prompts holds its parts to its end

    @property
    def hold_s(self) -> float:
        """Twice what a group has taken to load, and some seconds: one that is lost is found, replaced and loaded. Three
        times as long while one is seen to load: the machine may be busier than it was at the start."""
        records = self._fleet.records.values()
        self._longest_load_s = max(self._longest_load_s, *(record.load_s for record in records), 0.0)
        waking_s = WAKING_S if self._may_sleep and self._fleet.start_failure is None else 0.0
        hold_s = max(LEAST_HOLD_S, 2 * max(self._longest_load_s, waking_s) + 10.0)
        return WHILE_LOADING * hold_s if any(record.state == "loading" for record in records) else hold_s

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        return self._refusal is None and any(
            record.state == "serving" and record.group not in avoid and self._is_usable(record)
            for record in self._fleet.records.values()
        )

    def is_outnumbered(self) -> bool:
        """True while more groups serve another model than this gateway's: its version has only begun."""
        serving = [record for record in self._fleet.records.values() if record.state == "serving"]
        return 2 * sum(record.is_other(self._kind) for record in serving) > len(serving)

    def ready(self) -> bool:
        return self.is_asleep or any(
            record.is_ready and self._is_usable(record) and self.view.unreached.for_s(record.group) < UNREACHED_S
            for record in self._fleet.records.values()
        )

    @property
    def is_asleep(self) -> bool:
        serves = any(record.state == "serving" for record in self._fleet.records.values())
        return self._may_sleep and self._refusal is None and not serves

    @property
    def held(self) -> int:
        """Requests that wait here while no group can take them."""
        if self.has_group():
            return 0
        return sum(part.sender is None and part.ended is None for part in self._parts.values())

    def load(self) -> Mapping[str, float | int | str]:
        records = list(self._fleet.records.values())
        scaling = None if self._scaling is None else self._scaling.look(records)
        wanted: dict[str, float | int | str] = {}
        if scaling is not None:
            wanted = {"groups_wanted": scaling.groups, "why": scaling.why}
        return {
            "num_requests_running": sum(r.running for r in records),
            "num_requests_waiting": sum(r.waiting for r in records),
            "idle_work_running": sum(r.idle_running for r in records),
            "idle_work_waiting": sum(r.idle_waiting for r in records),
            "outstanding_tokens": sum(r.outstanding_tokens for r in records),
            "kv_cache_usage_perc": max((r.kv_used for r in records), default=0.0),
            "groups": len(records),
            "groups_serving": sum(r.state == "serving" for r in records),
            **wanted,
            "requests_held": self.held,
            "requests_in_this_gateway": len(self._parts),
            "redis": "away" if self._fleet.redis_unavailable else "here",
        }

    async def groups(self) -> list[tuple[GroupRecord, GroupReport | None]]:
        reports = {report.group: report for report in await self._fleet.read_reports()}
        return [(record, reports.get(group)) for group, record in sorted(self._fleet.records.items())]

    async def reset_prefix_caches(self) -> Collection[str]:
        try:
            return await self._fleet.reset_prefix_caches()
        except RedisUnavailable as error:
            message = f"The groups cannot be told now, because Redis {error.state}; try again."
            raise RequestRefused(message, code="service_unavailable", status=503) from None

    async def drain(self, target: str, timeout_s: float | None) -> DrainState:
        return await self._drains.ask(target, timeout_s)

    def route_table(self, request: GenerationRequest, hint: RouteHint) -> RouteTable:
        self.view.prefixes.forget(request.request_id)  # it is not sent
        table = None if self.view.explain is None else self.view.explain(self._routed(request, hint))
        if table is None:
            message = "This gateway knows no group yet; try again when one serves."
            raise RequestRefused(message, code="service_unavailable", status=503)
        return table

    async def record(self, group: str) -> Mapping[str, Any]:
        record = self._fleet.records.get(group)
        if record is None:
            raise RequestRefused(f"There is no group {group[:64]!r}.", code="not_found", status=404, param="group")
        try:
            answer = await self._fleet.order_recording(group)
        except RedisUnavailable as error:
            message = f"The group cannot be told now, because Redis {error.state}; try again."
            raise RequestRefused(message, code="service_unavailable", status=503) from None
        if answer is None:
            message = f"Group {group} has not answered in time; its log says whether it has written the recording."
            raise RequestRefused(message, code="service_unavailable", status=503)
        found: dict[str, Any] = msgspec.json.decode(answer)
        if (why := found.get("error")) is not None:
            raise RequestRefused(f"Group {group} has no recording: {why}.", code="not_recorded", status=409)
        return {"group": group, "node": record.host, **found}

    async def metrics(self, *, with_tenants: bool) -> str:
        reports, tally = await asyncio.gather(self._fleet.read_reports(), self._fleet.read_tally())
        redis_unavailable = self._fleet.redis_unavailable
        states = [record.state for record in self._fleet.records.values()]
        adapter_service = self._adapters()

        def text() -> str:
            families = Families(self._metrics_prefix)
            add_engines(families, reports, redis_unavailable, with_tenants=with_tenants)
            add_groups(families, states, tally)
            if adapter_service is not None:
                add_adapters(families, reports, adapter_service, with_tenants=with_tenants)
            return families.text()

        return await asyncio.to_thread(text)  # a tenth of a second with a thousand tenants

    # ---- the gateway ---------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        return bool(self._parts)

    def refuse_all(self, refusal: RequestRefused) -> None:
        """Ends every request with `refusal`, after the tokens delivered, and refuses later ones."""
        self._refusal = refusal
        for part in list(self._parts.values()):
            part.end(refused(part.request, refusal.status, refusal.code, refusal.param, str(refusal)))

    def look_after(self) -> None:
        """Ends the attempts of groups without heartbeats and tokens, and of groups that are taken down and whose time
        is nearly over, if there is another group for them; also attempts of which the group has said nothing yet.
        Called about twice a second. A group that sends tokens works, even if its heartbeats do not reach Redis."""
        with _harmless("what groups have told of their KV was not looked after"):
            self._look_after_prefixes()
        self._refuse_what_does_not_arrive()
        self._note_other_models()
        for part in self._parts.values():
            if part.has_new_tokens:
                self._charges.look(part.request.request_id, sum(map(len, part.delivered)))
        self._draining.refresh(self._fleet.records.values())
        if not self.has_group(self._draining.groups):
            return
        silent = self._silent()
        silent_groups = frozenset(silent.values())
        for part in self._parts.values():
            if part.ended is not None:
                continue
            group = self._group_of(part)
            if part.sender in silent or (part.sender is None and group in silent_groups):
                part.lose(f"group {group} gives no sign of life", "unknown")
            elif self._draining.is_due(group):
                part.lose("its group is taken down", "bystander")

    def _refuse_what_does_not_arrive(self) -> None:
        """Ends requests that no group has, when no group that lives can be reached: Serve itself would try for ever."""
        alive = [record.group for record in self._fleet.records.values() if record.state == "serving"]
        if not self._parts or not alive or min(map(self.view.unreached.for_s, alive)) < UNREACHED_S:
            return
        log.error("calls from this gateway reach no group: %s; see `tandem doctor` for proxies", ", ".join(alive))
        told = f"no worker group can be reached from this gateway: calls have failed for {UNREACHED_S:.0f} s"
        for part in list(self._parts.values()):
            if part.sender is None and part.ended is None:
                part.end(refused(part.request, 503, "service_unavailable", None, told))

    async def close(self) -> None:
        """Refuses what runs and what comes."""
        self.refuse_all(RequestRefused("the gateway is shutting down", code="service_unavailable", status=503))
        for part in list(self._parts.values()):
            self.cancel(part)
        self._receiver.close()

    def _silent(self) -> dict[bytes, str]:
        """The groups that have sent nothing for a while and whose records are missing, by channel name."""
        before_s = self.loop.time() - SILENT_S
        named = ((channel_name(r.group, r.life).encode(), r.group) for r in self._fleet.missing_for())
        return {name: group for name, group in named if self._last_message_s.get(name, before_s) <= before_s}

    def _channel_names(self) -> list[tuple[bytes, GroupRecord]]:
        return [(channel_name(r.group, r.life).encode(), r) for r in self._fleet.records.values()]

    # ---- attempts ------------------------------------------------------------------------------------------------

    async def _answer(self, part: RequestPart) -> Ended:
        """Returns the group's answer, or one in its place when its call, the group or the connection to it broke. Waits
        for futures only."""
        try:
            result = await part.call
            assert isinstance(result, bytes)
            return self._decode(without_version(result, self._model))
        except asyncio.CancelledError:
            return lost(part.request, "its call was cancelled", "bystander")
        except OtherVersion as error:
            self._give_up(error)
            told = refused(part.request, 503, GROUP_UNUSABLE, None, str(error))
            return msgspec.structs.replace(told, group=error.group)
        except Exception as error:  # whatever way Ray or Serve reports a dead replica
            loss: Loss = "bystander" if self._group_of(part) in self._draining.groups else "unknown"
            return lost(part.request, f"{type(error).__name__}: {error}".splitlines()[0], loss)

    def _give_up(self, error: OtherVersion) -> None:
        """Sends a group of another version nothing more, if another can have it."""
        if error.group not in self._unusable:
            log.warning("group %s cannot be used from this gateway: %s", error.group or "of an older release", error)
        self._unusable = (self._unusable & self._fleet.records.keys()) | ({error.group} - {""})

    def _is_usable(self, record: GroupRecord) -> bool:
        return record.group not in self._unusable and not record.is_other(self._kind)

    def _note_other_models(self) -> None:
        """Requests go to no group with another model, which would refuse them."""
        others = {group for group, record in self._fleet.records.items() if record.is_other(self._kind)}
        if others - self._unusable:
            self._unusable = (self._unusable & self._fleet.records.keys()) | others

    def _group_of(self, part: RequestPart) -> str:
        """The group that has the part: that which has sent something of it, or to which Serve has sent it; empty while
        Serve has not."""
        if part.sender is not None:
            return part.sender.decode(errors="replace").rpartition(":")[0]
        return self.view.sent_to.get(part.request.request_id) or ""

    def _on_deltas(self, sender: bytes, deltas: list[TokenDelta]) -> None:
        if sender in self._last_message_s:
            self._last_message_s[sender] = self.loop.time()
        by_request: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, own in by_request.items():
            part = self._parts.get(request_id)
            if part is None or own[0].attempt != part.request.attempt:
                continue  # late deltas of a request that has ended or moved
            if part.sender is None:
                self._meet(sender)
                self._learn_sender(part, sender)
                with _harmless("what a group has found of a prompt was not compared"):
                    self._compare(own[0], sender)
            if not part.take(own):
                self._lose_soon(part)

    def _on_kv(self, sender: bytes, message: KvFacts | KvEvents) -> None:
        if self.view.prefixes.take(*read_channel_name(sender), message, self.loop.time()):
            self._receiver.ask_kv(sender)

    def _compare(self, first: TokenDelta, sender: bytes) -> None:
        """The first delta of an attempt says what its group has found of the prompt."""
        if first.cached_tokens is not None:
            group, _ = read_channel_name(sender)
            if self.view.prefixes.found(first.request_id, group, first.cached_tokens, self.loop.time()):
                log.info("group %s does not have the KV that it told of, or has more: it is asked anew", group)
                self._receiver.ask_kv(sender)

    def _look_after_prefixes(self) -> None:
        running, records = self.view.running or (), self._fleet.records
        self.view.prefixes.tick(self.loop.time())
        self.view.prefixes.keep_only(lambda group: group in records or group in running)

    def _learn_sender(self, part: RequestPart, sender: bytes) -> None:
        """Its first message has come: its group can be told what was held."""
        part.sender = sender
        held, part.held_aborts = part.held_aborts, []
        for abort in held:
            self._receiver.send_abort(sender, abort)

    def _lose_soon(self, part: RequestPart) -> None:
        """Gives the group up in a while, if the part is still dispatched to it."""
        call = part.call

        def lose() -> None:
            if part.call is call:
                part.lose("a message was missing for 1 s", "bystander")

        self.loop.call_later(GAP_S, lose)

    def _meet(self, sender: bytes) -> None:
        """Registers a coordinator at its first message, and forgets those that have left the fleet."""
        if sender in self._last_message_s:
            return
        living = {name for name, _ in self._channel_names()}
        living |= {part.sender for part in self._parts.values() if part.sender is not None}
        for gone in self._last_message_s.keys() - living:
            self._receiver.forget(gone)
            del self._last_message_s[gone]
        self._last_message_s[sender] = self.loop.time()

    def _on_gap(self, sender: bytes) -> None:
        """A message of this sender was lost: its content is unknown, so all its attempts count as lost."""
        log.warning("a message from %s is missing", sender.decode(errors="replace"))
        for part in self._parts.values():
            if part.sender == sender:
                self._lose_soon(part)


@contextmanager
def _harmless(failed: str) -> Iterator[None]:
    """Logs what is raised: nothing of a request depends on it."""
    try:
        yield
    except Exception:
        log.exception(failed)


def _drop(part: RequestPart) -> None:
    """Ends the part's call, if it was made."""
    if part.answer is not None:
        part.look()  # what Serve does not know to be awaited it does not cancel
        part.call.cancel()
        part.answer.close()
