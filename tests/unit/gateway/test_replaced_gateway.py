"""The end of a gateway that another one replaces: work goes on, and what is too slow gets its last words."""

import asyncio

import pytest

from tandem.cluster.gateway.app.leaving import Leaving
from tandem.cluster.gateway.http.draining import Draining
from tandem.cluster.process.time_to_leave import TimeToLeave
from tandem.workers.messages.errors import RequestRefused


class Gateway:
    """One request in flight, which ends when it is refused."""

    def __init__(self, replaced_s: float, ends: bool = False) -> None:
        self.draining = Draining()
        self.refused: list[str] = []
        self.over = asyncio.Event()
        self.draining.enter()

        async def is_ending() -> bool:
            return ends

        async def pause(seconds: float) -> None:
            await self.over.wait()
            self._now_s += seconds

        self._now_s = 0.0
        time = TimeToLeave(replaced_s, 30.0, is_ending, lambda: self._now_s, pause)
        self.leaving = Leaving(self.draining, self._refuse, 30.0, time)

    def _refuse(self, refusal: RequestRefused) -> None:
        self.refused.append(str(refusal))
        self.draining.leave()


async def test_new_work_is_taken_and_streams_end_by_themselves() -> None:
    gateway = Gateway(600.0)
    gateway.leaving.begin()
    gateway.leaving.begin()
    assert gateway.leaving.begun and not gateway.draining.begun, "Serve's proxies may not know yet"
    finishing = asyncio.create_task(gateway.leaving.finish())
    await asyncio.sleep(0)
    assert gateway.draining.begun and not finishing.done()
    gateway.draining.leave()
    async with asyncio.timeout(10):
        await finishing
    gateway.leaving.close()
    assert not gateway.refused


@pytest.mark.parametrize("ends", [False, True])
async def test_what_is_too_slow_is_cut_off_with_a_word(ends: bool) -> None:
    gateway = Gateway(600.0, ends)
    gateway.leaving.begin()
    finishing = asyncio.create_task(gateway.leaving.finish())
    await asyncio.sleep(0)
    gateway.over.set()
    async with asyncio.timeout(10):
        await finishing
    assert gateway.refused == ["The service is shutting down."] and gateway.draining.is_cut_off


async def test_a_gateway_that_nobody_takes_down_drains_as_the_service_does() -> None:
    gateway = Gateway(600.0)
    finishing = asyncio.create_task(gateway.leaving.finish())
    await asyncio.sleep(0)
    assert gateway.draining.begun
    gateway.draining.leave()
    async with asyncio.timeout(10):
        await finishing
    assert not gateway.refused
