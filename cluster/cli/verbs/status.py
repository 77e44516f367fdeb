"""`tandem status`: groups, gateways, adapters and tenants of this user's running services, or of an application under
Serve, from Redis."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.cli.client.running_service import with_redis
from tandem.cluster.cli.client.service_reading import (
    AddressFlag,
    AppFlag,
    ServiceReading,
    ShownService,
    application_shown,
    check_one_name,
    losses,
    on_node,
    progress,
    read_service,
    services_here,
)
from tandem.cluster.cli.verbs.adapters import held_by

if TYPE_CHECKING:
    from tandem.cluster.adapters.entries import AdapterEntry
    from tandem.cluster.fleet.group_reports import GroupReport


def status(
    url: Annotated[
        str | None, typer.Option("--url", help="Show only the service at this address. Default: all services here.")
    ] = None,
    app: AppFlag = None,
    address: AddressFlag = "auto",
) -> None:
    """Show the running services: groups, adapters and tenants."""
    check_one_name(url, app)
    for shown in services_here(url) if app is None else [application_shown(app, address)]:
        _show(shown, with_redis(shown.redis_url, partial(read_service, shown), timeout_s=1.0, retries=1))


def _show(shown: ShownService, now: ServiceReading) -> None:
    typer.echo(f"{shown.title}{progress(shown, now)}{f', Redis {now.redis_state}' if now.redis_state else ''}")
    if (scaling := now.scaling) is not None:
        held = f"  held {scaling.held}" if scaling.held else ""
        typer.echo(f"  groups wanted {scaling.groups}{held}: {scaling.why}")
    for gateway in now.gateways:
        leaving = "  leaving" if gateway.is_leaving else ""
        place = f"{on_node(shown, gateway.host)}pid {gateway.pid}"
        policy = f"  routing {gateway.routing_policy}" if gateway.routing_policy else ""
        typer.echo(f"  gateway {gateway.gateway}  requests in flight {gateway.in_flight}{policy}  {place}{leaving}")
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
            f"{on_node(shown, record.host)}pid {record.pid}  ranks {' '.join(map(str, pids)) or '-'}"
        )
        if record.fetching:
            typer.echo(f"    the model is downloaded: {record.fetching}")
        if report is not None:
            for line in _remarks(report):
                typer.echo(f"    {line}")
    if (ends := losses(now)) is not None:
        typer.echo(f"  {ends}")
    if now.adapters:
        typer.echo(f"  adapters {len(now.adapters)}: {', '.join(_places(entry, now) for entry in now.adapters)}")
    if now.running:
        counts = (name if count is None else f"{name} running {count}" for name, count in now.running.items())
        typer.echo(f"  tenants {len(now.running)}: {', '.join(counts)}")
    if shown.logs is not None:
        typer.echo(f"  logs in {shown.logs}")


def _remarks(report: "GroupReport") -> Iterator[str]:
    """Lines on a group with drafts, and on one whose disk tier was switched off."""
    from tandem.cluster.fleet.engine_metrics import decode_stats

    stats = decode_stats(report)
    if stats is None:
        return
    if (drafts := stats.drafts) is not None:
        yield f"drafts accepted {drafts.num_accepted:,} of {drafts.num_draft_tokens:,} since its start"
    if stats.offload is not None and stats.offload.disk_disabled is not None:
        yield f"--kv-disk-path was switched off: {stats.offload.disk_disabled}"


def _places(entry: "AdapterEntry", now: ServiceReading) -> str:
    """An adapter, and the number of groups that hold it, by tier."""
    held = held_by((report.adapters for report in now.reports.values()), entry.digest)
    return f"{entry.name}@{entry.digest[:12]} {' '.join(held) or 'at its source'}"
