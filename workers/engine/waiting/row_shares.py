"""RowShares: the rows that tenants have, and their shares by weight.

A tenant's share is the group's rows times its weight over the weights of all tenants that run or are queued, rounded
down, and at least one. With 16 rows and two tenants of equal weight it is 8.

- A tenant that asks for no more than its share gets these rows at once: it goes before tenants that ask for more, and
  takes a row from one that has more than its share. Its token counter may be ahead of theirs by what CREDIT_STEPS steps
  full of prompts cost: a prompt is charged before it is computed, and must not hold up the tenant's next request.
- A tenant that asks for more is given rows as they come free, the one that was served least first (fairness.py). It
  takes a row from another only if it is behind by what the group does in PATIENCE_STEPS steps: a row that changes hands
  costs work, and no request of such tenants comes sooner on the whole.

Called by FairQueue, which owns the tenants.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.workers.engine.waiting.arrival_queue import ArrivalQueue

CREDIT_STEPS = 1.0
PATIENCE_STEPS = 4.0
_ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class QueuedTenant:
    """One tenant. counter: cost divided by weight, only grows. own: cost here since drain_charges(). waiting: its
    sequences that are queued or blocked. rows: those that run. listed: it has its one entry in the heap. worked: since
    forget_idle()."""

    name: str
    number: int
    weight: float
    counter: float = 0.0
    own: float = 0.0
    output_tokens: int = 0
    waiting: int = 0
    rows: int = 0
    listed: bool = False
    worked: bool = True
    queue: ArrivalQueue = field(default_factory=ArrivalQueue)


class HeldBlocks(NamedTuple):
    """All blocks, and those that each tenant's running sequences hold."""

    total: int
    by_tenant: Mapping[str, int]


class RowShares:
    """Shares of num_rows rows. prompt_step: cost of a step full of prompts; output_step: of a token for each row."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_bound = 0
        self._credit = 0.0
        self._patience = 0.0
        self._active: dict[QueuedTenant, float] = {}  # the weight that each is counted with
        self._sum: float | None = 0.0

    # ---- what changes ----

    def set_room(self, num_rows: int, prompt_step: float, output_step: float) -> None:
        """Sets what there is to share. Called once."""
        self._num_rows = num_rows
        self._credit = CREDIT_STEPS * prompt_step
        self._patience = PATIENCE_STEPS * output_step

    def add_rows(self, tenant: QueuedTenant, change: int) -> None:
        """Notes that a tenant has got a row (1), or lost one (-1)."""
        tenant.rows += change
        self._num_bound += change
        self.note(tenant)

    def note(self, tenant: QueuedTenant) -> None:
        """Counts a tenant, with its weight, while it runs or is queued."""
        weight = tenant.weight if tenant.rows or len(tenant.queue) else None
        counted = self._active.get(tenant)
        if weight == counted:
            return
        if weight is None:
            del self._active[tenant]
        else:
            self._active[tenant] = weight
        self._sum = None

    # ---- who is within its share ----

    @property
    def is_shared(self) -> bool:
        """True if several tenants run or are queued."""
        return len(self._active) > 1

    @property
    def are_enough(self) -> bool:
        """True if there are several tenants, and no more than rows."""
        return 1 < len(self._active) <= self._num_rows

    def share(self, tenant: QueuedTenant, num_rows: int) -> float:
        """Returns a tenant's share of so many rows."""
        return num_rows * tenant.weight / max(self._weight, tenant.weight)

    def asks_its_share(self, tenant: QueuedTenant) -> bool:
        """Returns whether a tenant asks for no more rows than its share."""
        return tenant.rows + len(tenant.queue) <= self._whole(tenant, self._num_rows)

    def credit(self, tenant: QueuedTenant) -> float:
        """Returns how far the counter of a tenant may be ahead, or behind, without any effect."""
        return self._credit / tenant.weight

    def standing(self, tenant: QueuedTenant) -> float:
        """Returns the counter by which a tenant is queued."""
        return tenant.counter - self.credit(tenant) if self.asks_its_share(tenant) else tenant.counter

    def holding(self, tenant: QueuedTenant, blocks: HeldBlocks) -> float:
        """Returns the counter by which a tenant gives up blocks."""
        is_within = blocks.by_tenant[tenant.name] <= self.share(tenant, blocks.total)
        return tenant.counter - self.credit(tenant) if is_within else tenant.counter

    # ---- who gives a row to whom ----

    def num_lacking(self, taker: QueuedTenant) -> int:
        """Returns how many rows a tenant lacks of those that it is queued for and has a share in. All are taken."""
        return min(len(taker.queue), self._whole(taker, self._num_rows) - taker.rows)

    def may_claim(self, taker: QueuedTenant, num_blocks: int, blocks: HeldBlocks) -> bool:
        """Returns whether so many blocks more are within a tenant's share, or the first that it gets."""
        return not taker.rows or blocks.by_tenant[taker.name] + num_blocks <= self.share(taker, blocks.total)

    def giver(self, taker: QueuedTenant, blocks: HeldBlocks | None = None) -> QueuedTenant | None:
        """Returns the tenant that gives a row to one that lacks rows, or blocks: that which was served most of those
        that have more than their share, and more than one row. None if none was served enough more."""
        standing = self.standing(taker)
        if taker.rows and not self.asks_its_share(taker):
            standing += self._patience / self._weight
        able = [other for other in self._active if other is not taker and other.rows > 1 and other.counter > standing]
        if taker.rows:
            able = [other for other in able if self._has_too_many(other, blocks)]
        return max(able, key=lambda other: other.counter, default=None)

    def check_invariants(self, tenants: Collection[QueuedTenant]) -> None:
        """Asserts that those that run or are queued are counted, once and with their weights."""
        active = {tenant: tenant.weight for tenant in tenants if tenant.rows or len(tenant.queue)}
        assert active == self._active, "weights are miscounted"
        assert self._sum is None or self._sum == sum(self._active.values())
        assert self._num_bound == sum(tenant.rows for tenant in tenants), "rows are miscounted"

    # ---- inside ----

    @property
    def _weight(self) -> float:
        """Sum over all that run or are queued, added up when asked for: differences keep rounding errors."""
        if self._sum is None:
            self._sum = sum(self._active.values())
        return self._sum

    def _whole(self, tenant: QueuedTenant, num_rows: int) -> int:
        return max(1, int(self.share(tenant, num_rows) + _ROUNDING))

    def _has_too_many(self, giver: QueuedTenant, blocks: HeldBlocks | None) -> bool:
        if blocks is None:
            return giver.rows > self.share(giver, self._num_rows) + _ROUNDING
        return blocks.by_tenant[giver.name] > self.share(giver, blocks.total)
