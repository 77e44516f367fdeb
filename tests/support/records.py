"""Records in the private Redis of a running service, which are newer than those of its gateways."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tandem.cluster.fleet.fleet_view import GroupRecord
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
