"""Exchange of fairness charges between groups, so that a tenant spread over groups is charged once.

Each coordinator writes its own running totals and reads the others'; by how much those have grown is charged here too.
Totals make it safe to miss an exchange, to write twice, and to find Redis emptied. When nothing grew or Redis is
unavailable, the engine gets no charges once, and is fair by itself. The only group, while it charges nobody, looks for
others every few seconds.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Commands, Part, RedisUnavailable

log = logging.getLogger("tandem.fairness")
Charges = Mapping[str, float]
"""Tokens by weight, by tenant."""
ALONE_PERIOD_S = 5.0
"""Well below CHARGES_TTL_MS: the totals are renewed by each look."""
IDLE_S = 600.0
"""A tenant that was not charged for so long is forgotten. The others have had time to read its last total, and count
from 0 when it is back."""


class ChargeExchange:
    """One group's part. take: returns the charges since its last call. give: applies charges of other groups, {} when
    those have stopped growing."""

    def __init__(
        self,
        redis: Commands,
        service: str,
        group: str,
        take: Callable[[], Awaitable[Charges]],
        give: Callable[[Charges], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._service = service
        self._group = group
        self._take = take
        self._give = give
        self._clock = clock
        self._others: list[str] = []
        self._alone_until_s: float | None = None
        self._own: dict[str, float] = {}
        self._charged_at_s: dict[str, float] = {}
        self._last_totals: dict[str, Charges] | None = None
        self._has_given = False

    async def update(self) -> None:
        """Writes and reads once. Raises RedisUnavailable; the next call makes up for this one."""
        charged = await self._take()
        for tenant, charge in charged.items():
            self._own[tenant] = self._own.get(tenant, 0.0) + charge
            self._charged_at_s[tenant] = self._clock()
        self._forget_idle()
        if not charged and self._alone_until_s is not None and self._clock() < self._alone_until_s:
            return
        self._alone_until_s = None
        try:
            totals = await self._exchange()
        except RedisUnavailable:
            self._pass_on({})
            raise
        before = self._last_totals
        self._last_totals = (before or {}) | totals  # missing groups may come back as they were
        if before is None:
            return  # what was charged before this group's time
        grown: dict[str, float] = {}
        for group, charges in totals.items():
            known = before.get(group, {})
            for tenant, total in charges.items():
                if (more := total - known.get(tenant, 0.0)) > 0:
                    grown[tenant] = grown.get(tenant, 0.0) + more
        self._pass_on(grown)

    def _forget_idle(self) -> None:
        before_s = self._clock() - IDLE_S
        for tenant in [tenant for tenant, at_s in self._charged_at_s.items() if at_s < before_s]:
            del self._own[tenant], self._charged_at_s[tenant]

    def _pass_on(self, grown: Charges) -> None:
        if grown or self._has_given:
            self._give(grown)
        self._has_given = bool(grown)

    async def _exchange(self) -> dict[str, Charges]:
        """One round trip, another when a group is new."""
        own = keys.charges(self._service, self._group)
        asked = self._others
        _, answer, *rest = await self._redis.pipeline(
            [
                ["SET", own, msgspec.msgpack.encode(self._own), "PX", keys.CHARGES_TTL_MS],
                ["SMEMBERS", keys.groups(self._service)],
                *([self._mget(asked)] if asked else []),
            ]
        )
        assert isinstance(answer, set | list), answer
        groups = {_text(one) for one in answer}
        if groups == {self._group}:  # an emptied Redis does not list even this one
            self._alone_until_s = self._clock() + ALONE_PERIOD_S
        self._others = sorted(groups - {self._group})
        if not set(self._others) <= set(asked):
            asked, rest = self._others, [await self._redis.command(*self._mget(self._others))]
        values = rest[0] if rest else []
        assert isinstance(values, list), values
        totals = dict(zip(asked, values, strict=True))
        return {other: _decoded(totals[other]) for other in self._others if totals[other] is not None}

    def _mget(self, groups: list[str]) -> list[Part]:
        return ["MGET", *(keys.charges(self._service, group) for group in groups)]


def _decoded(value: object) -> Charges:
    """The charges of a group; {} when they are of another version."""
    try:
        return msgspec.msgpack.decode(value, type=dict[str, float]) if isinstance(value, bytes) else {}
    except msgspec.DecodeError as error:
        log.warning("a group's charges cannot be read: %s", error)
        return {}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
