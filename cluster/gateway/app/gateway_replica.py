"""The gateway deployment `tandem-gateway`: the HTTP ingress of the app, a true Serve ingress.

Under `serve run` requests arrive through Serve's proxy. Under `tandem serve` the replica opens the port itself
(docs/decisions/001-serve-ingress.md). Either way it is the same ASGI app (cluster/gateway). Torch-free.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from msgspec.structs import replace
from prometheus_client import generate_latest
from ray import serve
from starlette.types import Lifespan

from tandem.cluster.adapters.adapter_service import AdapterService, adapter_limit
from tandem.cluster.adapters.build_adapters import open_adapter_service, start_adapter_tasks
from tandem.cluster.fleet.fleet_view import FleetView, StartFailure, read_load_s, report_start_failure
from tandem.cluster.fleet.gateway_records import GatewayHeartbeat, GatewayRecord
from tandem.cluster.fleet.group_events import GroupEvent, write_event
from tandem.cluster.fleet.hung_groups import CoordinatorActors, HungGroups
from tandem.cluster.fleet.missing_groups import MissingGroups
from tandem.cluster.fleet.record_questions import RecordQuestions
from tandem.cluster.gateway.app.gateway_log import GatewayLog
from tandem.cluster.gateway.app.interpreter import QuietCollections, give_way_soon
from tandem.cluster.gateway.app.leaving import Leaving
from tandem.cluster.gateway.app.live_settings import LiveSettings
from tandem.cluster.gateway.app.opening import listen, open_tenants
from tandem.cluster.gateway.app.routes import build_gateway_app
from tandem.cluster.gateway.app.update_watch import UpdateWatch
from tandem.cluster.gateway.app.wiring import (
    build_accounts,
    build_context,
    build_metrics,
    build_text_services,
    model_names,
    use_settings,
)
from tandem.cluster.gateway.batches.batch_runner import BatchRunner
from tandem.cluster.gateway.batches.batch_wiring import batch_runner, open_batches
from tandem.cluster.gateway.generation.draining_groups import DrainingGroups
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.gateway.http.draining import LAST_WORDS_S, LEAVING_S
from tandem.cluster.gateway.http.gateway_metrics import Together
from tandem.cluster.gateway.http.http_server import HttpLimits, QuietServer, make_server
from tandem.cluster.gateway.http.tls import server_context
from tandem.cluster.gateway.idempotency.key_store import KeyStore
from tandem.cluster.gateway.records.request_log import open_request_lines
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.gateway.responses.response_store import ResponseStore
from tandem.cluster.gateway.services.prompt_overlaps import PromptOverlaps
from tandem.cluster.gateway.tracing.tracing import end_within, exporting, open_tracing
from tandem.cluster.process.exit_watch import ExitWatch
from tandem.cluster.process.time_to_leave import TimeToLeave
from tandem.cluster.ray_private.application_state import application_state, autoscaling_in_force
from tandem.cluster.ray_private.ray_facts import proxy_host
from tandem.cluster.ray_private.replica_end import on_sigterm, on_taken_down, skip_draining_period
from tandem.cluster.routing.router_view import router_view
from tandem.cluster.scaling.scaling_watch import ScalingReport, ScalingWatch, write_scaling
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Changes
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.tenants.tenant import DEFAULT_TENANT
from tandem.cluster.wire.identity import Membership
from tandem.cluster.wire.serve_proxy import check_open
from tandem.cluster.wire.service_facts import (
    COORDINATOR,
    ServiceFacts,
    check_node,
    open_log_of,
    with_serves_logging,
)
from tandem.cluster.wire.version import kind_of
from tandem.configs.autoscaling import goals_of
from tandem.configs.limits import allow_many_open_files
from tandem.configs.schema import ServiceSettings
from tandem.workers.planning.model_source import engine_here, named_node

log = logging.getLogger("tandem.gateway")
MODEL_LOOK_S, FLEET_S = 1.0, 10.0
"""The latter for a Redis that answers late when a gateway starts."""
TAKEN_DOWN_WITHIN_S = 30.0
"""Time for Serve to take an unhealthy replica down: its check fails three times, two seconds apart."""


@serve.ingress()
class Gateway:
    """One gateway process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ServiceSettings, facts: ServiceFacts, groups: Any
    ) -> None:
        check_node(facts)
        if not facts.open_port:
            check_open(settings.gateway.auth, await asyncio.to_thread(proxy_host))
        allow_many_open_files()
        self._settings = settings
        context = serve.get_replica_context()
        self._id, self._app = context.replica_id.unique_id, context.app_name
        self._host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        self._membership = Membership(context.app_name, facts)
        self._facts = facts = with_serves_logging(await self._membership.join())
        open_log_of(facts, f"gateway-{self._id}")
        log.info("gateway %s starts in process %d", self._id, os.getpid())
        # no request waits for the fleet, so a loop that is busy with tokens may take its time to read it
        self._redis = await self._membership.open_redis(timeout_s=1.0, retries=1)
        asked = keys.records_asked(facts.service_id)
        bases = settings.engine.model.served_model_name[:1]
        self._changes = Changes(lambda: self._redis.url, (keys.TENANTS, *map(keys.adapters, bases), asked))
        async with self._failures_reported():
            self._tenants = open_tenants(settings, facts, self._redis, self._kv_tokens, self._changes)
        self._fleet = FleetView(self._redis, facts.service_id, reseed=self._reseed, on_emptied=self._tenants.tell_again)
        self._adapters: AdapterService | None = None
        self._heartbeat: GatewayHeartbeat | None = None
        self._batches: BatchRunner | None = None
        self._server: QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._was_told_to_end = False
        self._taken_down = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._was_ready = False
        await self._follow_fleet(groups, context.app_name)
        async with self._failures_reported():
            await self._build_services()
        await self._wait_for_own_model()
        loop = asyncio.get_running_loop()
        on_taken_down(lambda: loop.call_soon_threadsafe(self._end_in_time))
        on_sigterm(lambda: loop.call_soon_threadsafe(self._end_soon))
        if facts.open_port:
            skip_draining_period()

    async def check_health(self) -> None:
        """Raises once the process was told to end, so that Serve starts another gateway beside it."""
        if self._was_told_to_end:
            raise RuntimeError("this gateway was told to end")

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls this with the user_config of the deployment, at the start and when it has changed."""
        self._live.take(user_config)
        if self._heartbeat is not None:
            self._heartbeat.trigger()

    async def _follow_fleet(self, groups: Any, app_name: str) -> None:
        """Reads the tenants and the fleet, and keeps up with both from now on. groups: their Serve handle."""
        self._changes.start()
        await self._tenants.start()
        await self._fleet.refresh()
        goals = goals_of(self._settings.autoscaling_config)
        self._scaling = None if goals is None else ScalingWatch(goals, self._held)
        self._dispatch = ServeDispatch(
            groups,
            self._fleet,
            self._facts.secret,
            self._host,
            self._settings.gateway.metrics_prefix,
            lambda: self._adapters,
            DrainingGroups(lambda: router_view().running, self._settings.shutdown_timeout_s, time.monotonic),
            self._facts.model_digest,
            router_view(),
            self._settings.engine.parallel.ports,
            self._facts.may_sleep,
            await read_load_s(self._redis, self._facts.service_id),
            self._scaling,
            self._settings.shutdown_timeout_s,
        )
        node = ray.get_runtime_context().get_node_id()
        self._missing = MissingGroups(self._fleet, ExitWatch(), node)
        self._hung_groups = HungGroups(self._fleet, CoordinatorActors(app_name), node)
        following = self._fleet.run(self._look_after, self._dispatch.has_requests)
        self._following = asyncio.get_running_loop().create_task(following, name="fleet")

    async def _wait_for_own_model(self) -> None:
        """A version with another model: Serve gives this gateway no request, and ends none of the gateways before it,
        until half of the groups that serve have its model, as all new requests are theirs then."""
        deadline_s = time.monotonic() + (0.0 if self._facts.open_port else FLEET_S)
        while self._fleet.redis_unavailable and time.monotonic() < deadline_s:
            await asyncio.sleep(MODEL_LOOK_S)  # who sees no groups does not know that there are others
        while self._dispatch.is_outnumbered():
            log.info("gateway %s waits for groups with its model", self._id)
            await asyncio.sleep(MODEL_LOOK_S)

    async def _build_services(self) -> None:
        """Opens the adapters, and makes what the routes use."""
        facts = self._facts
        engine = self._settings.engine
        with named_node(self._host):  # adapters are compared with the model's weights
            engine = await asyncio.to_thread(engine_here, engine, weights=engine.lora.enable_lora)
        settings = replace(self._settings, engine=engine)
        gateway = settings.gateway
        several = self._has_peers = gateway.num_gateways > 1 or not facts.open_port  # Serve may start more at any time
        self._heartbeat = GatewayHeartbeat(self._redis, facts.service_id, self._record)
        adapters = await open_adapter_service(settings, self._redis, facts.service_id, self._most_adapters)
        if adapters is not None:
            self._background = start_adapter_tasks(adapters, settings, self._redis, facts.service_id, self._changes)
        self._adapters = adapters
        tracing = open_tracing(gateway.otlp_traces_endpoint, self._id)
        metrics, lines = build_metrics(settings, self._tenants), open_request_lines(facts, self._id, settings.logs)
        self._tenants.expose(metrics.registry, gateway.metrics_prefix)
        self._text = build_text_services(settings, metrics)
        self._accounts = build_accounts(gateway, self._tenants, open_port=facts.open_port)
        self._context = build_context(
            settings,
            self._dispatch,
            self._accounts,
            metrics,
            adapters=adapters,
            peers=Together(self._id, self._others) if several else None,
            quarantined=lambda: (digest for record in self._others() for digest in record.quarantined),
            access_log=lines.access_log,
            records=RequestRecords(lines.on_record, self._id, self._ask, exporting(tracing)),
            tracing=tracing,
            find_overlaps=PromptOverlaps(router_view().prefixes, self._text.workers).find,
        )
        router_view().prefixes.on_error = metrics.overlap_missed
        draining, registries = self._context.draining, (metrics.registry, metrics.tenants)
        self._live = LiveSettings(gateway, lambda now: use_settings(now, self._text, self._context))
        self._leaving = Leaving(
            draining,
            self._dispatch.refuse_all,
            settings.shutdown_timeout_s,
            TimeToLeave(settings.replaced_s, settings.shutdown_timeout_s, self._application_ends),
        )
        self._questions = RecordQuestions(self._redis, facts.service_id, self._context.records.encoded, self._changes)
        self._background.append(asyncio.get_running_loop().create_task(self._questions.run(), name="record questions"))
        self._log = GatewayLog(registries, gateway.metrics_prefix, lambda: draining.in_flight)
        self._background.append(asyncio.get_running_loop().create_task(self._log.run(), name="gateway log"))

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app; Serve calls it once, after the constructor."""
        batches = open_batches(self._settings.gateway, self._redis, model_names(self._settings)[0], self._id)
        stores = self._response_store(), batches, self._key_store()
        app = build_gateway_app(self._text, self._accounts, self._context, *stores)
        self._batches = batch_runner(
            self._settings,
            self._id,
            batches,
            app.state.line_handlers,
            self._text,
            self._context,
            lambda: self._leaving.begun,
            self._is_tenant,
        )
        if self._batches is not None:
            self._background.append(asyncio.get_running_loop().create_task(self._batches.run(), name="batches"))
        app.router.lifespan_context = self._drained_first(app.router.lifespan_context)
        self._spare_the_loop()
        if self._facts.open_port:
            await self._open_port(app)
        else:
            self._watch_updates()
        if self._heartbeat is not None:  # from now on its requests count
            self._background.append(
                asyncio.get_running_loop().create_task(self._heartbeat.run(), name="gateway heartbeat")
            )
        return app

    def _spare_the_loop(self) -> None:
        give_way_soon()
        collections = QuietCollections(lambda: self._text.workers.is_busy)
        collections.begin()
        self._background.append(asyncio.get_running_loop().create_task(collections.run(), name="garbage"))

    def _key_store(self) -> KeyStore | None:
        gateway = self._settings.gateway
        ttl_s = gateway.idempotency_ttl_s
        return KeyStore(self._redis, ttl_s, gateway.idempotency_bytes) if ttl_s else None

    def _response_store(self) -> ResponseStore | None:
        gateway = self._settings.gateway
        if not gateway.response_store_ttl_s:
            return None
        return ResponseStore(
            self._redis,
            self._context.tasks,
            ttl_s=gateway.response_store_ttl_s,
            max_bytes=gateway.response_store_bytes,
            count=self._context.metrics.response_stored,
        )

    def _drained_first(self, lifespan: Lifespan[Any]) -> Lifespan[Any]:
        """The app's lifespan, whose end waits for streams: Serve ends it before it calls __del__, and does not know of
        requests on a port of our own."""

        @asynccontextmanager
        async def drained_first(app: Any) -> AsyncIterator[Any]:
            async with lifespan(app) as state:
                yield state
                await self._leaving.finish()

        return drained_first

    async def drain(self) -> int:
        """Refuses new work, waits until the requests in flight have ended or the timeout is over, and returns how many
        were cut off.

        `tandem serve` calls this before it deletes the application, while all groups still work.
        """
        return await self._leaving.drain()

    async def cut_off(self) -> int:
        """Ends the requests in flight, each with an error as its last event, and returns how many they were.
        `tandem serve` calls it at the second signal."""
        return await self._leaving.cut_off()

    async def __del__(self) -> None:
        """Serve calls this at the end: finishes streams, stops listening, removes the record. Later calls wait for the
        first."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(), name="gateway ends")
        await asyncio.shield(self._ending)

    def _end_in_time(self) -> None:
        """Serve takes this gateway down. It calls __del__ once no request is left, and kills the process after
        --gateway-drain-timeout and LEAVING_S: streams that still run before get an error as their last event."""
        log.info("gateway %s is taken down with %d requests in flight", self._id, self._context.draining.in_flight)
        self._taken_down.set()
        self._leaving.begin()
        if self._heartbeat is not None:
            self._heartbeat.trigger()

    async def _application_ends(self) -> bool:
        state = await application_state(self._app)
        return state is not None and state.is_ending

    def _watch_updates(self) -> None:
        ask = partial(application_state, self._app)
        watch = UpdateWatch(ask, lambda event: self._write_events([event]), self._follow_bounds)
        self._background.append(asyncio.get_running_loop().create_task(watch.run(), name="updates"))

    async def _follow_bounds(self) -> None:
        """A section `deployments:` of the Serve file changes the bounds of the number of groups while all goes on."""
        if self._scaling is not None and (config := await autoscaling_in_force(self._app, COORDINATOR)) is not None:
            self._scaling.use(config)

    def _end_soon(self) -> None:
        """SIGTERM: a port of its own is closed at once, for the next gateway; Serve's proxy goes elsewhere as soon as
        Serve takes this replica down. The streams go on, for as long as --gateway-drain-timeout."""
        if self._was_told_to_end:
            return
        log.warning("this gateway was told to end")
        self._was_told_to_end = True
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = int(self._settings.replaced_s + LEAVING_S)
            self._server.should_exit = True
            self._leaving.begin()
        self._last_task = asyncio.get_running_loop().create_task(self._leave(), name="gateway leaves")

    async def _leave(self) -> None:
        if self._server is None and await self._is_taken_down():
            return  # Serve knows when its proxy has the last bytes, and ends the process then
        try:
            await self.__del__()
        finally:
            os._exit(0)

    async def _is_taken_down(self) -> bool:
        """Returns True as soon as Serve takes this replica down; False when it seems to be gone itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_DOWN_WITHIN_S):
                await self._taken_down.wait()
        return self._taken_down.is_set()

    async def _end(self) -> None:
        log.info("gateway %s ends", self._id)
        await self._leaving.finish()
        self._leaving.close()
        self._log.write()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=LAST_WORDS_S)
        for task in (self._following, *self._background):
            task.cancel()
        self._hung_groups.close()
        await self._changes.close()
        if self._batches is not None:
            await self._batches.close(LAST_WORDS_S)
        await self._dispatch.close()
        if self._adapters is not None:
            await self._adapters.adapters.save()
        await self._context.tasks.wait_idle(LAST_WORDS_S)  # owner tasks record what has ended
        await self._tenants.close()
        if self._heartbeat is not None:
            with suppress(RedisUnavailable):
                await self._heartbeat.leave()
        if self._context.tracing is not None:
            await end_within(self._context.tracing, LAST_WORDS_S)
        self._membership.leave()
        await self._redis.close()

    def _look_after(self) -> None:
        if self._heartbeat is not None and self._was_ready != self._dispatch.ready():
            self._was_ready = not self._was_ready
            self._heartbeat.trigger()
        self._dispatch.look_after()
        self._hung_groups.check()
        if events := self._missing.changes():
            self._event_task = asyncio.get_running_loop().create_task(self._write_events(events), name="group events")
        if self._scaling is not None and (report := self._scaling.due(self._fleet.records.values())) is not None:
            self._scaling_task = asyncio.get_running_loop().create_task(self._write_scaling(report), name="scaling")

    async def _write_events(self, events: Iterable[GroupEvent]) -> None:
        with suppress(RedisUnavailable):
            for event in events:
                await write_event(self._redis, self._facts.service_id, event)

    async def _write_scaling(self, report: ScalingReport) -> None:
        with suppress(RedisUnavailable):
            await write_scaling(self._redis, self._facts.service_id, report)

    def _held(self) -> int:
        """Requests that wait in all gateways while no group serves."""
        return self._dispatch.held + sum(record.held for record in self._others())

    def _kv_tokens(self) -> int:
        """KV tokens of all groups together, 0 before their first records."""
        return sum(record.kv_tokens for record in self._fleet.records.values())

    async def _reseed(self) -> None:
        """Durable state goes back into a Redis that lost its data."""
        await self._tenants.seed()
        if self._adapters is not None:
            await self._adapters.adapters.reseed()

    async def _ask(self, request_id: str, tenant: str) -> bytes | None:
        """Asks the other gateways for the record of a request."""
        return await self._questions.ask(request_id, tenant) if self._others() else None

    def _others(self) -> list[GatewayRecord]:
        return [] if self._heartbeat is None else self._heartbeat.others

    def _record(self) -> GatewayRecord:
        """Called on a thread."""
        metrics = self._context.metrics
        return GatewayRecord(
            gateway=self._id,
            host=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            ready=self._dispatch.ready(),
            in_flight=self._context.draining.in_flight,
            metrics=generate_latest(metrics.registry) if self._has_peers else b"",
            tenant_metrics=generate_latest(metrics.tenants) if self._has_peers else b"",
            quarantined=self._context.quarantine.digests(),
            held=self._dispatch.held,
            is_leaving=self._leaving.begun,
            refused=self._live.refused,
            kind=kind_of(self._facts.model_digest),
            reply_to=self._dispatch.reply_to,
            routing_policy=self._settings.gateway.routing_policy,
        )

    async def _open_port(self, app: FastAPI) -> None:
        gateway = self._settings.gateway
        tls = server_context(gateway)  # may fail: before there is a socket
        listener = listen(gateway.host, gateway.port, shared=gateway.num_gateways > 1)
        limits = HttpLimits().within(allow_many_open_files())
        self._server = make_server(app, shutdown_timeout_s=self._settings.shutdown_timeout_s, limits=limits, tls=tls)
        self._serving = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[listener]), name="http server"
        )

    def _is_tenant(self, name: str) -> bool:
        """Returns False for a tenant that was removed, as far as this gateway knows."""
        tenants = self._tenants.directory
        return name == DEFAULT_TENANT or name in tenants.tenants or not tenants.is_certain

    def _most_adapters(self, tenant: str) -> int | None:
        """Returns how many adapters a tenant may have; RequestRefused when there is no such tenant."""
        return adapter_limit(self._tenants.directory.tenants, tenant)

    @asynccontextmanager
    async def _failures_reported(self) -> AsyncIterator[None]:
        """Tells the launcher why the gateway cannot start, and raises it."""
        try:
            yield
        except Exception as error:
            log.error("gateway %s does not start: %s", self._id, error)
            failure = StartFailure(part="the gateway", message=str(error), flag=getattr(error, "flag", None))
            with suppress(RedisUnavailable):
                await report_start_failure(self._redis, self._facts.service_id, failure)
            raise
