"""Lists, switches and unlists adapters for every caller: HTTP, a watched folder, --lora-modules, `tandem adapters`.

    source --checked whole, on a thread--> digest --compare-and-set in the adapter list--> listed under its name

It moves no weights: requests carry their adapter's digest, and groups fetch what requests name. So a switch is one
write, running requests keep their version, and an unload waits only for this gateway's own requests: each counts from
the moment its model is resolved to the end of its owner task. Built by build_adapters.py for a gateway and for
`tandem run-batch`. One event loop. Next, when a request names it: cluster/gateway/services/model_lookup.py, then
workers/engine/adapters/adapter_cache.py.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Literal

from msgspec.structs import replace

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import NAME_RULE, AdapterEntry, changed, find, is_name
from tandem.cluster.adapters.sources import Module
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.tenants.tenant import DEFAULT_TENANT, Tenant
from tandem.configs.errors import SettingsError, TandemError
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import AdapterRef

log = logging.getLogger("tandem.adapters")
ROUNDS = 5
CHECKS_AT_ONCE = 2
"""A URL may take its time; a folder need not wait for it."""
OUTCOMES = ("listed", "switched", "unchanged", "refused", "unlisted")
Outcome = Literal["listed", "switched", "unchanged"]
EVERYONE: Final = ""
"""The `tenant` of a load that makes it everybody's from now on. No tenant's name is empty."""


class NameTaken(RequestRefused):
    """The name has other content, and `inplace` was not given."""

    def __init__(self, name: str) -> None:
        message = f"The name {name!r} is taken by other content; send load_inplace true to replace it."
        super().__init__(message, code="invalid_value", param="lora_name")


class AdapterService:
    """All adapters of one base model, for one gateway or one command. `check`: a source's digest, or TandemError; runs
    on a thread. limit: how many adapters a tenant may have, None for any number."""

    def __init__(
        self,
        adapters: AdapterList,
        check: Callable[[str], str],
        bases: Sequence[str],
        wall_clock: Callable[[], float] = time.time,
        limit: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        self.adapters = adapters
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._check = check
        self._bases = tuple(bases)
        self._wall_clock = wall_clock
        self._limit = limit
        self._running: Counter[tuple[str, str]] = Counter()
        self._has_ended = asyncio.Event()
        self._thread = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="tandem-adapters")

    # ---- what is listed ------------------------------------------------------------------------------------------

    def entry(self, model: str, tenant: str | None) -> AdapterEntry | None:
        """The adapter that a request's `model` names; None: there is none, or not for this tenant. tenant None: an
        admin's look."""
        return find(model, self._bases, self.adapters.entries, tenant)

    def visible(self, tenant: str | None) -> list[AdapterEntry]:
        """The adapters that this tenant may see, by name. tenant None: an admin's look, everything."""
        return [entry for entry in self.adapters.entries.values() if entry.is_for(tenant)]

    # ---- what requests use --------------------------------------------------------------------------------------

    @contextmanager
    def request(self, adapter: AdapterRef | None) -> Iterator[None]:
        """Counts a request while it runs. None: it uses no adapter."""
        if adapter is None:
            yield
            return
        version = (adapter.name, adapter.digest)  # what is listed later under the name is another's business
        self._running[version] += 1
        try:
            yield
        finally:
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]
            self._has_ended.set()

    def requests_of(self, adapter: AdapterRef) -> int:
        """Requests of this gateway that use this version now."""
        return self._running.get((adapter.name, adapter.digest), 0)

    async def wait_idle(self, adapter: AdapterRef, timeout_s: float) -> bool:
        """True as soon as no request uses it; False after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.requests_of(adapter):
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            return False
        return True

    # ---- changes -------------------------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        source: str,
        *,
        tenant: str | None = None,
        pinned: bool | None = None,
        inplace: bool = False,
    ) -> Outcome:
        """Loads no weights: it lists what lies at `source`. tenant, pinned: None leaves them as they are (of a new
        one: everyone's, not pinned). The same content again is "unchanged" wherever it lies now, and is read from there
        from now on; other content takes the name only with `inplace`, and later requests have it.
        RequestRefused: 400 with the reason, 503 while Redis is unavailable; then all is as before."""
        try:
            self._check_name(name)
            digest = await self._digest(source)
            outcome = await self._list(name, source, digest, tenant, pinned, inplace)
        except RequestRefused:
            self.counts["refused"] += 1
            raise
        self.counts[outcome] += 1
        if outcome != "unchanged":
            log.info("adapter %s@%s %s from %s", name, digest[:12], outcome, source)
        return outcome

    async def unload(self, name: str) -> AdapterEntry | None:
        """Unlists it: no later request finds it. What was listed, None: nothing. RequestRefused 503 while Redis is
        unavailable."""
        for _ in range(ROUNDS):
            before = self.adapters.entries.get(name)
            if before is None:
                return None
            if await self._replaced(before, None, name):
                self.counts["unlisted"] += 1
                log.info("adapter %s@%s unlisted", name, before.digest[:12])
                return before
        raise _busy(name)

    async def pin(self, name: str, pinned: bool) -> bool:
        """Sets if groups keep it on their devices from now on. False: there is no such adapter."""
        for _ in range(ROUNDS):
            before = self.adapters.entries.get(name)
            if before is None:
                return False
            if before.pinned == pinned or await self._replaced(before, replace(before, pinned=pinned), name):
                return True
        raise _busy(name)

    async def list_modules(self, modules: Sequence[Module]) -> None:
        """Lists --lora-modules, over what was listed under their names; without Redis here only, until it is back.
        SettingsError with the reason."""
        for name, source in modules:
            try:
                await self.load(name, source, inplace=True)
            except RequestRefused as error:
                if error.status != 503:
                    raise SettingsError(f"{name}: {source}: {error}", "--lora-modules") from error
                digest = await self._digest(source)
                self.adapters.keep(self._entry(name, source, digest, None, None, self.adapters.entries.get(name)))

    def close(self) -> None:
        """Ends the thread; a check that runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if not is_name(name):
            raise RequestRefused(f"An adapter's name is {NAME_RULE}.", code="invalid_value", param="lora_name")
        if name in self._bases:
            raise RequestRefused("This is the name of the model itself.", code="invalid_value", param="lora_name")

    async def _digest(self, source: str) -> str:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._check, source)
        except TandemError as error:
            raise RequestRefused(str(error), code="invalid_value", param="lora_path") from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RequestRefused(f"It cannot be read: {reason}.", code="invalid_value", param="lora_path") from error

    async def _list(
        self, name: str, source: str, digest: str, tenant: str | None, pinned: bool | None, inplace: bool
    ) -> Outcome:
        for _ in range(ROUNDS):
            before = self.adapters.entries.get(name)
            if before is not None and before.digest != digest and not inplace:
                raise NameTaken(name)
            after = self._entry(name, source, digest, tenant, pinned, before)
            if after == before:
                return "unchanged"
            if await self._replaced(before, after, name, self._limit_check(after, before)):
                if before is None:
                    return "listed"
                if before.digest == digest:
                    log.info("adapter %s@%s: %s", name, digest[:12], changed(before, after))
                    return "unchanged"
                return "switched"
        raise _busy(name)

    def _entry(
        self,
        name: str,
        source: str,
        digest: str,
        tenant: str | None,
        pinned: bool | None,
        before: AdapterEntry | None,
    ) -> AdapterEntry:
        same = before is not None and before.digest == digest
        owner = before.tenant if tenant is None and before is not None else tenant
        return AdapterEntry(
            name=name,
            digest=digest,
            source=source,
            tenant=None if owner == EVERYONE else owner,
            pinned=bool(before is not None and before.pinned) if pinned is None else pinned,
            listed_at_s=before.listed_at_s if same and before is not None else self._wall_clock(),
        )

    def _limit_check(self, after: AdapterEntry, before: AdapterEntry | None) -> Callable[[], None] | None:
        """The check that refuses one adapter more than its tenant may have; None where that does not matter.
        RequestRefused when there is no such tenant."""
        tenant = after.tenant
        if tenant is None or (before is not None and before.tenant == tenant):
            return None
        most = self._limit(tenant)
        if most is None:
            return None

        def check() -> None:
            has = sum(entry.tenant == tenant for entry in self.adapters.entries.values())
            if has >= most:
                message = f"The tenant {tenant!r} has {has} adapters and may have {most}."
                raise RequestRefused(message, code="invalid_value", param="tenant")

        return check

    async def _replaced(
        self,
        before: AdapterEntry | None,
        after: AdapterEntry | None,
        name: str,
        check: Callable[[], None] | None = None,
    ) -> bool:
        try:
            return await self.adapters.replace(before, after, name, check)
        except RedisUnavailable as error:
            log.warning("adapter %s was not changed: Redis %s (%s)", name, error.state, error)
            message = (
                f"The list of adapters cannot be changed now, because Redis {error.state}; those listed are served."
            )
            raise RequestRefused(message, code="service_unavailable", status=503) from error


def _busy(name: str) -> RequestRefused:
    message = f"The adapter {name!r} is being changed by others; try again."
    return RequestRefused(message, code="service_unavailable", status=503)


def adapter_limit(tenants: Mapping[str, Tenant], name: str) -> int | None:
    """The most adapters that a tenant may have; None: any number. RequestRefused 400 when there is no such tenant: an
    adapter of nobody's would be lost."""
    tenant = tenants.get(name)
    if tenant is not None:
        return tenant.limits.max_adapters
    if name != DEFAULT_TENANT:
        raise RequestRefused(f"There is no tenant {name!r}.", code="invalid_value", param="tenant")
    return None
