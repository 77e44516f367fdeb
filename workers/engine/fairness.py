"""Whose sequence comes next when tenants compete: the tenant that has been served least, by the cost of its tokens.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"): each tenant's counter grows by
what its work costs, divided by its weight; the least counter goes first, then priority, then arrival. A tenant that
begins to wait is lifted to the least counter of those that wait, so that idling earns nothing. Rows and blocks are
never kept free for anybody. With one tenant the order is that of arrival. Called by the scheduler; knows no clock.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.engine.admission import ArrivalQueue
from workers.engine.sequence import Sequence


@dataclass(frozen=True)
class TokenCosts:
    """What work costs, in computed prompt tokens. An output token takes a row for a whole step; an adapter that is
    brought to the device makes others wait for the room that it takes."""

    prompt: float = 1.0
    output: float = 2.0
    adapter_swap: float = 256.0


@dataclass(slots=True, eq=False)
class _Tenant:
    """counter: cost over weight, only ever grows. own: cost here since it was last taken. waiting: its sequences that
    wait, in `queue` or for something else. listed: it has its one entry in the heap."""

    name: str
    number: int
    weight: float
    counter: float = 0.0
    own: float = 0.0
    output_tokens: int = 0
    waiting: int = 0
    listed: bool = False
    queue: ArrivalQueue = field(default_factory=ArrivalQueue)


class FairQueue:
    """WaitingQueue of the scheduler over tenants; O(log n) each. The heap holds tenants by the counter that they had
    when listed: as counters only grow, an outdated entry comes too early and is then put where it belongs."""

    def __init__(self, costs: TokenCosts = TokenCosts()) -> None:
        self._costs = costs
        self._tenants: dict[str, _Tenant] = {}
        self._weights: dict[str, float] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._aside: set[Sequence] = set()
        self._queued: dict[Sequence, int] = {}
        self._num_tokens = 0
        self._floor = 0.0
        self._last: _Tenant | None = None
        self._elsewhere: list[_Tenant] = []

    # ---- WaitingQueue ----

    def push(self, seq: Sequence) -> None:
        tenant = self._begin(seq)
        self._aside.discard(seq)
        tenant.queue.push(seq)
        self._queued[seq] = len(seq.tokens)
        self._num_tokens += len(seq.tokens)
        if not tenant.listed:
            tenant.listed = True
            heapq.heappush(self._heap, (tenant.counter, tenant.number, tenant))

    def set_aside(self, seq: Sequence) -> None:
        tenant = self._begin(seq)
        if seq in tenant.queue:
            self._unqueue(tenant, seq)
        self._aside.add(seq)

    def remove(self, seq: Sequence) -> None:
        tenant = self._tenant(seq.tenant)
        if seq in self._aside:
            self._aside.remove(seq)
        else:
            self._unqueue(tenant, seq)
        tenant.waiting -= 1
        if not tenant.waiting:
            self._last = tenant

    def peek(self) -> Sequence | None:
        tenant = self._first()
        return None if tenant is None else tenant.queue.peek()

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def is_contested(self) -> bool:
        return len(self._heap) > 1

    def charge(self, seq: Sequence, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        tenant = self._tenant(seq.tenant)
        tenant.output_tokens += output_tokens
        cost = prompt_tokens * self._costs.prompt + output_tokens * self._costs.output
        tenant.own += cost
        tenant.counter += cost / tenant.weight

    def counter(self, seq: Sequence) -> float:
        return self._tenant(seq.tenant).counter

    # ---- the engine's side ----

    def charge_swap(self, seq: Sequence) -> None:
        """An adapter was brought to the device for this sequence."""
        tenant = self._tenant(seq.tenant)
        tenant.own += self._costs.adapter_swap
        tenant.counter += self._costs.adapter_swap / tenant.weight

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Weights from now on, above 0; tenants that are not named have 1. What was charged stays as it is."""
        assert all(weight > 0 for weight in weights.values()), "a weight is above 0"
        self._weights = dict(weights)
        for tenant in self._tenants.values():
            tenant.weight = self._weights.get(tenant.name, 1.0)

    def take_charges(self) -> dict[str, float]:
        """What tenants cost here since the last call, in prompt tokens, not divided by weights."""
        charges = {tenant.name: tenant.own for tenant in self._tenants.values() if tenant.own}
        for tenant in self._tenants.values():
            tenant.own = 0.0
        return charges

    def charge_elsewhere(self, charges: Mapping[str, float]) -> None:
        """Adds what tenants cost in other groups (their take_charges) since the last call, so that it counts here too.
        Whoever is named here works elsewhere now, nobody if it is empty: who begins to wait is lifted to the least of
        them as well."""
        self._elsewhere = [self._tenant(name) for name, cost in charges.items() if cost > 0]
        for tenant in self._elsewhere:
            tenant.counter += charges[tenant.name] / tenant.weight

    def output_tokens(self) -> dict[str, int]:
        """Output tokens charged from the start, by tenant."""
        return {tenant.name: tenant.output_tokens for tenant in self._tenants.values()}

    def check_laws(self) -> None:
        """Asserts that what waits is counted once, and that whoever has a queue can be found. O(sequences)."""
        for tenant in self._tenants.values():
            aside = sum(seq.tenant == tenant.name for seq in self._aside)
            assert tenant.waiting == len(tenant.queue) + aside, f"{tenant.name}: waiting is miscounted"
            assert tenant.listed or not len(tenant.queue), f"{tenant.name} has a queue that nobody looks at"
        assert len(self._queued) == sum(len(tenant.queue) for tenant in self._tenants.values())
        assert self._num_tokens == sum(self._queued.values())
        assert len(self._heap) == sum(tenant.listed for tenant in self._tenants.values())

    # ---- inside ----

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = _Tenant(name, len(self._tenants), self._weights.get(name, 1.0))
            self._tenants[name] = tenant
        return tenant

    def _begin(self, seq: Sequence) -> _Tenant:
        """The tenant of a sequence that waits, or begins to: one more then, lifted if it was the tenant's first."""
        tenant = self._tenant(seq.tenant)
        if seq not in self._aside and seq not in tenant.queue:
            if not tenant.waiting:
                tenant.counter = max(tenant.counter, self._level())
            tenant.waiting += 1
        return tenant

    def _unqueue(self, tenant: _Tenant, seq: Sequence) -> None:
        tenant.queue.remove(seq)
        self._num_tokens -= self._queued.pop(seq)

    def _level(self) -> float:
        """The least counter of those in the queue, here or elsewhere; without any, that of who left it last."""
        first = self._first()
        active = self._elsewhere if first is None else [first, *self._elsewhere]
        if not active and self._last is not None:
            active = [self._last]
        if active:
            self._floor = max(self._floor, min(tenant.counter for tenant in active))
        return self._floor

    def _first(self) -> _Tenant | None:
        heap = self._heap
        while heap:
            counter, number, tenant = heap[0]
            if not len(tenant.queue):
                heapq.heappop(heap)
                tenant.listed = False
            elif counter != tenant.counter:
                heapq.heapreplace(heap, (tenant.counter, number, tenant))
            else:
                return tenant
        return None
