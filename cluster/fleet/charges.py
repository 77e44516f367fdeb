"""Exchange of fairness charges between groups, so that a tenant spread over groups is charged once.

All groups of a service add to the same totals in Redis, one per tenant, and read those that have changed since their
last look: what others have added is charged here too. So an exchange is one call of a few bytes per tenant that worked,
however many groups there are. A group numbers what it adds, and adds it again under the same number until Redis has
answered: an exchange that is missed or sent twice counts once. Totals of an emptied Redis begin at nothing under a new
name; what was added to the lost ones and not read yet is not charged elsewhere. A group that could not look for longer
than tenants are remembered begins like a new one: what others have added before is not charged here.

When nothing grew or Redis is unavailable, the engine gets no charges once, and is fair by itself. The only group, while
it charges nobody, looks for others every few seconds. Tenants that nobody charges for minutes are forgotten.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, Part, RedisUnavailable, text_of

log = logging.getLogger("tandem.fairness")
Charges = Mapping[str, float]
"""Tokens by weight, by tenant."""
PERIOD_S = 1.0
ALONE_PERIOD_S = 5.0
"""Well below CHARGES_TTL_MS: the totals are renewed by each look."""
MOST_PER_S = 100
"""Exchanges of all groups together in a second: with more groups each comes round less often."""
IDLE_S = 600.0
"""A tenant that no group has charged for so long is forgotten, here and in Redis, and its total begins again."""
LEAST_TOKENS = 1e-3
"""Less is what sums of fractions are rounded by."""

EXCHANGE = load_lua(__file__, "charges_exchange.lua")


class _Seen(NamedTuple):
    """One tenant's total, and the time of the look that found it: at its last change or a little later."""

    total: float
    at_us: int


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
        idle_s: float = IDLE_S,
    ) -> None:
        self._redis = redis
        self._service, self._group = service, group
        self._take = take
        self._give = give
        self._clock = clock
        self._idle_us = int(idle_s * 1e6)
        self._alone_until_s: float | None = None
        self._next_at_s = clock()
        self._number = 0
        self._sending: Charges = {}
        self._next: dict[str, float] = {}
        self._origin = ""
        self._since_us = 0
        self._seen: dict[str, _Seen] = {}
        self._has_given = False

    async def update(self) -> None:
        """Writes and reads once, if this group's turn has come. Called every second. Raises RedisUnavailable; the next
        call makes up for this one."""
        charged = await self._take()
        for tenant, charge in charged.items():
            self._next[tenant] = self._next.get(tenant, 0.0) + charge
        has_charges = bool(self._next or self._sending)
        if not has_charges and self._alone_until_s is not None and self._clock() < self._alone_until_s:
            return
        if self._clock() < self._next_at_s:
            return
        self._alone_until_s = None
        grown: dict[str, float] = {}
        try:
            while True:
                for tenant, more in (await self._send()).items():
                    grown[tenant] = grown.get(tenant, 0.0) + more
                if not self._next:
                    break  # else what came up while an answer was missing follows at once
        except RedisUnavailable:
            self._pass_on(grown)
            raise
        self._pass_on(grown)

    async def _send(self) -> Charges:
        """Adds what is being sent, else what is next; returns what others have added."""
        if not self._sending and self._next:
            self._number += 1
            self._sending, self._next = self._next, {}
        grown = await self._exchange()
        self._sending = {}
        return grown

    def _pass_on(self, grown: Charges) -> None:
        if grown or self._has_given:
            self._give(grown)
        self._has_given = bool(grown)

    async def _exchange(self) -> Charges:
        """One round trip: adds what is to be sent, and returns what other groups have added. The first one, and one so
        long after the last that tenants were forgotten meanwhile, only learns what was added before."""
        listed = keys.groups(self._service)
        answer, count, is_listed = await self._redis.pipeline(
            [self._script(), ["SCARD", listed], ["SISMEMBER", listed, self._group]]
        )
        assert isinstance(count, int), count
        self._next_at_s = self._clock() + count / MOST_PER_S - PERIOD_S / 2 if count > MOST_PER_S else 0.0
        if (count, is_listed) == (1, 1):  # an emptied Redis does not list even this one
            self._alone_until_s = self._clock() + ALONE_PERIOD_S
        assert isinstance(answer, list), answer
        origin, now_us, names, values = answer
        is_first = not self._origin or int(now_us) - self._since_us > self._idle_us
        if is_first:
            self._seen = {}
        totals = dict(zip(map(text_of, names), map(_number, values), strict=True))
        grown = self._learn(text_of(origin), int(now_us), totals)
        return {} if is_first else grown

    def _script(self) -> list[Part]:
        """The call of charges_exchange.lua."""
        added: list[Part] = [part for tenant, charge in self._sending.items() for part in (tenant, charge)]
        return [
            *("EVAL", EXCHANGE, 3, keys.charges(self._service), keys.charges_changed(self._service)),
            keys.charges_number(self._service, self._group),
            *(keys.CHARGES_TTL_MS, self._idle_us, self._number, self._origin, self._since_us),
            *(secrets.token_hex(8), *added),
        ]

    def _learn(self, origin: str, now_us: int, totals: Charges) -> Charges:
        """Takes the totals that have changed, and returns by how much others have raised them."""
        if origin != self._origin:
            self._seen = {}
        before_us = self._since_us - self._idle_us  # of the last look: Redis may have kept all that was changed later
        self._seen = {tenant: seen for tenant, seen in self._seen.items() if seen.at_us >= before_us}
        self._origin, self._since_us = origin, now_us
        grown = {}
        for tenant, total in totals.items():
            known = self._seen[tenant].total if tenant in self._seen else 0.0
            if (more := total - known - self._sending.get(tenant, 0.0)) >= LEAST_TOKENS:  # negative: an older copy
                grown[tenant] = more
            self._seen[tenant] = _Seen(total, now_us)
        return grown


def _number(value: object) -> float:
    """A total; 0 when it cannot be read."""
    try:
        return float(text_of(value))
    except ValueError as error:
        log.warning("a total of charges cannot be read: %s", error)
        return 0.0
