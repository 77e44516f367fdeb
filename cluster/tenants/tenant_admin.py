"""Tenant changes made inside a gateway, and the overview of tenants for `tandem status`.

The CLI changes the store directly; gateways see that when it is announced, or within a poll.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.store import KeyedTenant, TenantStore, no_tenant
from tandem.cluster.tenants.tenant import Tenant
from tandem.workers.messages.errors import RequestRefused

T = TypeVar("T")


class TenantAdmin:
    """The operations of the admin routes. RequestRefused: 400, 404 or 409 for the request, 503 while Redis is
    unavailable. As it is there is no Redis, and so no tenant: `tandem run-batch`, and tests."""

    async def all(self) -> Mapping[str, Tenant]:
        """Every tenant by its name."""
        return {}

    async def add(self, name: str, limits: Mapping[str, Any]) -> KeyedTenant:
        """A new tenant with a new key."""
        del name, limits
        raise _unavailable()

    async def change(self, name: str, limits: Mapping[str, Any]) -> Tenant:
        """Replaces the given limits; None lifts one."""
        del limits
        raise no_tenant(name)

    async def rotate_key(self, name: str, grace_s: float) -> KeyedTenant:
        """A new key in place of all others, which go on working for grace_s."""
        del grace_s
        raise no_tenant(name)

    async def remove(self, name: str) -> None:
        """Removes it: its keys stop working."""
        raise no_tenant(name)


class StoreAdmin(TenantAdmin):
    """The same over the service's Redis."""

    def __init__(self, store: TenantStore, directory: TenantDirectory) -> None:
        self._store = store
        self._directory = directory

    async def all(self) -> Mapping[str, Tenant]:
        await self._apply(_nothing)
        return self._directory.tenants

    async def add(self, name: str, limits: Mapping[str, Any]) -> KeyedTenant:
        return await self._apply(lambda: self._store.add(name, limits))

    async def change(self, name: str, limits: Mapping[str, Any]) -> Tenant:
        return await self._apply(lambda: self._store.change(name, limits))

    async def rotate_key(self, name: str, grace_s: float) -> KeyedTenant:
        return await self._apply(lambda: self._store.rotate_key(name, grace_s))

    async def remove(self, name: str) -> None:
        await self._apply(lambda: self._store.remove(name))

    async def _apply(self, change: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._directory.refresh()  # a Redis that has lost its tenants gets them back before others
            result = await change()
        except RedisUnavailable as error:
            raise _unavailable(error.state) from error
        with suppress(RedisUnavailable):  # it is changed; the poll will see it
            await self._directory.refresh()
        return result


def _unavailable(state: str = RedisUnavailable.state) -> RequestRefused:
    message = f"Redis {state}: tenants cannot be changed now. Those that are known go on."
    return RequestRefused(message, code="service_unavailable", status=503)


async def _nothing() -> None:
    """Changes nothing."""


async def running_requests(redis: Commands) -> dict[str, int | None]:
    """Requests that run, by tenant; as late as a heartbeat of the gateways. None: its limits need no counting, so
    nobody counts. RedisUnavailable."""
    tenants = (await TenantStore(redis).read()).values
    seconds, micros = _pair(await redis.command("TIME"))
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    running: dict[str, int | None] = dict.fromkeys(sorted(tenants))
    for name in running:
        if not tenants[name].limits.are_counted:
            continue
        alive = await redis.command("ZRANGEBYSCORE", keys.quota_gateways(name), now_ms, "+inf")
        counts = await redis.command("HGETALL", keys.quota(name))
        assert isinstance(alive, list) and isinstance(counts, dict), (alive, counts)
        running[name] = _sum(counts, alive)
    return running


def _sum(counts: Mapping[bytes, bytes], gateways: list[bytes]) -> int:
    return sum(int(float(counts.get(b"n:" + gateway, b"0"))) for gateway in gateways)


def _pair(answer: object) -> tuple[int, int]:
    assert isinstance(answer, list | tuple), answer
    return answer[0], answer[1]
