"""A port that speaks TLS, with a server behind it that does not: not every build of Redis does.

As a program, on a node of a lab: ADDRESS PORT CERTFILE KEYFILE PORT-BEHIND.
"""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any


@asynccontextmanager
async def tls_in_front(
    behind: Path | tuple[str, int], certfile: str, keyfile: str, at: tuple[str, int] = ("127.0.0.1", 0)
) -> AsyncIterator[int]:
    """The port. behind: the socket of the server, or its address."""
    passing = set[asyncio.Task[Any]]()

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(behind, Path):
            answers, to_behind = await asyncio.open_unix_connection(behind)
        else:
            answers, to_behind = await asyncio.open_connection(*behind)
        for copying in (copied(reader, to_behind), copied(answers, writer)):
            task = asyncio.ensure_future(copying)
            passing.add(task)
            task.add_done_callback(passing.discard)

    async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await source.read(2**16):
                target.write(data)
        target.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certfile, keyfile)
    async with await asyncio.start_server(passed_on, *at, ssl=context) as listening:
        yield int(listening.sockets[0].getsockname()[1])
        for task in [*passing]:
            task.cancel()
        await asyncio.gather(*passing)


async def main(address: str, port: str, certfile: str, keyfile: str, behind: str) -> None:
    async with tls_in_front((address, int(behind)), certfile, keyfile, (address, int(port))):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
