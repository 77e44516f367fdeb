"""The Serve application as the launcher drives it: deployed, awaited, drained. Imports ray at the top."""

import asyncio
import http.client
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from tandem.cluster.app import build_app
from tandem.cluster.deploy.placement import min_groups
from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord, bytes_of, read_start_failure
from tandem.cluster.fleet.gateway_records import read_gateways
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.http.draining import CUT_OFF_S
from tandem.cluster.gateway.http.tls import client_context, read_certificate
from tandem.cluster.group.host_tier_actor import end_host_tiers
from tandem.cluster.ray_private.application_end import begin_delete
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.cluster.wire.service_facts import APP, COORDINATOR, GATEWAY, ServiceFacts
from tandem.configs.errors import SettingsError
from tandem.configs.schema import ServiceSettings

log = logging.getLogger("tandem.launcher")
POLL_S = 0.05
SLOW_POLL_S = 1.0
DELETE_S = 5.0
PLACEMENT_S = 20.0
CHOICES_S = 10.0
"""The longest wait for what groups chose, once they serve."""


class ServeApp:
    """One deployed application. private: Ray ends with it. In a Ray of others it has a name of its own, is reached
    through none of their proxies, and is all that ends with it."""

    def __init__(self, settings: ServiceSettings, facts: ServiceFacts, private: bool) -> None:
        self._settings = settings
        self._facts = facts
        self._app = APP if private else f"{APP}-{facts.service_id}"
        self._route_prefix = "/" if private else None
        certificate = read_certificate(settings.gateway)
        self._tls = None if certificate is None else client_context(certificate)
        self._deployed = False
        self.is_ready = False

    def deploy(self) -> None:
        """Hands the application to Serve and returns at once."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing serve has set it to INFO
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
        self._deployed = True
        target = serve.RunTarget(
            target=build_app(self._settings, self._facts), name=self._app, route_prefix=self._route_prefix
        )
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def wait_until_ready(self, keep: Callable[[], None], loading: Callable[[int, int], None]) -> list[str]:
        """Waits until the gateway answers and all groups serve. SettingsError when a part of the start fails.

        Returns lines on each group's layout and choices. keep() is called each second, loading() with loaded and total
        bytes of weights several times in each.
        """
        choices = asyncio.run(self._wait_until_ready(keep, loading))
        self.is_ready = True
        return choices

    def requests_in_flight(self) -> int | None:
        """Requests that the gateways are answering; None when no gateway answers in time."""
        answer = self._get("/load")
        return None if answer is None else int(json.loads(answer)["http_requests_in_hand"])

    def drain(self, is_urgent: Callable[[], bool], cut_off: Callable[[int], None]) -> None:
        """Ends the application: new requests are refused, those in flight have the shutdown timeout.

        cut_off is called with the number of requests for which that was too short, when there are any.
        """
        if not self._deployed or not ray.is_initialized():
            return
        try:
            if self.is_ready and (count := asyncio.run(self._drain_gateways(is_urgent))):
                cut_off(count)
            begin_delete(self._app)
            deadline_s = time.monotonic() + DELETE_S
            while self._app in serve.status().applications and time.monotonic() < deadline_s and not is_urgent():
                time.sleep(POLL_S)
            if self._settings.engine.cache.kv_offloading_gib is not None:
                end_host_tiers(self._facts.service_id)
        except (ray.exceptions.RayError, RuntimeError):
            return  # Ray itself is gone, and with it all that could be drained

    async def _drain_gateways(self, is_urgent: Callable[[], bool]) -> int:
        """Waits until every gateway has answered its requests in flight, while all else still runs.

        Returns how many requests were cut off; gateways that do not answer count as 0.
        """
        asking = asyncio.create_task(_ask_gateways(self._app, "drain"), name="drain")
        deadline_s = time.monotonic() + self._settings.shutdown_timeout_s + CUT_OFF_S + DELETE_S
        while not asking.done() and time.monotonic() < deadline_s and not is_urgent():
            await asyncio.wait({asking}, timeout=POLL_S)
        count = asking.result() if asking.done() else 0
        if is_urgent() and not asking.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_OFF_S):
                    count = await _ask_gateways(self._app, "cut_off")
        asking.cancel()
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # Serve's client deplores that this loop ends
        return count

    async def _wait_until_ready(self, keep: Callable[[], None], loading: Callable[[int, int], None]) -> list[str]:
        assert self._facts.redis_url is not None
        redis = BackgroundClient(self._facts.redis_url, timeout_s=1.0, retries=2)
        fleet = FleetView(redis, self._facts.service_id, reseed=_nothing)
        started_s = checked_s = time.monotonic()
        try:
            while True:
                await fleet.refresh()
                loading(*bytes_of(fleet.records.values(), min_groups(self._settings)))
                if self._groups_serve(list(fleet.records.values())) and await self._gateways_answer(redis):
                    return [line for report in await fleet.read_reports(CHOICES_S) for line in self._choices(report)]
                await self._raise_failure(redis)
                if time.monotonic() - checked_s >= SLOW_POLL_S:
                    checked_s = time.monotonic()
                    keep()
                    self._raise_serve_failure()
                    if checked_s - started_s >= PLACEMENT_S:
                        raise_unplaced(self._app)
                await asyncio.sleep(POLL_S)
        finally:
            await redis.close()

    def _groups_serve(self, records: list[GroupRecord]) -> bool:
        return sum(record.state == "serving" for record in records) >= min_groups(self._settings)

    async def _gateways_answer(self, redis: BackgroundClient) -> bool:
        """True once one gateway answers here, and of several each has a record of being ready. Records must do for
        gateways that want certificates of clients."""
        gateway = self._settings.gateway
        count, may_ask = gateway.num_gateways, gateway.ssl_ca_certs is None
        with suppress(RedisUnavailable):
            if count > 1 or not may_ask:
                ready = [record for record in await read_gateways(redis, self._facts.service_id) if record.ready]
                if len(ready) < count:
                    return False
            return not may_ask or self._get("/readyz") is not None
        return False

    def _get(self, path: str) -> bytes | None:
        """The body of the gateway's answer; None when it is not 200 or does not come in a second."""
        gateway = self._settings.gateway
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)
        if self._tls is None:
            connection = http.client.HTTPConnection(host, gateway.port, timeout=1.0)
        else:
            connection = http.client.HTTPSConnection(host, gateway.port, timeout=1.0, context=self._tls)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    async def _raise_failure(self, redis: BackgroundClient) -> None:
        try:
            failure = await read_start_failure(redis, self._facts.service_id)
        except RedisUnavailable:
            return
        if failure is not None:
            raise SettingsError(f"{failure.part} did not start: {failure.message}", failure.flag)

    def _raise_serve_failure(self) -> None:
        app = serve.status().applications.get(self._app)
        if app is not None and app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            messages = [d.message for d in app.deployments.values() if d.message] or [app.message]
            last = next((line for line in reversed(messages[0].strip().splitlines()) if line.strip()), "")
            raise SettingsError(f"Serve could not start the application: {last.strip()}")

    def _choices(self, report: GroupReport) -> list[str]:
        parallel = self._settings.engine.parallel
        stats = decode_stats(report)
        kv = f", {stats.num_blocks} KV blocks of {stats.block_size} tokens" if stats is not None else ""
        shape = f"TP {parallel.tensor_parallel_size} x PP {parallel.pipeline_parallel_size}"
        first = f"group {report.group}: {shape} on {self._facts.device}{kv}"
        return [first, *(f"group {report.group}: {note}" for note in report.notes)]


async def _ask_gateways(app: str, method: str) -> int:
    """Calls the method on every gateway and returns the sum of their answers; one that is gone counts as 0."""
    try:
        asked = serve.get_deployment_handle(GATEWAY, app).broadcast(method)
        return sum(answer for answer in await asked.results_async(return_exceptions=True) if isinstance(answer, int))
    except Exception as error:  # Ray and Serve report gateways that are gone in many ways
        log.warning("the gateways could not be asked for %s: %s", method, error)
        return 0


def raise_unplaced(app: str) -> None:
    """Raises a SettingsError while a placement group of the app waits, with its demand and the cluster's resources."""
    prefix = f"SERVE_REPLICA::{app}#{COORDINATOR}#"  # Serve's naming
    for group in ray.util.placement_group_table().values():
        if group["state"] == "PENDING" and group.get("name", prefix).startswith(prefix):
            asked = ", ".join(_resources(bundle) for bundle in group["bundles"].values())
            raise SettingsError(
                f"a group's ranks were not placed in {PLACEMENT_S:.0f} s: asked for bundles [{asked}] with "
                f"{group['strategy']}; the cluster has {_resources(ray.cluster_resources())}, "
                f"free {_resources(ray.available_resources())}",
                "--tensor-parallel-size",
            )


def _resources(resources: dict[str, float]) -> str:
    return " ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU"))


async def _nothing() -> None:
    """Reseeds no durable state: that is the gateways' part."""
