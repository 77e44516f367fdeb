"""A TCP proxy in front of a Redis server that delays answers, as a slow network or a busy server does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.cluster.process.redis_server import RedisServer

CHUNK_BYTES = 2**16


class SlowLink:
    """delay_s may be changed at any time; it holds for later answers of the server. requests: chunks that
    clients have sent."""

    def __init__(self, server: RedisServer) -> None:
        self.delay_s = 0.0
        self.requests = 0
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            from_server, to_server = await asyncio.open_unix_connection(str(self._server.socket_path))
            await self._between(reader, writer, from_server, to_server)
        except (OSError, EOFError):
            pass  # one of the two has gone, or the server never was
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _between(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        answers: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        ways = (
            self._ask(from_client, to_server),
            self._hear(from_server, answers),
            self._answer(answers, to_client),
        )
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_server.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            self.requests += 1
            writer.write(data)
            await writer.drain()

    async def _hear(self, reader: asyncio.StreamReader, answers: "asyncio.Queue[tuple[float, bytes]]") -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(CHUNK_BYTES):
            answers.put_nowait((loop.time() + self.delay_s, data))

    async def _answer(self, answers: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        """Latency, not a slow line: what was said together arrives together."""
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await answers.get()
            await asyncio.sleep(due_s - loop.time())
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def slow_link(server: RedisServer) -> AsyncIterator[SlowLink]:
    link = SlowLink(server)
    await link.open()
    try:
        yield link
    finally:
        await link.close()
