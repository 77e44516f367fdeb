"""Readings of a running service at one moment each, from Redis: for `tandem status` and `tandem top`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tandem.cluster.cli.client.running_service import runs_on
from tandem.configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.adapters.entries import AdapterEntry
    from tandem.cluster.fleet.fleet_view import GroupRecord, StartFailure
    from tandem.cluster.fleet.gateway_records import GatewayRecord
    from tandem.cluster.fleet.group_events import GroupTally
    from tandem.cluster.fleet.group_reports import GroupReport
    from tandem.cluster.ray_private.application_state import ApplicationState
    from tandem.cluster.scaling.scaling_watch import ScalingReport
    from tandem.cluster.state.redis_client import BackgroundClient

AppFlag = Annotated[str | None, typer.Option("--app", help="A service of Ray Serve instead: its application's name.")]
AddressFlag = Annotated[
    str, typer.Option("--address", help="GCS of the Ray that --app is in, HOST:PORT. auto: the one on this node.")
]


class ServiceReading(NamedTuple):
    """The state of a service at one moment. reports: of the groups that have answered, by id. gateways: empty where
    there is only one, of `tandem serve`. running: requests of each tenant, None where no limit needs them counted.
    redis_state: what is wrong with Redis, after its name; empty while it answers. failure: why a group could not start.
    scaling: what the gateways say of the number of groups, if that follows their load. tally: groups that started and
    were lost, None where Redis does not tell."""

    groups: "Sequence[GroupRecord]"
    reports: "Mapping[str, GroupReport]"
    gateways: "Sequence[GatewayRecord]"
    redis_state: str
    adapters: "Sequence[AdapterEntry]"
    running: Mapping[str, int | None]
    failure: "StartFailure | None" = None
    scaling: "ScalingReport | None" = None
    tally: "GroupTally | None" = None


class ShownService(NamedTuple):
    """A service to show. model: of its adapters; None: as its groups say. addresses: of the nodes of Ray, by id, of an
    application. state: what Serve says of an application; None: it is none, or Serve says nothing."""

    title: str
    service_id: str
    redis_url: str
    model: str | None = None
    logs: str | None = None
    addresses: Mapping[str, str] | None = None
    state: "ApplicationState | None" = None


def check_one_name(url: str | None, app: str | None) -> None:
    """SettingsError for a service that is named twice."""
    if app is not None and url is not None:
        raise SettingsError("a service is named by --url or by --app, not by both", "--app")


def services_here(url: str | None) -> list[ShownService]:
    from tandem.cluster.process.run_files import read_run_files

    runs = read_run_files()
    if not runs:
        raise TandemError(
            "no service of this user runs on this machine, or it has not come up yet (--app names one of Ray Serve)"
        )
    return [
        ShownService(
            f"{run.model} on {run.url} (pid {run.signalled_pid}){', stopping' if run.stopping else ''}",
            run.service_id,
            run.redis_url,
            run.model,
            run.logs,
        )
        for run in (runs if url is None else runs_on(url, runs))
    ]


def application_shown(app: str, address: str) -> ShownService:
    from tandem.cluster.service.application import find_application

    found = find_application(app, address)
    title = f"application {app}"
    return ShownService(title, found.service_id, found.redis_url, addresses=found.addresses, state=found.state)


def on_node(shown: ShownService, host: str) -> str:
    """The address of the node that a gateway or a group is on, in words; empty where all are on this machine."""
    return "" if shown.addresses is None else f"node {shown.addresses.get(host, host)}  "


def progress(shown: ShownService, now: ServiceReading) -> str:
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


def losses(now: ServiceReading) -> str | None:
    """Returns a line about the groups that were lost since the service started, and the last of them; None where none
    was."""
    if (tally := now.tally) is None or tally.last_loss is None:
        return None
    here = {record.group for record in now.groups}
    back = ", and is back" if tally.last_loss.kind == "missing" and tally.last_loss.group in here else ""
    return (
        f"groups lost {tally.losses} since the start; the last {_ago(tally.last_loss_s)}: {tally.last_loss.loss}{back}"
    )


def _ago(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


async def read_service(shown: ShownService, redis: "BackgroundClient") -> ServiceReading:
    from tandem.cluster.adapters.adapter_list import AdapterList
    from tandem.cluster.fleet.fleet_view import FleetView
    from tandem.cluster.fleet.gateway_records import GatewayRecord, read_gateways
    from tandem.cluster.fleet.group_events import read_tally
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
    scaling = tally = None
    with suppress(RedisUnavailable):
        scaling = await read_scaling(redis, shown.service_id)
        tally = await read_tally(redis, shown.service_id)
        gateways = await read_gateways(redis, shown.service_id)
        await listed.refresh()
        running = await running_requests(redis)
    groups, adapters = list(fleet.records.values()), list(listed.entries.values())
    state, failure = fleet.redis_state, fleet.start_failure
    return ServiceReading(groups, reports, gateways, state, adapters, running, failure, scaling, tally)
