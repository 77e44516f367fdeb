"""`tandem adapters ls|add|rm|pin|unpin`: changes the adapter list in Redis; gateways and groups apply it within a
second."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tandem.cluster.cli.base.flags import Command, flag, with_flags
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import SERVICE_FLAGS, ServiceAt, model_on, service_at, with_redis
from tandem.configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.adapters.adapter_list import AdapterList
    from tandem.cluster.adapters.adapter_service import AdapterService
    from tandem.cluster.adapters.entries import AdapterEntry
    from tandem.cluster.fleet.group_reports import AdapterReport
    from tandem.cluster.state.redis_client import BackgroundClient

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter: the `model` of requests for it.")]
MODEL = flag("model", str, help="Name of the base model. Default: that of the service.")


def on_model(function: Command) -> Command:
    """Makes `function(..., at)` a command with --model, --url and --redis-url. `at` is the ServiceAt that they name."""
    return with_flags(function, "at", (MODEL, *SERVICE_FLAGS), _at)


def _at(model: str | None, url: str | None, redis_url: str | None) -> ServiceAt:
    at = service_at(url, redis_url)
    return at._replace(model=model or at.model)


@on_model
def show(at: ServiceAt) -> None:
    """List the adapters.

    A line has the version, the tenant, the pin, the number of groups that hold it by tier, and the source.
    """

    async def read(adapters: "AdapterList", redis: "BackgroundClient") -> "tuple[list[AdapterEntry], _Reports]":
        await adapters.refresh()
        return list(adapters.entries.values()), await _reports(redis, adapters.model)

    entries, reports = _run(at, read)
    for entry in entries:
        owner = entry.tenant if entry.tenant is not None else "public"
        held = held_by(reports, entry.digest)
        parts = (f"{entry.name}@{entry.digest[:12]}", owner, *(["pinned"] if entry.pinned else []), *held, entry.source)
        typer.echo("  ".join(parts))
    if not entries:
        say("there are no adapters")


@on_model
def add(
    name: Name,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="PEFT folder that every group can read, or a URL of one.")
    ],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Owner. Default: unchanged; a new adapter is public.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make it public, also if a tenant owned it.")] = False,
    pinned: Annotated[bool, typer.Option("--pin", help="Keep it on the devices, as `pin` does.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the adapter of this name when its content is different.")
    ] = False,
    *,
    at: ServiceAt,
) -> None:
    """Check an adapter and serve it. Requests in flight keep the version that they started with."""
    from tandem.cluster.adapters.adapter_service import EVERYONE, NameTaken
    from tandem.cluster.adapters.entries import changed
    from tandem.cluster.adapters.sources import absolute
    from tandem.workers.messages.errors import RequestRefused

    if public and tenant is not None:
        raise SettingsError("an adapter is one tenant's or everyone's", "--public")
    place, owner = absolute(source), EVERYONE if public else tenant

    async def load(service: "AdapterService") -> str:
        before = service.adapters.entries.get(name)
        outcome = await service.load(name, place, tenant=owner, pinned=pinned or None, inplace=replace)
        also = changed(before, service.adapters.entries.get(name))
        return f"{outcome}: {also}" if also else outcome

    try:
        typer.echo(f"{name} {_change(at, load, checks=True)}")
    except NameTaken as error:
        raise SettingsError(
            f"the name {name} is taken by other content; give it to take its place", "--replace"
        ) from error
    except RequestRefused as error:
        if error.param != "lora_path":
            raise
        raise SettingsError(f"{place}: {error}", "SOURCE") from error


@on_model
def remove(name: Name, at: ServiceAt) -> None:
    """Stop serving an adapter. Requests in flight finish with it."""
    _change_named(name, at, lambda adapters: adapters.unload(name))
    typer.echo(f"{name} removed")


@on_model
def pin(name: Name, at: ServiceAt) -> None:
    """Keep an adapter on the devices of all groups.

    It is evicted last, when other adapters find no room beside it.
    """
    _change_named(name, at, lambda adapters: adapters.pin(name, True))
    typer.echo(f"{name} pinned")


@on_model
def unpin(name: Name, at: ServiceAt) -> None:
    """Let an adapter leave the devices again."""
    _change_named(name, at, lambda adapters: adapters.pin(name, False))
    typer.echo(f"{name} no longer pinned")


VERBS = {"ls": show, "add": add, "rm": remove, "pin": pin, "unpin": unpin}
_Reports = list["AdapterReport | None"]


async def _reports(redis: "BackgroundClient", base: str) -> _Reports:
    """Reports of the groups that serve `base`, of all services of this user on this machine."""
    from tandem.cluster.fleet.fleet_view import FleetView
    from tandem.cluster.process.run_files import running_services

    reports: _Reports = []
    for run in running_services():
        if run.model == base:
            fleet = FleetView(redis, run.service_id)
            await fleet.refresh()
            reports += [report.adapters for report in await fleet.read_reports()]
    return reports


def held_by(reports: "Iterable[AdapterReport | None]", digest: str) -> list[str]:
    """The number of groups that hold an adapter, by tier: ["device 2", "host 1"], without those that are 0."""
    from tandem.cluster.routing.residency import adapter_key

    key, known = adapter_key(digest), [report for report in reports if report is not None]
    counts = {
        "device": sum(key in report.on_device for report in known),
        "host": sum(key in report.on_host for report in known),
    }
    return [f"{tier} {count}" for tier, count in counts.items() if count]


def _change_named(name: str, at: ServiceAt, work: "Callable[[AdapterService], Awaitable[object]]") -> None:
    """Runs `work`. TandemError when its result is false: there is no adapter of this name."""
    if not _change(at, work):
        raise TandemError(f"there is no adapter {name}")


def _change(at: ServiceAt, work: "Callable[[AdapterService], Awaitable[T]]", *, checks: bool = False) -> T:
    """Runs `work` with an AdapterService. checks: it will check sources, against the model's folder on this machine."""

    async def run(adapters: "AdapterList", redis: "BackgroundClient") -> T:
        from tandem.cluster.adapters.adapter_service import AdapterService, adapter_limit
        from tandem.cluster.adapters.checks import checker_of
        from tandem.cluster.tenants.store import TenantStore

        await adapters.refresh()
        base = await adapters.base()
        if base is None:
            raise TandemError(f"no service with --enable-lora has served {adapters.model} from this Redis")
        if checks and not Path(base.folder).is_dir():
            raise TandemError(f"{base.folder}, the model's folder, is not on this machine: adapters cannot be checked")
        limit = partial(adapter_limit, (await TenantStore(redis).read()).values)
        names = (adapters.model, *base.names)
        service = AdapterService(adapters, lambda source: checker_of(base)(source), names, limit=limit)
        try:
            return await work(service)
        finally:
            service.close()

    return _run(at, run)


def _run(at: ServiceAt, work: "Callable[[AdapterList, BackgroundClient], Awaitable[T]]") -> T:
    """Runs `work` with the adapter list of the base model and the client that reads it."""
    from tandem.cluster.adapters.adapter_list import AdapterList

    base = at.model or model_on(at.redis_url)
    return with_redis(at.redis_url, lambda redis: work(AdapterList(redis, base), redis))
