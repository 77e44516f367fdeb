"""State that a coordinator shares through Redis: fairness charges, tenants' weights, pinned adapters.

All of it reaches the engine between two steps: charges once a second, the others when a change is announced, and by a
poll besides. Without Redis the group goes on with the last values. Owned by coordinator.py; one event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from tandem.cluster.adapters.group_adapters import GroupAdapters
from tandem.cluster.fleet.charges import PERIOD_S, ChargeExchange, Charges
from tandem.cluster.fleet.prefix_resets import ResetFollower
from tandem.cluster.state import keys
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.cluster.tenants.store import TenantStore
from tandem.configs.schema import LoraSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.messages.request import AdapterRef

log = logging.getLogger("tandem.fairness")
SUBSCRIBED_POLL_S = 5.0
"""Pause between two reads of weights while their changes are announced."""
T = TypeVar("T")


class Sharing:
    """One group's part of the state that groups share."""

    def __init__(
        self,
        redis: Commands,
        thread: EngineThread,
        *,
        service: str,
        group: str,
        base: str,
        lora: LoraSettings,
        changes: Announcements = Announcements(),
        period_s: float = PERIOD_S,
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._thread = thread
        self._tenants = TenantStore(redis)
        self._weights_of: Epoch | None = None
        self._changes = changes
        self._period_s = period_s
        self._charges = ChargeExchange(redis, service, group, self._take, self._give)
        self._tasks: list[asyncio.Task[None]] = []
        self._unavailable = False
        self.resets = ResetFollower(redis, service, self._forget, on_reset, changes)
        self.adapters: GroupAdapters | None = None
        if lora.enable_lora:
            self.adapters = GroupAdapters(redis, base, lora.max_loras, self._pin)

    def start(self) -> None:
        """Starts the tasks that exchange until stop()."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._run(), name="fairness"))
        self._tasks.append(loop.create_task(self._follow_weights(), name="tenants' weights"))
        self._tasks.append(loop.create_task(self.resets.run(), name="prefix resets"))
        if self.adapters is not None:
            following = self.adapters.run(self._changes, self._period_s)
            self._tasks.append(loop.create_task(following, name="pinned adapters"))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def update(self) -> None:
        """Exchanges charges once. Raises RedisUnavailable."""
        await self._charges.update()

    async def refresh_weights(self) -> None:
        """Passes the tenants' weights on when the tenants may have changed since the last call. Raises
        RedisUnavailable."""
        there = await self._tenants.epoch()
        if there == self._weights_of or (there.id is None and self._weights_of is not None):
            return  # nothing new, or lost: gateways that have the tenants write them again
        weights = await self._tenants.weights()
        self._weights_of = there
        self._thread.call(lambda engine: engine.set_weights(weights))

    async def _run(self) -> None:
        while True:
            try:
                await self.update()
                self._unavailable = False
            except RedisUnavailable as error:
                if not self._unavailable:
                    log.warning("Redis %s (%s): this group is fair among its own requests only", error.state, error)
                self._unavailable = True
            except Exception:
                log.exception("fairness was not shared in this second")
            await asyncio.sleep(self._period_s)

    async def _follow_weights(self) -> None:
        while True:
            is_trusting = False
            try:
                await self.refresh_weights()
                is_trusting = self._changes.is_subscribed
            except RedisUnavailable as error:
                log.debug("tenants' weights were not read: %s", error)
            except Exception:
                log.exception("tenants' weights were not read: going on with the last known ones")
            period_s = max(self._period_s, SUBSCRIBED_POLL_S) if is_trusting else self._period_s
            await self._changes.wait(keys.TENANTS, period_s)

    async def _take(self) -> Charges:
        """The engine's charges; an idle engine has none and is not woken."""
        return await self._ask(lambda engine: engine.drain_charges()) if self._thread.has_worked() else {}

    def _give(self, charges: Charges) -> None:
        self._thread.call(lambda engine: engine.merge_remote_charges(charges))

    async def _forget(self) -> bool:
        return await self._ask(lambda engine: engine.reset_prefix_cache())

    def _pin(self, adapters: frozenset[AdapterRef]) -> None:
        self._thread.call(lambda engine: engine.set_pinned_adapters(adapters))

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        """Calls `question` on the engine's thread and awaits its result. It never comes when the thread ends before;
        then the caller is cancelled."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def set_answer(value: T) -> None:
            if not answer.done():
                answer.set_result(value)

        def ask(engine: Engine) -> None:
            loop.call_soon_threadsafe(set_answer, question(engine))

        self._thread.call(ask)
        return await answer
