"""What a coordinator shares with the rest of the service beside requests: fairness charges, weights, pinned adapters.

All of it goes through Redis once a second and reaches the engine between two steps. Without Redis the group goes on
with what it knows. Owned by cluster/replica.py; one event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from cluster.adapters.reconcile import GroupAdapters
from cluster.coordination.charges import ChargeExchange, Charges
from cluster.coordination.client import RedisAway
from cluster.coordination.registry import Commands
from cluster.engine_thread import EngineThread, SteppedEngine
from configs.schema import LoraSettings
from workers.messages import AdapterRef

log = logging.getLogger("tandem.fairness")
PERIOD_S = 1.0
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
    ) -> None:
        self._redis = redis
        self._thread = thread
        self._read_weights = read_weights
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
        if self.adapters is not None:
            self._tasks.append(loop.create_task(self.adapters.run(), name="pinned adapters"))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def turn(self) -> None:
        """Weights, then charges. RedisAway."""
        if self._read_weights is not None and (weights := await self._read_weights(self._redis)) is not None:
            self._thread.call(lambda engine: engine.set_weights(weights))
        await self._charges.turn()

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
            await asyncio.sleep(PERIOD_S)

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
