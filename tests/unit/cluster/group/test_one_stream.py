"""What one streamed chat is in a gateway while it runs: its tasks, and the types of its objects."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeGroup
from tests.unit.cluster.group.door import Door
from tests.unit.gateway.rig import CHAT, DEADLINE_S, USER

MOST_TYPES = 20


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


async def begun(door: Door) -> "asyncio.Task[httpx.Response]":
    """A streamed chat whose first token has been delivered."""
    asked = {"messages": USER, "stream": True, "max_tokens": 100}
    post = asyncio.create_task(door.client.post(CHAT, json=asked))
    async with asyncio.timeout(DEADLINE_S):
        while not any(len(attempt.to.delivered[0]) for attempt in door.backend._attempts.values()):  # type: ignore[attr-defined]
            await asyncio.sleep(0.002)
    for _ in range(10):  # it is written
        await asyncio.sleep(0)
    return post


async def left(door: Door, post: "asyncio.Task[httpx.Response]") -> None:
    post.cancel()
    await asyncio.wait({post})
    assert await door.generations.tasks.wait_idle(DEADLINE_S)


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


async def test_a_streamed_chat_is_few_tasks_and_few_types(door: Door) -> None:
    """Beside the HTTP server's task there are its delivery and its generation, and one that waits for the answer of the
    handle call."""
    await left(door, await begun(door))  # what is made once
    tasks, known = asyncio.all_tasks(), {id(thing): thing for thing in ours()}
    post = await begun(door)
    new = [task for task in asyncio.all_tasks() - tasks - {post} if not is_the_groups(task)]
    types = {type(thing).__name__ for thing in ours() if id(thing) not in known}
    await left(door, post)
    assert sorted(task.get_name().partition(" ")[0] for task in new) == ["call", "delivery", "request"]
    assert len(types) <= MOST_TYPES, sorted(types)


def is_the_groups(task: "asyncio.Task[Any]") -> bool:
    return getattr(task.get_coro(), "__qualname__", "") == FakeGroup.generate.__qualname__
