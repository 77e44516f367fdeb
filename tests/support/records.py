"""Records in the private Redis of a running service, which are newer than those of its gateways."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport, GroupReports
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.service import Service, wait_for


def redis_process(service: Service) -> psutil.Process:
    return wait_for(lambda: service.titled("tandem redis"), 15, "Redis runs")[0]


def redis_url(redis: psutil.Process) -> str:
    """Of the socket beside its configuration file."""
    return f"unix://{Path(redis.cmdline()[1]).parent / 'redis.sock'}"


def command(redis: psutil.Process, *parts: str | bytes) -> Any:
    """To the private server."""

    async def send() -> Any:
        client = BackgroundClient(redis_url(redis))
        try:
            return await client.command(*parts)
        finally:
            await client.close()

    return asyncio.run(send())


def group_records(service: Service) -> list[GroupRecord]:
    """As the groups have written them last."""
    redis = redis_process(service)
    names = command(redis, "KEYS", "tandem:*:group:*")
    values = command(redis, "MGET", *names) if names else []
    return [msgspec.msgpack.decode(value, type=GroupRecord) for value in values if value is not None]


def group_reports(service: Service, answer_s: float = 20.0) -> list[GroupReport]:
    """What the groups answer when they are asked for their statistics; those of them that do in time."""
    redis, records = redis_process(service), group_records(service)
    names = command(redis, "KEYS", "tandem:*:groups")
    service_id = names[0].decode().split(":")[1]

    async def ask() -> list[GroupReport]:
        client = BackgroundClient(redis_url(redis))
        try:
            return await GroupReports(client, service_id).read([record.group for record in records], answer_s)
        finally:
            await client.close()

    return asyncio.run(ask())


_pids: dict[str, list[int]] = {}
"""By group, which has the same ranks for all its life."""


def rank_pids(service: Service, group: str) -> list[int]:
    """Process ids of a group's ranks, in order; none of a group that does not answer."""
    if group not in _pids:
        _pids.update({report.group: report.rank_pids for report in group_reports(service, 5.0) if report.rank_pids})
    return _pids.get(group, [])
