"""Generations without HTTP and text, over a ServeDispatch: for tests of what happens between gateway and groups."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.generation.gateway_context import GatewayContext, GatewayTimes
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.quarantine import Quarantine
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.tenant_admission import Tenancy
from tandem.workers.messages.request import GenerationRequest, TokenDelta


class PlainChoice:
    """As much of ChoiceText as a generation uses."""

    def __init__(self) -> None:
        self.tokens = 0
        self.finished: str | None = None

    def take(self, delta: TokenDelta) -> None:
        if self.finished is None:
            self.tokens += len(delta.token_ids)
            self.finished = delta.finish_reason


class CountingMetrics(GatewayMetrics):
    """Counts moves where a test can see them."""

    moves = 0

    def moved(self) -> None:
        super().moved()
        self.moves += 1


class Books:
    """A ledger that keeps what it is told."""

    def __init__(self) -> None:
        self.opened: list[BillingRecord] = []
        self.rows: list[BillingRecord] = []

    def accepted(self, record: BillingRecord) -> None:
        self.opened.append(record)

    async def settle(self, record: BillingRecord) -> None:
        self.rows.append(record)


class Reading:
    """The reader of one generation: yields the deltas of each step."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.part = generation.parts[0]
        self._steps = generation.steps()

    def __aiter__(self) -> AsyncIterator[list[TokenDelta]]:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        part, deltas = await anext(self._steps)
        for delta in deltas:
            part.choices[delta.choice].take(delta)
        return deltas

    def stop(self, choice: int, keep: int) -> None:
        """As a stop string: the text of the choice has ended."""
        plain: Any = self.part.choices[choice]
        plain.finished, plain.tokens = "stop", keep
        self.generation.stop_choice(self.part, choice, keep)

    async def aclose(self) -> None:
        self.generation.close()


class Client(ServeDispatch):
    """A gateway without HTTP."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.books = Books()
        self.counts = CountingMetrics(CollectorRegistry(), "tandem", "m")
        self.tasks = TaskOwner()
        self.quarantine = Quarantine(self.loop.time)
        self.times = GatewayTimes()
        self.generations: list[Generation] = []

    async def submit(self, request: GenerationRequest, **more: Any) -> Reading:
        """Starts a generation; its deadline_s is the queue timeout."""
        shared = GatewayContext(
            dispatch=self,
            tenancy=more.pop("tenancy", Tenancy()),
            ledger=self.books,
            metrics=self.counts,
            tasks=self.tasks,
            quarantine=self.quarantine,
            times=self.times,
            max_answer_bytes=2**26,
            queue_timeout_s=request.deadline_s,
            clock=self.loop.time,
            wall_clock=lambda: 0.0,
        )
        choices: Any = [PlainChoice() for _ in range(request.sampling.n)]
        part = RequestPart(request=request, choices=choices, first_choice=0)
        generation = Generation(shared, [part], tenant=request.tenant, model="m", began_s=self.loop.time())
        generation.start()
        self.generations.append(generation)
        await asyncio.sleep(0)
        return Reading(generation)

    async def close(self) -> None:
        for generation in self.generations:
            generation.close()
        await super().close()
        assert await self.tasks.wait_idle(30), "a generation was leaked"
