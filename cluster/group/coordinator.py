"""The group deployment `tandem-coordinator`: one Serve replica = one worker group.

Holds the handle call of each request until the request ends, reports load to Serve and Redis, and exits when its group
is lost, or its process is told to end, so that Serve replaces it. The engine runs on a thread of its own. Torch-free.
Next: engine_thread.py.
"""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import psutil
import ray
from ray import serve

from tandem.cluster.fleet.fleet_view import (
    FleetView,
    GroupRecord,
    GroupState,
    StartFailure,
    channel_name,
    group_heartbeat,
    report_start_failure,
    write_load_s,
)
from tandem.cluster.fleet.group_drains import DrainFollower, DrainOrder
from tandem.cluster.fleet.group_events import GroupEvent, write_event
from tandem.cluster.fleet.group_reports import GroupReport, ReportWriter
from tandem.cluster.fleet.recording_orders import RecordingFollower
from tandem.cluster.group.engine_opener import EngineOpener
from tandem.cluster.group.gateway_links import GatewayLinks
from tandem.cluster.group.gateways_first import are_to_follow, wait_for_gateways
from tandem.cluster.group.group_log import GroupLog
from tandem.cluster.group.group_recording import GroupRecording, SignalPipe
from tandem.cluster.group.last_requests import OtherGroups, drained, time_is_over
from tandem.cluster.group.node_drain import next_drained
from tandem.cluster.group.owed_tokens import OwedTokens
from tandem.cluster.group.ray_ranks import nodes_of_bundles
from tandem.cluster.group.sharing import Sharing
from tandem.cluster.ray_private.application_state import application_state
from tandem.cluster.ray_private.replica_end import on_sigterm, on_taken_down
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.scaling.scaling_figures import ScalingFigures
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Changes
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.wire.identity import Membership
from tandem.cluster.wire.service_facts import ServiceFacts, check_node, open_log_of, with_serves_logging
from tandem.cluster.wire.token_channel import TokenSender
from tandem.cluster.wire.version import OtherVersion, kind_of, with_version, without_version
from tandem.configs.errors import SettingsError
from tandem.configs.limits import allow_many_open_files
from tandem.configs.schema import EngineSettings
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import Abort, Ended, GenerationRequest

log = logging.getLogger("tandem.group")
STUCK_S, BOOT_S = 60.0, 60.0
EXIT_DELAY_S, HANDED_OVER_S, LAST_WORDS_S = 0.1, 0.5, 1.0
JOIN_S = 5.0
"""Seconds for the engine's thread, which ends the ranks."""
SWITCH_INTERVAL_S = 0.001


class _LoopListener:
    """Passes what the engine's thread says to the replica's event loop."""

    def __init__(self, replica: "Coordinator", loop: asyncio.AbstractEventLoop) -> None:
        self._replica = replica
        self._loop = loop
        self._busy = False

    def opened(self) -> None:
        """Implements EngineListener."""
        self._loop.call_soon_threadsafe(self._replica.on_opened)

    def stats(self, stats: EngineStats, residency: Mapping[str, str]) -> None:
        """Implements EngineListener. The replica reads the last ones: they need not wake its loop four times a second,
        and each reference is replaced whole."""
        self._replica.engine_stats = stats
        self._replica.take_residency(residency)
        busy = stats.running + stats.waiting + stats.used_blocks > 0
        if busy != self._busy:  # others learn of a start and an end of work at once, its last blocks freed
            self._busy = busy
            self._loop.call_soon_threadsafe(self._replica.heartbeat_now)

    def failed(self, error: Exception, opened: bool) -> None:
        """Implements EngineListener."""
        self._loop.call_soon_threadsafe(self._replica.on_failed, error, opened)


class Coordinator:
    """A group. The constructor returns once the model is loaded: Serve sends no request before."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: EngineSettings, facts: ServiceFacts, model_name: str
    ) -> None:
        check_node(facts)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        allow_many_open_files()
        self._loop = asyncio.get_running_loop()
        context = serve.get_replica_context()
        self._group = context.replica_id.unique_id
        self._node: str = ray.get_runtime_context().get_node_id()
        self._app = context.app_name
        self._membership = Membership(self._app, facts)
        self._facts = facts = with_serves_logging(await self._membership.join())
        open_log_of(facts, f"group-{self._group}")
        log.info("group %s starts in process %d, for %s", self._group, os.getpid(), model_name)
        self._life = time.time_ns() // 1_000_000
        self._began_s = process_began_s()
        self._load_s = 0.0
        self._tells_kv = settings.cache.kv_events and settings.cache.enable_prefix_caching
        self._links_task: asyncio.Task[None] | None = None
        self._figures = ScalingFigures(settings.scheduler.max_num_seqs)
        self._model_name = model_name
        self._state: GroupState = "loading"
        self._outstanding = OwedTokens()
        self._stopping = False
        self._leaving: asyncio.Task[None] | None = None
        self._far_nodes: list[str] = []
        self.engine_stats: EngineStats | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._redis = await self._membership.open_redis()
        self._fleet = FleetView(self._redis, facts.service_id)
        self._others = OtherGroups(self._fleet, self._record)
        self._heartbeat = group_heartbeat(self._redis, facts.service_id, self._record)
        self._heartbeat_task = self._loop.create_task(self._heartbeat.run(), name="group heartbeat")
        placement_group = ray.util.get_current_placement_group()
        open_channel = partial(TokenSender, facts.secret, channel_name(self._group, self._life))
        self._thread = EngineThread(_LoopListener(self, self._loop), open_channel)
        self._recording = GroupRecording(facts, self._group)
        self._opener = EngineOpener(
            settings,
            facts,
            self._group,
            placement_group,
            self._thread.lose,
            self._thread.expect_end,
            self._recording,
        )
        orders = (keys.reports_asked, keys.prefix_resets, keys.drains, keys.recordings_asked)
        own = [key(facts.service_id) for key in orders]
        self._changes = Changes(lambda: self._redis.url, (keys.TENANTS, keys.adapters(model_name), *own))
        self._sharing = Sharing(
            self._redis,
            self._thread,
            service=facts.service_id,
            group=self._group,
            base=model_name,
            lora=settings.lora,
            changes=self._changes,
            on_reset=self.heartbeat_now,
        )
        self._log = GroupLog(self._group, lambda: self.engine_stats)
        self._log_task = self._loop.create_task(self._log.run(), name="group log")
        reports = ReportWriter(self._redis, facts.service_id, self._report, self._changes)
        self._reports_task = self._loop.create_task(reports.run(), name="group reports")
        await self._open(placement_group)

    async def _open(self, placement_group: Any) -> None:
        """Loads the model, in the engine's thread, and takes part in the service from then on."""
        on_taken_down(lambda: self._loop.call_soon_threadsafe(self._leave_fleet))
        on_sigterm(lambda: self._loop.call_soon_threadsafe(self._end_soon, "was told to end"))
        self._signal = SignalPipe(self._loop, self._record_at_signal)
        self._thread.start_engine(self._opener.open, self._opener.close)
        await self._wait_until_opened()
        await wait_for_gateways(self._are_gateways_missing)
        self._changes.start()
        self._sharing.start()
        self._drain_task = self._loop.create_task(self._end_with_nodes(placement_group), name="drain of ranks' nodes")
        if self._tells_kv:
            kind = kind_of(self._facts.model_digest)
            links = GatewayLinks(self._redis, self._facts.service_id, kind, self._thread.follow)
            self._links_task = self._loop.create_task(links.run(), name="links to gateways")
        orders_to_drain = DrainFollower(self._redis, self._facts.service_id, self._group, self._drain, self._changes)
        self._orders_task = self._loop.create_task(orders_to_drain.run(), name="orders to drain")
        to_record = RecordingFollower(
            self._redis, self._facts.service_id, self._group, self._recording.answer, self._changes
        )
        self._recordings_task = self._loop.create_task(to_record.run(), name="orders to write recordings")

    async def generate(self, payload: bytes, hint: RouteHint) -> bytes:
        """One request, from its dispatch to its end: GenerationRequest in, Ended out, both msgpack below the line of
        wire/version.py. A gateway of another version, or with another model, gets that line only."""
        try:
            body = without_version(payload, self._facts.model_digest)
        except OtherVersion as error:
            log.warning("a request of gateway %s is refused: %s", hint.gateway, error)
            return with_version(b"", self._group, self._facts.model_digest)
        return with_version(await self._generate(body, hint), self._group, self._facts.model_digest)

    async def _generate(self, body: memoryview, hint: RouteHint) -> bytes:
        request = msgspec.msgpack.decode(body, type=GenerationRequest)
        answer: asyncio.Future[Ended] = self._loop.create_future()
        key = self._outstanding.begin(request, hint.gateway, hint.cost_tokens)
        adapters = self._sharing.adapters
        if adapters is not None:
            adapters.enter(request.adapter)
        self._thread.submit(request, lambda e: self._answer(answer, e))
        try:
            ended = await answer
            if ended.refused is not None:
                ended = msgspec.structs.replace(ended, group=self._group)
            return msgspec.msgpack.encode(ended)
        except asyncio.CancelledError:
            self._thread.abort(Abort(request_id=request.request_id, attempt=request.attempt))
            raise
        finally:
            self._outstanding.end(key)
            if adapters is not None:
                adapters.leave(request.adapter)

    # Serve calls what is not async on a thread that it starts and ends for each call.

    async def check_health(self) -> None:
        """Raises when the group is broken; Serve calls it every few seconds. A group whose thread ended or hangs is
        replaced; the thread itself watches the ranks and the time that their steps take."""
        if not self._thread.is_alive() and not self._stopping:
            raise RuntimeError("the engine has stopped")
        stuck_s = self._thread.stuck_s()
        if stuck_s > STUCK_S:
            raise RuntimeError(f"the engine's thread has not moved for {stuck_s:.0f} s")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Statistics for the routers of all gateways, every few seconds; Serve's controller passes on changes.
        on_device, on_host: keys of adapters. copy_share: as in OffloadStats, once it is measured. outstanding_tokens,
        left_tokens: by gateway, as they were charged and as they are still to come."""
        adapters = self._sharing.adapters
        on_device, on_host = adapters.tiers() if adapters is not None else ([], [])
        offload = None if self.engine_stats is None else self.engine_stats.offload
        share = None if offload is None else offload.copy_share
        return {
            **({} if share is None else {"copy_share": round(share, 2)}),
            "outstanding_tokens": self._outstanding.charged(),
            "left_tokens": await self._outstanding.ask_left(self._thread),
            "stalled_s": self._stalled_s(),
            "on_device": on_device,
            "on_host": on_host,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns figures for autoscaling policies, ours (cluster/scaling/decide.py) or a user's; Serve's own one
        counts the handle calls in flight."""
        return self._figures.read(self.engine_stats)

    async def __del__(self) -> None:
        """Serve calls this when it has drained the replica, before it ends the process."""
        self._stopping = True
        self._state = "draining"
        self._heartbeat_task.cancel()
        self._reports_task.cancel()
        self._log_task.cancel()
        if self._links_task is not None:
            self._links_task.cancel()
        self._log.write()
        log.info("group %s ends", self._group)
        self._membership.leave()
        self._sharing.stop()
        self._thread.stop()  # what still runs is handed over at once
        await self._changes.close()
        if self._opened.done() and self._opened.exception() is None:
            await self._write_event(GroupEvent("left", self._group))
        await self._leave()
        await self._loop.run_in_executor(None, self._thread.join, JOIN_S)
        await self._redis.close()

    # ---- called on the loop by the engine's thread ---------------------------------------------------------------

    def on_opened(self) -> None:
        # What exists now lives as long as the group: without this, each collection under load would walk it again.
        gc.collect()
        gc.freeze()
        self._state = "serving"
        self._load_s = time.monotonic() - self._began_s
        log.info("group %s serves after %.1f s, ranks %s", self._group, self._load_s, self._opener.rank_pids)
        self.heartbeat_now()
        self._event_task = self._loop.create_task(self._tell_that_it_serves(), name="group serves")
        if not self._opened.done():
            self._opened.set_result(None)

    def heartbeat_now(self) -> None:
        self._heartbeat.trigger()

    def take_residency(self, residency: Mapping[str, str]) -> None:
        """Called on the engine's thread: one reference is replaced, nothing is changed in place."""
        if self._sharing.adapters is not None:
            self._sharing.adapters.residency = residency

    def on_failed(self, error: Exception, opened: bool) -> None:
        """Ends the process of a group whose engine has stopped by itself, or could not be opened."""
        if not opened and not self._opened.done():
            self._opened.set_exception(error)
        elif opened and not self._stopping:
            what = "ends" if self._thread.is_planned else "is lost"
            log.error("group %s %s: %s", self._group, what, error)
            self._log.write()
            self._heartbeat_task.cancel()
            self._exiting = self._loop.create_task(self._exit(error), name="group exits")

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _exit(self, error: Exception) -> None:
        """Ends the process, after the streams got their error: so Serve replaces the group without three failed health
        checks."""
        try:
            is_lost = not self._thread.is_planned
            leaving = self._loop.create_task(self._leave(), name="group leaves")  # nobody is sent here meanwhile
            where = await self._recording.write_at_loss() if is_lost else ""
            event = GroupEvent("lost" if is_lost else "left", self._group, f"{error}{where}")
            await asyncio.gather(self._write_event(event), leaving, asyncio.sleep(EXIT_DELAY_S), return_exceptions=True)
        finally:
            os._exit(1)

    def _record_at_signal(self) -> None:
        self._signal_task = self._loop.create_task(self._recording.write_at_signal(), name="recording at SIGUSR2")

    def _leave_fleet(self) -> None:
        """Serve takes the group down: everybody sees it before its requests in flight have ended."""
        if self._state != "loading" and self._leaving is None:
            self._state = "draining"
            self.heartbeat_now()
            self._leaving = self._loop.create_task(self._end_in_time(), name="group is taken down")

    async def _drain(self, order: DrainOrder) -> None:
        """An operator's order: no new requests, and the end once those it has are over or may go elsewhere."""
        if self._leaving is not None or self._stopping:
            return
        self._state = "draining"
        log.info("group %s is drained, with %d requests", self._group, len(self._outstanding))
        self.heartbeat_now()
        why = await drained(order.timeout_s, lambda: len(self._outstanding), self._others.may_serve)
        self._end_soon(f"ends, as it was drained: {why}")

    async def _end_in_time(self) -> None:
        await time_is_over(self._facts.shutdown_timeout_s, self._is_needed)
        self._end_soon("hands over what it still computes, as it is taken down (--shutdown-timeout)")

    async def _are_gateways_missing(self) -> bool:
        await self._fleet.refresh()
        try:
            gateways = await self._fleet.read_gateways()
        except RedisUnavailable:
            return False
        return are_to_follow(self._record(), self._fleet.records.values(), gateways)

    async def _is_needed(self) -> bool:
        """Returns whether what it computes can end only here."""
        if not await self._others.may_be_of_no_use():
            return False
        application = await application_state(self._app)
        return application is None or not application.is_ending

    async def _end_with_nodes(self, placement_group: Any) -> None:
        """Ends the group when a node of its ranks is drained; Serve itself looks after the coordinator's."""
        nodes = {*await asyncio.to_thread(nodes_of_bundles, placement_group)}
        if others := nodes - {self._node}:
            self._far_nodes = sorted(others)
            self._end_soon(f"ends: node {await next_drained(others)}, of its ranks, is drained")

    def _end_soon(self, why: str) -> None:
        """SIGTERM, or the drain of a node: the group ends as planned; Serve replaces a replica whose process is
        gone."""
        if not self._stopping:
            log.warning("group %s %s", self._group, why)
            self._stopping = True
            self._exiting = self._loop.create_task(self._end(), name="group ends")

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(JOIN_S + 3 * LAST_WORDS_S):
                await self.__del__()
                await asyncio.sleep(HANDED_OVER_S)  # the answers are on their way
        finally:
            os._exit(0)

    async def _write_event(self, event: GroupEvent) -> None:
        """Writes an event for the operator, if Redis answers soon."""
        with suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await write_event(self._redis, self._facts.service_id, event)

    async def _tell_that_it_serves(self) -> None:
        with suppress(RedisUnavailable):
            await write_load_s(self._redis, self._facts.service_id, self._load_s)
        await self._write_event(GroupEvent("serving", self._group))

    async def _leave(self) -> None:
        """Removes the group's record, so that nobody waits until it expires."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._heartbeat.leave()
        except (RedisUnavailable, TimeoutError):
            return  # it expires by itself

    def _stalled_s(self) -> float:
        """Returns the seconds without any movement: no step although there is work, or no probe answered by a rank."""
        return max(self._thread.stalled_s(), self._opener.silent_s())

    async def _wait_until_opened(self) -> None:
        try:
            await self._opened
        except Exception as error:
            self._heartbeat_task.cancel()
            await self._report_failure(error)
            await self._write_event(GroupEvent("failed", self._group, str(error)))
            raise RuntimeError(f"group {self._group} did not start: {error}") from None

    async def _report_failure(self, error: Exception) -> None:
        flag = error.flag if isinstance(error, SettingsError) else None
        kind = "" if isinstance(error, SettingsError | GroupLost) else f"{type(error).__name__}: "
        log.error("group %s did not start: %s%s", self._group, kind, error)
        failure = StartFailure(part=f"group {self._group}", message=f"{kind}{error}", flag=flag)
        try:
            await report_start_failure(self._redis, self._facts.service_id, failure)
        except RedisUnavailable as unavailable:
            log.warning("the failure could not be reported: %s", unavailable)

    def _answer(self, ended: "asyncio.Future[Ended]", value: Ended) -> None:
        def set_result() -> None:
            if not ended.done():
                ended.set_result(value)

        self._loop.call_soon_threadsafe(set_result)

    def _record(self) -> GroupRecord:
        stats = self.engine_stats
        loaded_bytes, total_bytes = self._opener.loading()
        return GroupRecord(
            group=self._group,
            life=self._life,
            model=self._model_name,
            state=self._state,
            host=self._node,
            pid=os.getpid(),
            waiting=stats.waiting if stats is not None else 0,
            running=stats.running if stats is not None else 0,
            idle_waiting=stats.idle.waiting if stats is not None else 0,
            idle_running=stats.idle.running if stats is not None else 0,
            outstanding_tokens=self._outstanding.total,
            kv_used=stats.kv_usage if stats is not None else 0.0,
            kv_tokens=stats.kv_tokens if stats is not None else 0,
            stalled_s=self._stalled_s(),
            loaded_bytes=loaded_bytes,
            total_bytes=total_bytes,
            fetching=self._opener.fetching(),
            load_s=self._load_s,
            nodes=self._far_nodes,
            figures=self._scaled_figures(),
            prefix_resets=self._sharing.resets.done,
            kind=kind_of(self._facts.model_digest),
        )

    def _scaled_figures(self) -> list[float]:
        is_wanted = self._facts.is_scaled and self._state == "serving"
        return list(self._figures.read(self.engine_stats).values()) if is_wanted else []

    def _report(self) -> GroupReport:
        stats, adapters = self.engine_stats, self._sharing.adapters
        return GroupReport(
            group=self._group,
            model=self._model_name,
            stats=msgspec.msgpack.encode(stats) if stats is not None else b"",
            rank_pids=list(self._opener.rank_pids),
            notes=list(self._opener.notes),
            adapters=adapters.report() if adapters is not None else None,
        )


def process_began_s() -> float:
    """Returns when this process began, BOOT_S ago at most, as Ray may have had it idle. Imports count."""
    return time.monotonic() - min(max(time.time() - psutil.Process().create_time(), 0.0), BOOT_S)
