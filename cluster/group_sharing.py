"""What a coordinator shares with the rest of the service beside requests: fairness charges, weights, pinned adapters.

All of it goes through Redis and reaches the engine between two steps: charges once a second, the others when a change
is announced, and by a poll besides. Without Redis the group goes on with what it knows. Owned by cluster/replica.py;
one event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from cluster.adapters.reconcile import GroupAdapters
from cluster.coordination import keys
from cluster.coordination.changes import Announcements, NoAnnouncements
from cluster.coordination.charges import ChargeExchange, Charges
from cluster.coordination.client import Commands, RedisAway
from cluster.engine_thread import EngineThread, SteppedEngine
from configs.schema import LoraSettings
from workers.messages import AdapterRef

log = logging.getLogger("tandem.fairness")
PERIOD_S = 1.0
HEARING_POLL_S = 5.0
"""For weights, while their changes are announced."""
T = TypeVar("T")
ReadWeights = Callable[[Commands], Awaitable[Mapping[str, float] | None]]
"""Tenants' weights, when they have changed since the last call; None when not. RedisAway."""


class GroupSharing:
    """One group's part. read_weights: where tenants' weights come from; None: all weigh the same."""

    def __init__(
        self,
        redis: Commands,
        thread: EngineThread,
        *,
        service: str,
        group: str,
        base: str,
        lora: LoraSettings,
        read_weights: ReadWeights | None = None,
        changes: Announcements = NoAnnouncements(),
        period_s: float = PERIOD_S,
    ) -> None:
        self._redis = redis
        self._thread = thread
        self._read_weights = read_weights
        self._changes = changes
        self._period_s = period_s
        self._charges = ChargeExchange(redis, service, group, self._take, self._give)
        self._tasks: list[asyncio.Task[None]] = []
        self._away = False
        self.adapters: GroupAdapters | None = None
        if lora.enable_lora:
            self.adapters = GroupAdapters(redis, base, lora.max_loras, self._pin)

    def start(self) -> None:
        """From now on, until stop()."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._run(), name="fairness"))
        if self._read_weights is not None:
            self._tasks.append(loop.create_task(self._follow_weights(), name="tenants' weights"))
        if self.adapters is not None:
            following = self.adapters.run(self._changes, self._period_s)
            self._tasks.append(loop.create_task(following, name="pinned adapters"))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def turn(self) -> None:
        """Charges, once. RedisAway."""
        await self._charges.turn()

    async def refresh_weights(self) -> None:
        """One look at the tenants. RedisAway."""
        if self._read_weights is not None and (weights := await self._read_weights(self._redis)) is not None:
            self._thread.call(lambda engine: engine.set_weights(weights))

    async def _run(self) -> None:
        while True:
            try:
                await self.turn()
                self._away = False
            except RedisAway as error:
                if not self._away:
                    log.warning("Redis is away (%s): this group is fair by itself", error)
                self._away = True
            except Exception:
                log.exception("fairness was not shared in this second")
            await asyncio.sleep(self._period_s)

    async def _follow_weights(self) -> None:
        while True:
            is_trusting = False
            try:
                await self.refresh_weights()
                is_trusting = self._changes.is_hearing
            except RedisAway as error:
                log.debug("tenants' weights were not read: %s", error)
            except Exception:
                log.exception("tenants' weights were not read: going on with the last known ones")
            period_s = max(self._period_s, HEARING_POLL_S) if is_trusting else self._period_s
            await self._changes.wait(keys.TENANTS, period_s)

    async def _take(self) -> Charges:
        """An engine that sleeps has charged nobody, and is left asleep."""
        return await self._ask(lambda engine: engine.take_charges()) if self._thread.has_worked() else {}

    def _give(self, charges: Charges) -> None:
        self._thread.call(lambda engine: engine.charge_elsewhere(charges))

    def _pin(self, adapters: frozenset[AdapterRef]) -> None:
        self._thread.call(lambda engine: engine.set_pinned_adapters(adapters))

    async def _ask(self, question: Callable[[SteppedEngine], T]) -> T:
        """The engine's answer, from its thread; never, when that ends before: the caller is cancelled then."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def set_answer(value: T) -> None:
            if not answer.done():
                answer.set_result(value)

        def ask(engine: SteppedEngine) -> None:
            loop.call_soon_threadsafe(set_answer, question(engine))

        self._thread.call(ask)
        return await answer
