"""`tandem status`: the groups, adapters and tenants of this user's running service, from Redis."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from cluster.commands.redis_of import runs_on
from configs.errors import TandemError

if TYPE_CHECKING:
    from cluster.adapters.entries import AdapterEntry
    from cluster.coordination.gateways import GatewayRecord
    from cluster.coordination.registry import GroupRecord
    from cluster.run_files import RunFile


Url = Annotated[str | None, typer.Option("--url", help="Only the service at this address. Default: all that run here.")]


class _Reading(NamedTuple):
    """A service at one moment. gateways: none where there is one only. running: requests of each tenant, None where
    nobody counts them."""

    groups: "Sequence[GroupRecord]"
    gateways: "Sequence[GatewayRecord]"
    redis_away: bool
    adapters: "Sequence[AdapterEntry]"
    running: Mapping[str, int | None]


def status(url: Url = None) -> None:
    """Show a running service: groups, adapters, tenants."""
    from cluster.run_files import read_run_files

    runs = read_run_files()
    if not runs:
        raise TandemError("no service of this user is running on this machine")
    for run in runs if url is None else runs_on(url, runs):
        now = asyncio.run(_read(run))
        also = f"{', stopping' if run.stopping else ''}{', Redis is away' if now.redis_away else ''}"
        typer.echo(f"{run.model} on {run.url} (pid {run.pid}){also}")
        for gateway in now.gateways:
            typer.echo(f"  gateway {gateway.gateway}  requests in hand {gateway.in_hand}  pid {gateway.pid}")
        for record in now.groups:
            typer.echo(
                f"  group {record.group}  {record.state}  running {record.running}  waiting {record.waiting}  "
                f"KV {record.kv_used:.0%}  outstanding tokens {record.outstanding_tokens}  "
                f"pid {record.pid}  ranks {' '.join(map(str, record.rank_pids)) or '-'}"
            )
            if (reason := _disk_disabled(record)) is not None:
                typer.echo(f"    --kv-disk-path was switched off: {reason}")
        if now.adapters:
            typer.echo(f"  adapters {len(now.adapters)}: {', '.join(_places(entry, now) for entry in now.adapters)}")
        if now.running:
            shown = (name if count is None else f"{name} running {count}" for name, count in now.running.items())
            typer.echo(f"  tenants {len(now.running)}: {', '.join(shown)}")


def _disk_disabled(record: "GroupRecord") -> str | None:
    """Why a group serves on without its disk tier; None when it does not."""
    from cluster.metrics import decode_stats

    stats = decode_stats(record)
    return None if stats is None or stats.offload is None else stats.offload.disk_disabled


def _places(entry: "AdapterEntry", now: _Reading) -> str:
    """An adapter, and how many groups hold it where."""
    from cluster.commands.adapters import held_by

    reports = [record.adapters for record in now.groups if record.adapters is not None]
    held = [f"{tier} {count}" for tier, count in held_by(reports, entry.digest).items() if count]
    return f"{entry.name}@{entry.digest[:12]} {' '.join(held) or 'at its source'}"


async def _read(run: "RunFile") -> _Reading:
    from cluster.adapters.registry import AdapterRegistry
    from cluster.coordination.client import BackgroundClient, RedisAway
    from cluster.coordination.gateways import GatewayRecord, read_gateways
    from cluster.coordination.registry import FleetView
    from cluster.tenants.overview import running_requests

    redis = BackgroundClient(run.redis_url, timeout_s=1.0, retries=1)
    try:
        fleet = FleetView(redis, run.service_id)
        await fleet.refresh()
        registry, running = AdapterRegistry(redis, run.model), dict[str, int | None]()
        gateways: list[GatewayRecord] = []
        with suppress(RedisAway):
            gateways = await read_gateways(redis, run.service_id)
            await registry.refresh()
            running = await running_requests(redis)
        groups, adapters = list(fleet.records.values()), list(registry.entries.values())
        return _Reading(groups, gateways, fleet.redis_away, adapters, running)
    finally:
        await redis.close()
