"""A private Redis server that is kept running, where no launcher owns one and no --redis-url names one.

The service's identity has it (identity.py). It listens with a random password; a server that dies is started again on
the same port with the same data.
"""

import asyncio
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.cluster.process.redis_server import RedisServer
from tandem.configs.limits import ANY_PORTS, Ports, listen

WATCH_PERIOD_S = 0.5


class PrivateRedis:
    """One server with its data in `folder`, on a free port of the address `host`. start() takes up data that is there
    already. Used on one event loop."""

    def __init__(self, folder: Path, host: str, ports: Ports = ANY_PORTS) -> None:
        self.host = host
        self._folder = folder
        self._server = RedisServer(folder, listen=(host, _free_port(host, ports), secrets.token_hex(24)))
        # a thread of its own, because the server ends with the thread that has started it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def is_kept(self) -> bool:
        """True while the server runs, or is being started again."""
        return self._watching is not None and not self._watching.done()

    async def start(self) -> None:
        """Returns when the server answers. SettingsError if it does not in time."""
        await self._start()
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="redis watch")

    async def stop(self, *, keep_data: bool) -> None:
        """Ends the server, and removes its folder unless the data is kept."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._server.stop)
        self._thread.shutdown(wait=False)
        if not keep_data:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if not self._server.is_alive():
                await self._start()

    async def _start(self) -> None:
        """Starts the server on its own thread: it takes seconds on a slow machine, and url must be told meanwhile."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._server.start)


def _free_port(host: str, ports: Ports) -> int:
    with listen(host, ports) as probe:
        return int(probe.getsockname()[1])
