"""FairQueue: when tenants compete, the tenant that was served least, by the cost of its tokens, is next.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"): each tenant's counter grows by
the cost of its work, divided by its weight; the least counter goes first, then priority, then arrival. A tenant that
begins to wait is lifted to the least counter of those that wait, so that idling earns nothing. No rows or blocks are
kept free for a tenant; one that runs nothing may take those of the tenant served most (least_share.py). With one tenant
the order is that of arrival. Called by the scheduler; knows no clock.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tandem.workers.engine.base.sequence import Sequence, is_idle_work
from tandem.workers.engine.waiting.row_shares import HeldBlocks, QueuedTenant, RowShares


@dataclass(frozen=True)
class TokenCosts:
    """Cost of work, in computed prompt tokens. An output token takes a row for a whole step; an adapter that is
    brought to the device makes others wait for the room that it takes."""

    prompt: float = 1.0
    output: float = 2.0
    adapter_swap: float = 256.0


class FairQueue:
    """Order of the queued sequences over tenants; O(log n) each. Those blocked count as waiting and are not in the
    order. The heap holds tenants by the counter that they had
    when listed: as counters only grow, an outdated entry comes too early and is then put where it belongs."""

    def __init__(self, costs: TokenCosts = TokenCosts()) -> None:
        self.shares = RowShares()
        self._costs = costs
        self._tenants: dict[str, QueuedTenant] = {}
        self._num_seen = 0
        self._weights: dict[str, float] = {}
        self._heap: list[tuple[float, int, QueuedTenant]] = []
        self._waiting: dict[Sequence, int | None] = {}
        self._num_queued = self._num_idle = 0
        self._num_tokens = 0
        self._idle_level = 0.0
        self._last: QueuedTenant | None = None
        self._remote: list[QueuedTenant] = []

    # ---- the waiting queue's side ----

    def push(self, seq: Sequence) -> None:
        """Queues a sequence that is new or blocked."""
        tenant = self._begin(seq)
        assert self._waiting[seq] is None, "queued twice"
        tenant.queue.push(seq)
        self._waiting[seq] = len(seq.tokens)
        self._num_tokens += len(seq.tokens)
        self._num_queued += 1
        self._num_idle += is_idle_work(seq)
        self.shares.note(tenant)
        if not tenant.listed:
            tenant.listed = True
            heapq.heappush(self._heap, (tenant.counter, tenant.number, tenant))

    def block(self, seq: Sequence) -> None:
        """Takes a sequence out of the order, if it is there; it counts as waiting for its tenant."""
        self._unqueue(self._begin(seq), seq)

    def remove(self, seq: Sequence) -> None:
        """Removes a waiting sequence."""
        tenant = self._tenant(seq.tenant)
        self._unqueue(tenant, seq)
        del self._waiting[seq]
        tenant.waiting -= 1
        if not tenant.waiting:
            self._last = tenant

    def peek(self) -> Sequence | None:
        """Returns the next of the queued sequences."""
        tenant = self._first()
        if 0 < self._num_idle < self._num_queued:
            tenant = min(self._with_urgent(), key=self._place)
        elif tenant is not None and len(self._heap) > 1 and self.shares.are_enough:
            tenant = min(self._queued(), key=self._place)
        return None if tenant is None else tenant.queue.peek()

    def __len__(self) -> int:
        """The number of queued sequences."""
        return self._num_queued

    @property
    def num_urgent(self) -> int:
        """Queued sequences that are not for idle rows only."""
        return self._num_queued - self._num_idle

    def has(self, seq: Sequence) -> bool:
        """Returns whether a sequence waits, queued or blocked."""
        return seq in self._waiting

    def is_queued(self, seq: Sequence) -> bool:
        return self._waiting.get(seq) is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the queued sequences when they were pushed."""
        return self._num_tokens

    # ---- the scheduler's side ----

    @property
    def has_competing_tenants(self) -> bool:
        """True if the order depends on what running sequences have been charged."""
        return len(self._heap) > 1

    def charge(self, seq: Sequence, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges its tenant for computed tokens."""
        tenant = self._tenant(seq.tenant)
        tenant.worked = True
        tenant.output_tokens += output_tokens
        cost = prompt_tokens * self._costs.prompt + output_tokens * self._costs.output
        tenant.own += cost
        tenant.counter += cost / tenant.weight

    def counter(self, seq: Sequence) -> float:
        """Returns the cost of what its tenant was served, divided by the tenant's weight."""
        return self._tenant(seq.tenant).counter

    # ---- rows ----

    def share_rows(self, num_rows: int, budget: int) -> None:
        """Sets what there is to share: rows, and tokens of a step."""
        self.shares.set_room(num_rows, budget * self._costs.prompt, num_rows * self._costs.output)

    def take_row(self, seq: Sequence) -> None:
        """Notes that a sequence has got a row."""
        self.shares.add_rows(self._tenant(seq.tenant), 1)

    def leave_row(self, seq: Sequence) -> None:
        """Notes that a sequence has lost its row."""
        self.shares.add_rows(self._tenant(seq.tenant), -1)

    def lacking(self) -> list[tuple[QueuedTenant, int]]:
        """Returns the tenants that lack rows of their share, in the order of the queue, and how many; with more tenants
        than rows the first of the queue alone. All rows are taken."""
        if not self.shares.is_shared or (first := self._first()) is None:
            return []
        queued = sorted(self._queued(), key=self._place) if self.shares.are_enough else [first]
        if self._num_idle:
            urgent = list(self._with_urgent())
            queued = [tenant for tenant in queued if tenant in urgent]
        return [(tenant, lacking) for tenant in queued if (lacking := self.shares.num_lacking(tenant)) > 0]

    def claims(self, first: Sequence, num_blocks: int, blocks: HeldBlocks) -> QueuedTenant | None:
        """Returns the tenant of the first in the queue, which lacks so many blocks, if these are within its share."""
        tenant = self._tenant(first.tenant)
        if is_idle_work(first):
            return None
        return tenant if self.shares.is_shared and self.shares.may_claim(tenant, num_blocks, blocks) else None

    def holding(self, seq: Sequence, blocks: HeldBlocks) -> float:
        """Returns the counter by which a running sequence gives up its blocks."""
        return self.shares.holding(self._tenant(seq.tenant), blocks)

    # ---- the engine's side ----

    def charge_swap(self, seq: Sequence) -> None:
        """Charges the tenant of a sequence for which an adapter was loaded to the device."""
        tenant = self._tenant(seq.tenant)
        tenant.worked = True
        tenant.own += self._costs.adapter_swap
        tenant.counter += self._costs.adapter_swap / tenant.weight

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Weights from now on, above 0; tenants that are not named have 1. What was charged stays as it is."""
        assert all(weight > 0 for weight in weights.values()), "a weight is above 0"
        self._weights = dict(weights)
        for tenant in self._tenants.values():
            tenant.weight = self._weights.get(tenant.name, 1.0)
            self.shares.note(tenant)

    def drain_charges(self) -> dict[str, float]:
        """Returns what tenants cost here since the last call, in prompt tokens, not divided by weights."""
        charges = {tenant.name: tenant.own for tenant in self._tenants.values() if tenant.own}
        for tenant in self._tenants.values():
            tenant.own = 0.0
        return charges

    def merge_remote_charges(self, charges: Mapping[str, float]) -> None:
        """Adds what tenants cost in other groups (their drain_charges) since the last call, so that it counts here too.
        The tenants named in the last call are active in other groups, and count when a tenant that begins to wait is
        lifted to the least counter; one that begins there, and does not wait here, is lifted in the same way."""
        remote = [self._tenant(name) for name, cost in charges.items() if cost > 0]
        active = set(self._remote)
        begin = [tenant for tenant in remote if not tenant.waiting and tenant not in active]
        level = self._level() if begin else 0.0
        for tenant in begin:
            self._lift(tenant, level)
        self._remote = remote
        for tenant in remote:
            tenant.worked = True
            tenant.counter += charges[tenant.name] / tenant.weight

    def forget_idle(self, busy: Collection[str]) -> list[str]:
        """Forgets the tenants that nothing was charged to and nothing was queued for since the last call, except `busy`
        ones and those with a given weight, and returns their names. One that is back begins at the least counter, as
        others that were idle."""
        kept = {*busy, *self._weights}
        idle = [t for t in self._tenants.values() if not (t.worked or t.waiting or t.rows or t.name in kept)]
        for tenant in idle:
            del self._tenants[tenant.name]
        for tenant in self._tenants.values():
            tenant.worked = False
        for entry in self._heap:
            entry[2].listed = len(entry[2].queue) > 0
        self._heap = [entry for entry in self._heap if entry[2].listed]
        heapq.heapify(self._heap)
        return [tenant.name for tenant in idle]

    def output_tokens(self) -> dict[str, int]:
        """Output tokens charged since it was first seen, by tenant."""
        return {tenant.name: tenant.output_tokens for tenant in self._tenants.values()}

    def check_invariants(self) -> None:
        """Asserts that each waiting sequence counts once, and that tenants with a queue are listed. O(sequences)."""
        waiting = Counter(seq.tenant for seq in self._waiting)
        for tenant in self._tenants.values():
            assert tenant.waiting == waiting[tenant.name], f"{tenant.name}: waiting is miscounted"
            assert tenant.listed or not len(tenant.queue), f"{tenant.name} has a queue and is not listed"
        queued = [tokens for tokens in self._waiting.values() if tokens is not None]
        assert self._num_queued == len(queued) == sum(len(tenant.queue) for tenant in self._tenants.values())
        assert self._num_tokens == sum(queued)
        assert self._num_idle == sum(is_idle_work(seq) for seq, tokens in self._waiting.items() if tokens is not None)
        assert len(self._heap) == sum(tenant.listed for tenant in self._tenants.values())
        self.shares.check_invariants(self._tenants.values())

    # ---- inside ----

    def _tenant(self, name: str) -> QueuedTenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = QueuedTenant(name, self._num_seen, self._weights.get(name, 1.0))
            self._num_seen += 1
            self._tenants[name] = tenant
        return tenant

    def _begin(self, seq: Sequence) -> QueuedTenant:
        """The tenant of a sequence that waits, or begins to: one more then, lifted if it was the tenant's first."""
        tenant = self._tenant(seq.tenant)
        if seq not in self._waiting:
            if not tenant.waiting:
                self._lift(tenant, self._level())
            tenant.waiting += 1
            tenant.worked = True
            self._waiting[seq] = None
        return tenant

    def _unqueue(self, tenant: QueuedTenant, seq: Sequence) -> None:
        tokens = self._waiting[seq]
        if tokens is not None:
            tenant.queue.remove(seq)
            self._waiting[seq] = None
            self._num_tokens -= tokens
            self._num_queued -= 1
            self._num_idle -= is_idle_work(seq)
            self.shares.note(tenant)

    def _lift(self, tenant: QueuedTenant, level: float) -> None:
        """Takes credit from a tenant that asked for nothing. One that runs sequences keeps a little of what it is owed:
        it may be queued again before it has got that."""
        tenant.counter = max(tenant.counter, level - (self.shares.credit(tenant) if tenant.rows else 0.0))

    def _queued(self) -> Iterator[QueuedTenant]:
        return (tenant for _, _, tenant in self._heap if len(tenant.queue))

    def _with_urgent(self) -> Iterator[QueuedTenant]:
        """The tenants whose next sequence is not for idle rows only."""
        return (
            tenant
            for tenant in self._queued()
            if (first := tenant.queue.peek()) is not None and not is_idle_work(first)
        )

    def _place(self, tenant: QueuedTenant) -> tuple[float, int]:
        return self.shares.standing(tenant), tenant.number

    def _level(self) -> float:
        """The least counter of tenants queued here or active elsewhere; without any, that of the last to leave."""
        first = self._first()
        active = self._remote if first is None else [first, *self._remote]
        if not active and self._last is not None:
            active = [self._last]
        if active:
            self._idle_level = max(self._idle_level, min(tenant.counter for tenant in active))
        return self._idle_level

    def _first(self) -> QueuedTenant | None:
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
