"""What one chat is in a gateway while it runs: its tasks, and the types of its objects. Over a real connection."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.cluster.gateway.http.http_server import make_server
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeGroup
from tests.unit.cluster.group.door import Door
from tests.unit.gateway.rig import CHAT, DEADLINE_S, USER

MOST_TASKS, MOST_TYPES = 2, 24


class OneToken(FakeEngine):
    """Gives each request one token, and then waits."""

    def turn(self, timeout_s: float) -> bool:
        return super().turn(timeout_s) if any(not position for _, position in self.live.values()) else False


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door(OneToken)
    await door.group.wait_opened()
    yield door
    await door.close()


class Connection:
    """A client over a socket whose tasks are this one. At its end it leaves."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = make_server(door.app, shutdown_timeout_s=2)

    async def __aenter__(self) -> "Connection":
        """Serves the app as `tandem serve` does, on this loop, and connects."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._reader, self._writer = await asyncio.open_connection(*self._listener.getsockname())
        await until(lambda: self._server.server_state.connections)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        self._server.should_exit = True
        await self._serving

    async def ask(self, fields: dict[str, Any]) -> None:
        """Sends a chat, and waits until its first token has been delivered."""
        body = json.dumps({"messages": USER, "max_tokens": 100, **fields}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        parts = self._door.backend._parts
        await until(lambda: any(len(part.delivered[0]) for part in parts.values()))
        if fields["stream"]:
            async with asyncio.timeout(DEADLINE_S):
                await self._reader.readuntil(b'"content":')

    async def leave(self) -> None:
        """Hangs up, and waits until nothing of the chat is left."""
        self._writer.close()
        await until(lambda: not self._door.context.tasks and not self._door.context.draining.in_flight)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def ours() -> Iterator[Any]:
    """The objects of our types. The garbage collector does not follow those that refer to nothing: they are found where
    they are referred to."""
    gc.collect()
    tracked = [thing for thing in gc.get_objects() if is_ours(thing)]
    held = gc.get_referents(*tracked)
    inside = gc.get_referents(*(thing for thing in held if isinstance(thing, (list, tuple, dict))))
    yield from tracked
    yield from (thing for thing in (*held, *inside) if is_ours(thing))


def is_ours(thing: object) -> bool:
    """Of the gateway: the group's thread is in this process too, and makes statistics."""
    module = str(type(thing).__module__)
    return module.startswith(("tandem.cluster.", "tandem.workers.")) and not module.endswith(".stats")


@contextmanager
def made_tasks() -> Iterator[list["asyncio.Task[Any]"]]:
    """The tasks that are made in the block, but for the group's own."""
    made: list[asyncio.Task[Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, **named)
        if not is_the_groups(task):
            made.append(task)
        return task

    asyncio.get_running_loop().set_task_factory(factory)
    yield made
    asyncio.get_running_loop().set_task_factory(None)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {"stream": False}])
async def test_a_chat_is_two_tasks_from_its_first_byte_to_its_bill(door: Door, fields: dict[str, Any]) -> None:
    """The HTTP server's, which also delivers, and its generation's, which also waits for the answer of the handle
    call. None has ended before the first token, and none comes when the client leaves."""
    async with Connection(door) as client:
        before = asyncio.all_tasks()
        with made_tasks() as made:
            await client.ask(fields)
            assert {task for task in asyncio.all_tasks() - before if not is_the_groups(task)} == set(made)
            await client.leave()
        assert len(made) == MOST_TASKS, made
        assert len(door.ledger.rows) == 1


async def test_a_streamed_chat_is_few_types(door: Door) -> None:
    """Beside the connection's. In a service there is no other: the call is Serve's object."""
    async with Connection(door) as client:
        await client.ask({"stream": True})  # what is made once
        await client.leave()
    async with Connection(door) as client:
        known = {id(thing): thing for thing in ours()}
        await client.ask({"stream": True})
        types = {type(thing).__name__ for thing in ours() if id(thing) not in known}
        assert 10 < len(types) <= MOST_TYPES, sorted(types)


def is_the_groups(task: "asyncio.Task[Any]") -> bool:
    return getattr(task.get_coro(), "__qualname__", "") == FakeGroup.generate.__qualname__
