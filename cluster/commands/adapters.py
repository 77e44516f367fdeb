"""`tandem adapters ls|add|rm|pin|unpin`: adapters as desired state; gateways and groups follow within a second."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cluster.commands.help import GroupedHelp
from cluster.commands.redis_of import RedisUrl, ServiceAt, Url, model_on, service_at, with_redis
from configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from cluster.adapters.desk import AdapterDesk
    from cluster.adapters.entries import AdapterEntry, BaseFacts
    from cluster.adapters.registry import AdapterRegistry
    from cluster.coordination.client import BackgroundClient
    from cluster.coordination.registry import AdapterReport

T = TypeVar("T")
Holders = Callable[[str], dict[str, int]]
"""Of a digest: how many groups hold it, by tier."""
Name = Annotated[str, typer.Argument(metavar="NAME", help="What clients send as `model`.")]
Model = Annotated[
    str | None, typer.Option("--model", help="The base model's name. Default: that of the service that runs here.")
]


def adapters_app() -> typer.Typer:
    """The verbs under `tandem adapters`."""
    app = typer.Typer(no_args_is_help=True, help="Add, pin and remove LoRA adapters of a running service.")
    for name, verb in (("ls", show), ("add", add), ("rm", remove), ("pin", pin), ("unpin", unpin)):
        app.command(name, cls=GroupedHelp)(verb)
    return app


def show(model: Model = None, url: Url = None, redis_url: RedisUrl = None) -> None:
    """List the adapters: version, tenant, pin, source, and how many groups hold it where."""

    async def read(registry: "AdapterRegistry", redis: "BackgroundClient") -> "tuple[list[AdapterEntry], Holders]":
        await registry.refresh()
        return list(registry.entries.values()), await _holders(redis, registry.model)

    entries, holders = _run(model, service_at(url, redis_url), read)
    for entry in entries:
        owner = entry.tenant if entry.tenant is not None else "public"
        held = [f"{tier} {count}" for tier, count in holders(entry.digest).items() if count]
        parts = (f"{entry.name}@{entry.digest[:12]}", owner, *(["pinned"] if entry.pinned else []), *held, entry.source)
        typer.echo("  ".join(parts))
    if not entries:
        typer.echo("tandem: there are no adapters", err=True)


def add(
    name: Name,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A PEFT folder that every group can read, or a URL.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose it is. Default: as it was, at first everyone's.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Everyone's from now on, whosever it was.")] = False,
    pinned: Annotated[bool, typer.Option("--pin", help="Keep it on the devices, as `pin` does.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of other content of this name.")] = False,
    model: Model = None,
    url: Url = None,
    redis_url: RedisUrl = None,
) -> None:
    """Check an adapter whole and serve it. Requests that run keep the version they came with."""
    from cluster.adapters.desk import EVERYONE, NameTaken
    from cluster.adapters.entries import changed
    from cluster.adapters.sources import absolute
    from workers.errors import RequestRefused

    if public and tenant is not None:
        raise SettingsError("an adapter is one tenant's or everyone's", "--public")
    place, owner = absolute(source), EVERYONE if public else tenant

    async def load(desk: "AdapterDesk") -> str:
        before = desk.registry.entries.get(name)
        outcome = await desk.load(name, place, tenant=owner, pinned=pinned or None, inplace=replace)
        also = changed(before, desk.registry.entries.get(name))
        return f"{outcome}: {also}" if also else outcome

    try:
        typer.echo(f"{name} {_change(model, service_at(url, redis_url), load, checks=True)}")
    except NameTaken as error:
        raise SettingsError(
            f"the name {name} is taken by other content; give it to take its place", "--replace"
        ) from error
    except RequestRefused as error:
        if error.param != "lora_path":
            raise
        raise SettingsError(f"{place}: {error}", "SOURCE") from error


def remove(name: Name, model: Model = None, url: Url = None, redis_url: RedisUrl = None) -> None:
    """Serve an adapter no longer. Requests that run end as they began."""

    async def unload(desk: "AdapterDesk") -> bool:
        return await desk.unload(name) is not None

    _found(name, _change(model, service_at(url, redis_url), unload))
    typer.echo(f"{name} removed")


def pin(name: Name, model: Model = None, url: Url = None, redis_url: RedisUrl = None) -> None:
    """Keep an adapter on the devices of all groups, as long as others find room beside it."""
    _set_pinned(name, True, model, service_at(url, redis_url))


def unpin(name: Name, model: Model = None, url: Url = None, redis_url: RedisUrl = None) -> None:
    """Let an adapter leave the devices when others need the room."""
    _set_pinned(name, False, model, service_at(url, redis_url))


async def _holders(redis: "BackgroundClient", base: str) -> Holders:
    """Groups by tier, of the services that run here; nothing is known of others'."""
    from cluster.coordination.registry import FleetView
    from cluster.run_files import running_services

    reports = []
    for run in running_services():
        fleet = FleetView(redis, run.service_id)
        if run.model == base:
            await fleet.refresh()
        reports += [record.adapters for record in fleet.records.values() if record.adapters is not None]

    return partial(held_by, reports)


def held_by(reports: "Sequence[AdapterReport]", digest: str) -> dict[str, int]:
    """How many groups hold it, by tier."""
    from cluster.routing.residency import adapter_key

    key = adapter_key(digest)
    return {
        "device": sum(key in report.on_device for report in reports),
        "host": sum(key in report.on_host for report in reports),
    }


def _set_pinned(name: str, pinned: bool, model: str | None, at: ServiceAt) -> None:
    async def change(desk: "AdapterDesk") -> bool:
        return await desk.pin(name, pinned)

    _found(name, _change(model, at, change))
    typer.echo(f"{name} {'pinned' if pinned else 'no longer pinned'}")


def _found(name: str, was: bool) -> None:
    if not was:
        raise TandemError(f"there is no adapter {name}")


def _change(
    model: str | None, at: ServiceAt, work: "Callable[[AdapterDesk], Awaitable[T]]", *, checks: bool = False
) -> T:
    """Runs `work` with a desk. checks: one that can check sources, against the model that the service serves."""

    async def run(registry: "AdapterRegistry", redis: "BackgroundClient") -> T:
        from cluster.adapters.desk import AdapterDesk
        from cluster.adapters.limits import adapter_limit
        from cluster.tenants.store import TenantStore

        await registry.refresh()
        base = await registry.base()
        if base is None:
            raise TandemError(f"no service with --enable-lora has served {registry.model} from this Redis")
        tenants = (await TenantStore(redis).read()).tenants
        limit = partial(adapter_limit, tenants)
        check = _checker(base) if checks else _check_nothing
        desk = AdapterDesk(registry, check, (registry.model, *base.names), limit=limit)
        try:
            return await work(desk)
        finally:
            desk.close()

    return _run(model, at, run)


def _checker(base: "BaseFacts") -> Callable[[str], str]:
    from cluster.adapters.checks import checker_of

    if not Path(base.folder).is_dir():
        raise TandemError(f"{base.folder}, the model's folder, is not on this machine: adapters cannot be checked")
    return checker_of(base)


def _check_nothing(source: str) -> str:
    raise AssertionError(f"nothing is loaded here, and {source} is not looked at")


def _run(model: str | None, at: ServiceAt, work: "Callable[[AdapterRegistry, BackgroundClient], Awaitable[T]]") -> T:
    """Runs `work` with the list of the base model, and the Redis that it is in."""
    from cluster.adapters.registry import AdapterRegistry

    base = model or at.model or model_on(at.redis_url)
    return with_redis(at.redis_url, lambda redis: work(AdapterRegistry(redis, base), redis))
