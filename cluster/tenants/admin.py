"""Changing tenants from inside a gateway: the store, and at once this gateway's own copy.

The CLI changes the store directly; gateways see that when it is announced, or within a poll.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from cluster.coordination.client import RedisAway
from cluster.tenants.directory import TenantDirectory
from cluster.tenants.store import KeyedTenant, TenantStore, no_tenant
from cluster.tenants.tenant import Tenant
from workers.errors import RequestRefused

T = TypeVar("T")


class TenantAdmin(Protocol):
    """What the admin routes do. RequestRefused: 400, 404 or 409 for what is asked, 503 while Redis is away."""

    async def all(self) -> Mapping[str, Tenant]: ...

    async def add(self, name: str, limits: Mapping[str, Any]) -> KeyedTenant: ...

    async def change(self, name: str, limits: Mapping[str, Any]) -> Tenant: ...

    async def rotate_key(self, name: str, grace_s: float) -> KeyedTenant: ...

    async def remove(self, name: str) -> None: ...


class StoreAdmin:
    """Over the service's Redis."""

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
        except RedisAway as error:
            raise _away() from error
        with suppress(RedisAway):  # it is changed; the poll will see it
            await self._directory.refresh()
        return result


class NoTenantAdmin:
    """There is no Redis: `tandem run-batch`, and tests."""

    async def all(self) -> Mapping[str, Tenant]:
        return {}

    async def add(self, name: str, limits: Mapping[str, Any]) -> KeyedTenant:
        del name, limits
        raise _away()

    async def change(self, name: str, limits: Mapping[str, Any]) -> Tenant:
        del limits
        raise no_tenant(name)

    async def rotate_key(self, name: str, grace_s: float) -> KeyedTenant:
        del grace_s
        raise no_tenant(name)

    async def remove(self, name: str) -> None:
        raise no_tenant(name)


def _away() -> RequestRefused:
    message = "Redis is away: tenants cannot be changed now. Those that are known go on."
    return RequestRefused(message, code="service_unavailable", status=503)


async def _nothing() -> None:
    """Only reads."""
