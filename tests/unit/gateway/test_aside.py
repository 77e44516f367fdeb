"""A coroutine that its owner's task advances beside its other waits: no task is made for it."""

import asyncio
from typing import Any

import pytest

from tandem.cluster.gateway.http.tasks import Aside


class Owner:
    """A task that has several waits: it is woken, and looks."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1
        self.news.set()

    async def result_of(self, aside: Aside[Any]) -> Any:
        async with asyncio.timeout(30):
            while (result := aside.advance()) is None and not aside.is_over:
                await self.news.wait()
                self.news.clear()
        return result


async def test_it_comes_as_far_as_it_does_not_wait_and_runs_in_its_owners_task() -> None:
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    ran_in: set[Any] = set()

    async def work() -> int:
        ran_in.add(asyncio.current_task())
        total = await first
        await asyncio.sleep(0)
        ran_in.add(asyncio.current_task())
        return total + await second

    before, owner = asyncio.all_tasks(), Owner()
    aside = Aside(work(), owner.wake)
    assert aside.advance() is None and aside.advance() is None
    second.set_result(3)
    assert (aside.advance(), owner.wakes) == (None, 0), "it does not wait for that yet"
    first.set_result(4)
    assert asyncio.all_tasks() == before
    assert await owner.result_of(aside) == 7
    assert aside.is_over and aside.advance() == 7
    assert ran_in == {asyncio.current_task()} and owner.wakes <= 3


async def test_a_wait_for_what_is_there_already_costs_no_wake() -> None:
    done = asyncio.get_running_loop().create_future()
    done.set_result(5)

    async def work() -> int:
        return await done

    owner = Owner()
    assert Aside(work(), owner.wake).advance() == 5 and owner.wakes == 0


async def test_it_raises_what_the_coroutine_raises_once() -> None:
    broken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await broken

    owner = Owner()
    aside = Aside(work(), owner.wake)
    aside.advance()
    broken.set_exception(ConnectionResetError("the replica died"))
    with pytest.raises(ConnectionResetError):
        await owner.result_of(aside)
    assert aside.is_over and aside.advance() is None


async def test_a_cancelled_future_is_the_coroutines_and_not_its_owners() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await call

    owner, task = Owner(), asyncio.current_task()
    aside = Aside(work(), owner.wake)
    aside.advance()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner.result_of(aside)
    assert task is not None and not task.cancelling()


async def test_closing_leaves_what_it_waits_for_alone_and_wakes_nobody() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ended: list[str] = []

    async def work() -> int:
        try:
            return await call
        finally:
            ended.append("closed")

    owner = Owner()
    aside = Aside(work(), owner.wake)
    aside.advance()
    aside.close()
    aside.close()
    assert ended == ["closed"] and not call.done()
    call.set_result(1)
    await asyncio.sleep(0)
    assert (aside.advance(), owner.wakes) == (None, 0)
    Aside(work(), owner.wake).close()  # that was never advanced


async def test_what_it_waits_for_may_be_awaited_by_others_too() -> None:
    future, owner = asyncio.get_running_loop().create_future(), Owner()

    async def work() -> int:
        return int(await future)

    aside = Aside(work(), owner.wake)
    assert aside.advance() is None
    other = asyncio.ensure_future(asyncio.wait_for(future, 10))
    await asyncio.sleep(0)
    aside.close()
    future.set_result(3)
    assert await other == 3
