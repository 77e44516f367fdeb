"""`tandem status`: groups, gateways, adapters and tenants of this user's running services, or of an application under
Serve, from Redis."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tandem.cluster.cli.client.running_service import runs_on, with_redis
from tandem.cluster.cli.verbs.adapters import held_by
from tandem.configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.adapters.entries import AdapterEntry
    from tandem.cluster.fleet.fleet_view import GroupRecord, StartFailure
    from tandem.cluster.fleet.gateway_records import GatewayRecord
    from tandem.cluster.fleet.group_reports import GroupReport
    from tandem.cluster.ray_private.application_state import ApplicationState
    from tandem.cluster.scaling.scaling_watch import ScalingReport
    from tandem.cluster.state.redis_client import BackgroundClient


class _Reading(NamedTuple):
    """The state of a service at one moment. reports: of the groups that have answered, by id. gateways: empty where
    there is only one, of `tandem serve`. running: requests of each tenant, None where no limit needs them counted.
    failure: why a group could not start. scaling: what the gateways say of the number of groups, if that follows their
    load."""

    groups: "Sequence[GroupRecord]"
    reports: "Mapping[str, GroupReport]"
    gateways: "Sequence[GatewayRecord]"
    redis_unavailable: bool
    adapters: "Sequence[AdapterEntry]"
    running: Mapping[str, int | None]
    failure: "StartFailure | None" = None
    scaling: "ScalingReport | None" = None


class _Shown(NamedTuple):
    """A service to show. model: of its adapters; None: as its groups say. addresses: of the nodes of Ray, by id, of an
    application. state: what Serve says of an application; None: it is none, or Serve says nothing."""

    title: str
    service_id: str
    redis_url: str
    model: str | None = None
    logs: str | None = None
    addresses: Mapping[str, str] | None = None
    state: "ApplicationState | None" = None


def status(
    url: Annotated[
        str | None, typer.Option("--url", help="Show only the service at this address. Default: all services here.")
    ] = None,
    app: Annotated[
        str | None, typer.Option("--app", help="Show a service of Ray Serve instead: its application's name.")
    ] = None,
    address: Annotated[
        str, typer.Option("--address", help="GCS of the Ray that --app is in, HOST:PORT. auto: the one on this node.")
    ] = "auto",
) -> None:
    """Show the running services: groups, adapters and tenants."""
    if app is not None and url is not None:
        raise SettingsError("a service is named by --url or by --app, not by both", "--app")
    for shown in _services_here(url) if app is None else [_application(app, address)]:
        _show(shown, with_redis(shown.redis_url, partial(_read, shown), timeout_s=1.0, retries=1))


def _services_here(url: str | None) -> list[_Shown]:
    from tandem.cluster.process.run_files import read_run_files

    runs = read_run_files()
    if not runs:
        raise TandemError("no service of this user is running on this machine (--app names one of Ray Serve)")
    return [
        _Shown(
            f"{run.model} on {run.url} (pid {run.pid}){', stopping' if run.stopping else ''}",
            run.service_id,
            run.redis_url,
            run.model,
            run.logs,
        )
        for run in (runs if url is None else runs_on(url, runs))
    ]


def _application(app: str, address: str) -> _Shown:
    from tandem.cluster.service.application import find_application

    found = find_application(app, address)
    title = f"application {app}"
    return _Shown(title, found.service_id, found.redis_url, addresses=found.addresses, state=found.state)


def _on_node(shown: _Shown, host: str) -> str:
    """The address of the node that a gateway or a group is on, in words; empty where all are on this machine."""
    return "" if shown.addresses is None else f"node {shown.addresses.get(host, host)}  "


def _show(shown: _Shown, now: _Reading) -> None:
    typer.echo(f"{shown.title}{_progress(shown, now)}{', Redis is unavailable' if now.redis_unavailable else ''}")
    if (scaling := now.scaling) is not None:
        held = f"  held {scaling.held}" if scaling.held else ""
        typer.echo(f"  groups wanted {scaling.groups}{held}: {scaling.why}")
    for gateway in now.gateways:
        leaving = "  leaving" if gateway.is_leaving else ""
        place = f"{_on_node(shown, gateway.host)}pid {gateway.pid}"
        typer.echo(f"  gateway {gateway.gateway}  requests in flight {gateway.in_flight}  {place}{leaving}")
        if gateway.refused:
            typer.echo(f"    {gateway.refused}")
    if (failure := now.failure) is not None and all(record.state != "serving" for record in now.groups):
        typer.echo(f"  {failure.part} did not start: {failure.message}")
    for record in now.groups:
        report = now.reports.get(record.group)
        pids = () if report is None else report.rank_pids
        typer.echo(
            f"  group {record.group}  {record.state}  running {record.running}  waiting {record.waiting}  "
            f"KV {record.kv_used:.0%}  outstanding tokens {record.outstanding_tokens}  "
            f"{_on_node(shown, record.host)}pid {record.pid}  ranks {' '.join(map(str, pids)) or '-'}"
        )
        if record.fetching:
            typer.echo(f"    the model is downloaded: {record.fetching}")
        if report is not None and (reason := _disk_disabled(report)) is not None:
            typer.echo(f"    --kv-disk-path was switched off: {reason}")
    if now.adapters:
        typer.echo(f"  adapters {len(now.adapters)}: {', '.join(_places(entry, now) for entry in now.adapters)}")
    if now.running:
        counts = (name if count is None else f"{name} running {count}" for name, count in now.running.items())
        typer.echo(f"  tenants {len(now.running)}: {', '.join(counts)}")
    if shown.logs is not None:
        typer.echo(f"  logs in {shown.logs}")


def _progress(shown: _Shown, now: _Reading) -> str:
    """Returns what is said behind the title: that a new version comes or has failed, how many requests are held."""
    words, state = [], shown.state
    serves = any(record.state == "serving" for record in now.groups)
    if state is not None and state.status == "DEPLOYING":
        words.append("updating" if serves or any(g.held or g.is_leaving for g in now.gateways) else "starting")
    elif state is not None and state.why_failed is not None:
        words.append(f"did not start: {state.why_failed}")
        if serves:
            words = [f"the new version {words[0]}; the one before serves on"]
    elif state is not None and state.status != "RUNNING":
        words.append(f"{state.status.lower()}{f': {state.message}' if state.message else ''}")
    if held := sum(gateway.held for gateway in now.gateways):
        words.append(f"{held} held")
    return f": {', '.join(words)}" if words else ""


def _disk_disabled(report: "GroupReport") -> str | None:
    """The reason why a group's disk tier was switched off; None while it is on, or where there is none."""
    from tandem.cluster.fleet.engine_metrics import decode_stats

    stats = decode_stats(report)
    return None if stats is None or stats.offload is None else stats.offload.disk_disabled


def _places(entry: "AdapterEntry", now: _Reading) -> str:
    """An adapter, and the number of groups that hold it, by tier."""
    held = held_by((report.adapters for report in now.reports.values()), entry.digest)
    return f"{entry.name}@{entry.digest[:12]} {' '.join(held) or 'at its source'}"


async def _read(shown: _Shown, redis: "BackgroundClient") -> _Reading:
    from tandem.cluster.adapters.adapter_list import AdapterList
    from tandem.cluster.fleet.fleet_view import FleetView
    from tandem.cluster.fleet.gateway_records import GatewayRecord, read_gateways
    from tandem.cluster.scaling.scaling_watch import read_scaling
    from tandem.cluster.state.redis_client import RedisUnavailable
    from tandem.cluster.tenants.tenant_admin import running_requests

    fleet = FleetView(redis, shown.service_id)
    await fleet.refresh()
    reports = {report.group: report for report in await fleet.read_reports()}
    models = [record.model for record in fleet.records.values()]
    listed = AdapterList(redis, shown.model or (models[0] if models else ""))
    running = dict[str, int | None]()
    gateways: list[GatewayRecord] = []
    scaling = None
    with suppress(RedisUnavailable):
        scaling = await read_scaling(redis, shown.service_id)
        gateways = await read_gateways(redis, shown.service_id)
        await listed.refresh()
        running = await running_requests(redis)
    groups, adapters = list(fleet.records.values()), list(listed.entries.values())
    away, failure = fleet.redis_unavailable, fleet.start_failure
    return _Reading(groups, reports, gateways, away, adapters, running, failure, scaling)
