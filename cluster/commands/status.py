"""`tandem status`: the groups of this user's running service, from Redis."""

import asyncio

import typer

from configs.errors import TandemError


def status() -> None:
    """Show the running service's groups: state, queues, KV use."""
    from cluster.coordination.client import BackgroundClient
    from cluster.coordination.registry import FleetView, GroupRecord
    from cluster.run_files import RunFile, read_run_files

    async def read(run: RunFile) -> tuple[dict[str, GroupRecord], bool]:
        redis = BackgroundClient(run.redis_url, timeout_s=1.0, retries=1)
        try:
            fleet = FleetView(redis, run.service_id)
            await fleet.refresh()
            return fleet.records, fleet.redis_away
        finally:
            await redis.close()

    runs = read_run_files()
    if not runs:
        raise TandemError("no service of this user is running on this machine")
    for run in runs:
        records, away = asyncio.run(read(run))
        typer.echo(f"{run.model} on {run.url} (pid {run.pid}){', Redis is away' if away else ''}")
        for record in records.values():
            typer.echo(
                f"  group {record.group}  {record.state}  running {record.running}  waiting {record.waiting}  "
                f"KV {record.kv_used:.0%}  outstanding tokens {record.outstanding_tokens}  "
                f"pid {record.pid}  ranks {' '.join(map(str, record.rank_pids)) or '-'}"
            )
