"""The deployment `tandem-redis`: a private Redis under `serve run`, where no launcher owns one. One small replica.

The server listens on the node's address with a random password, because groups may be on other nodes. A server that
dies is started again on the same port with the same data.
"""

import asyncio
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_address import Client, MovingRedis
from tandem.cluster.wire.service_facts import ServiceFacts, check_node
from tandem.configs.environment import short_temp_folder


class PrivateRedis:
    """The replica that owns the server. Gateways and coordinators call url(), again after Redis failures."""

    async def __init__(self, facts: ServiceFacts) -> None:  # type: ignore[misc]  # Serve awaits it
        check_node(facts)
        self._folder = Path(tempfile.mkdtemp(prefix="tr-", dir=short_temp_folder()))
        host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        self._server = RedisServer(self._folder, listen=(host, _free_port(host), secrets.token_hex(24)))
        # a thread of its own, because the server ends with the thread that has started it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        await self._start()
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="redis watch")

    async def url(self) -> str:
        return self._server.url

    async def check_health(self) -> None:  # else on a thread of its own
        if self._watching.done():
            raise RuntimeError("the private Redis server cannot be kept running")

    async def __del__(self) -> None:
        self._watching.cancel()
        self._server.stop()
        self._thread.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if not self._server.is_alive():
                await self._start()

    async def _start(self) -> None:
        """Starts the server on its own thread: it takes seconds on a slow machine, and url() must answer meanwhile."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._server.start)


async def open_redis(facts: ServiceFacts, deployment: Any, open_client: Callable[[str], Client]) -> MovingRedis:
    """Opens the service's Redis for a gateway or a coordinator. deployment: a handle of tandem-redis; None when the URL
    is in the facts."""
    if deployment is None:
        assert facts.redis_url is not None, "a service has a Redis"
        return MovingRedis(facts.redis_url, open_client, None)

    async def ask() -> str:
        return str(await deployment.url.remote())

    return MovingRedis(await ask(), open_client, ask)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
