"""What groups have charged each tenant, told to each other, so that a tenant spread over groups is charged once.

Each coordinator writes its own running totals and reads the others'; by how much those have grown is charged here too.
Totals make it safe to lose a turn, to write twice, and to find Redis emptied. Nothing grew, or Redis is away: the group
is told so once, and is fair by itself.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from cluster.coordination import keys
from cluster.coordination.client import RedisAway
from cluster.coordination.registry import Commands

log = logging.getLogger("tandem.fairness")
Charges = Mapping[str, float]
"""Tokens by weight, by tenant."""


class ChargeExchange:
    """One group's part. take: what was charged here since it was last asked; give: charges of elsewhere to apply, none
    at all when nobody works there any more."""

    def __init__(
        self,
        redis: Commands,
        service: str,
        group: str,
        take: Callable[[], Awaitable[Charges]],
        give: Callable[[Charges], None],
    ) -> None:
        self._redis = redis
        self._service = service
        self._group = group
        self._take = take
        self._give = give
        self._own: dict[str, float] = {}
        self._heard: dict[str, Charges] | None = None
        self._has_told = False

    async def turn(self) -> None:
        """Writes and reads once. RedisAway: the next turn makes up for this one."""
        for tenant, charge in (await self._take()).items():
            self._own[tenant] = self._own.get(tenant, 0.0) + charge
        try:
            totals = await self._exchange()
        except RedisAway:
            self._tell({})
            raise
        before, self._heard = self._heard, (self._heard or {}) | totals  # those missing may come back as they were
        if before is None:
            return  # what was charged before this group's time
        grown: dict[str, float] = {}
        for group, charges in totals.items():
            known = before.get(group, {})
            for tenant, total in charges.items():
                if (more := total - known.get(tenant, 0.0)) > 0:
                    grown[tenant] = grown.get(tenant, 0.0) + more
        self._tell(grown)

    def _tell(self, grown: Charges) -> None:
        if grown or self._has_told:
            self._give(grown)
        self._has_told = bool(grown)

    async def _exchange(self) -> dict[str, Charges]:
        own = keys.charges(self._service, self._group)
        _, answer = await self._redis.pipeline(
            [
                ["SET", own, msgspec.msgpack.encode(self._own), "PX", keys.CHARGES_TTL_MS],
                ["SMEMBERS", keys.groups(self._service)],
            ]
        )
        assert isinstance(answer, set | list), answer
        others = sorted(found for one in answer if (found := _text(one)) != self._group)
        if not others:
            return {}
        values = await self._redis.command("MGET", *(keys.charges(self._service, other) for other in others))
        assert isinstance(values, list), values
        return {other: _decoded(value) for other, value in zip(others, values, strict=True) if value is not None}


def _decoded(value: object) -> Charges:
    """Nothing, when it is of another version."""
    try:
        return msgspec.msgpack.decode(value, type=dict[str, float]) if isinstance(value, bytes) else {}
    except msgspec.DecodeError as error:
        log.warning("a group's charges cannot be read: %s", error)
        return {}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
