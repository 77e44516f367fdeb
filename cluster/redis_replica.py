"""The deployment `tandem-redis`: a private Redis under `serve run`, where no launcher owns one. One small replica.

Listens on the node's address with a random password, because other nodes may hold groups. A server that dies is
started again on the same port with the same data.
"""

import asyncio
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

import ray

from cluster.coordination.redis_server import RedisServer
from cluster.service import ServiceFacts, check_install
from configs.environment import short_temp_folder


class PrivateRedis:
    """Owns the server; everyone of the service asks it for the URL once."""

    async def __init__(self, facts: ServiceFacts) -> None:  # type: ignore[misc]  # Serve awaits it
        check_install(facts)
        self._folder = Path(tempfile.mkdtemp(prefix="tr-", dir=short_temp_folder()))
        host = "127.0.0.1" if facts.single_node else ray.util.get_node_ip_address()
        self._server = RedisServer(self._folder, listen=(host, _free_port(host), secrets.token_hex(24)))
        self._server.start()
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="redis watch")

    async def url(self) -> str:
        return self._server.url

    def check_health(self) -> None:
        if self._watching.done():
            raise RuntimeError("the private Redis server cannot be kept running")

    async def __del__(self) -> None:
        self._watching.cancel()
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if not self._server.is_alive():
                self._server.start()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
