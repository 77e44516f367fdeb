"""What can happen to a Redis that a gateway's tenants use (FT-08): each fault begins and ends with its block."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tandem.cluster.process.redis_server import RedisServer
from tests.support.slow_link import SlowLink
from tests.unit.tenants.tenant_rig import patient

LATENCY_S = 0.5
Fault = Callable[[RedisServer, SlowLink], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def frozen(server: RedisServer, link: SlowLink) -> AsyncIterator[None]:
    del link
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    yield
    os.kill(server.pid, signal.SIGCONT)


@asynccontextmanager
async def far(server: RedisServer, link: SlowLink) -> AsyncIterator[None]:
    """Every answer comes, half a second late."""
    del server
    link.delay_s = LATENCY_S
    yield
    link.delay_s = 0.0


@asynccontextmanager
async def killed(server: RedisServer, link: SlowLink) -> AsyncIterator[None]:
    """It comes back with what its file holds."""
    del link
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    yield
    server.stop()
    server.start()


@asynccontextmanager
async def emptied(server: RedisServer, link: SlowLink) -> AsyncIterator[None]:
    del link
    await _command(server, "FLUSHALL")
    yield


@asynccontextmanager
async def refusing(server: RedisServer, link: SlowLink) -> AsyncIterator[None]:
    """It answers, and every answer is an error."""
    del link
    await _command(server, "ACL", "SETUSER", "default", "-@all", "+acl")
    yield
    await _command(server, "ACL", "SETUSER", "default", "+@all")


FAULTS: Mapping[str, Fault] = {
    "frozen": frozen,
    "far": far,
    "killed": killed,
    "emptied": emptied,
    "refusing": refusing,
}


async def _command(server: RedisServer, *parts: str) -> None:
    client = patient(server)
    try:
        await client.command(*parts)
    finally:
        await client.close()
