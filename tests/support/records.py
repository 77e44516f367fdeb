"""Records in the private Redis of a running service, which are newer than those of its gateways."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport, GroupReports
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.service import Service, is_alive, wait_for

T = TypeVar("T")
_redis: dict[int, psutil.Process] = {}
"""By the service's process, while it runs: to look through all processes costs more than what Redis is asked."""


def redis_process(service: Service) -> psutil.Process:
    known = _redis.get(service.process.pid)
    if known is None or not is_alive(known):
        known = wait_for(lambda: service.titled("tandem redis"), 15, "Redis runs")[0]
        _redis[service.process.pid] = known
    return known


def redis_url(redis: psutil.Process) -> str:
    """Of the socket beside its configuration file."""
    return f"unix://{Path(redis.cmdline()[1]).parent / 'redis.sock'}"


def command(redis: psutil.Process, *parts: str | bytes) -> Any:
    """To the private server."""
    return asyncio.run(_ask(redis, lambda client: client.command(*parts)))


def group_records(service: Service) -> list[GroupRecord]:
    """As the groups have written them last."""

    async def values(client: BackgroundClient) -> list[bytes | None]:
        names = await client.command("KEYS", "tandem:*:group:*")
        return await client.command("MGET", *names) if names else []  # type: ignore[no-any-return]

    found = asyncio.run(_ask(redis_process(service), values))
    return [msgspec.msgpack.decode(value, type=GroupRecord) for value in found if value is not None]


async def _ask(redis: psutil.Process, ask: Callable[[BackgroundClient], Awaitable[T]]) -> T:
    client = BackgroundClient(redis_url(redis))
    try:
        return await ask(client)
    finally:
        await client.close()


def group_reports(service: Service, answer_s: float = 20.0) -> list[GroupReport]:
    """What the groups answer when they are asked for their statistics; those of them that do in time."""
    redis, records = redis_process(service), group_records(service)
    names = command(redis, "KEYS", "tandem:*:groups")
    service_id = names[0].decode().split(":")[1]
    groups = [record.group for record in records]
    return asyncio.run(_ask(redis, lambda client: GroupReports(client, service_id).read(groups, answer_s)))


_pids: dict[str, list[int]] = {}
"""By group, which has the same ranks for all its life."""


def rank_pids(service: Service, group: str) -> list[int]:
    """Process ids of a group's ranks, in order; none of a group that does not answer."""
    if group not in _pids:
        _pids.update({report.group: report.rank_pids for report in group_reports(service, 5.0) if report.rank_pids})
    return _pids.get(group, [])
