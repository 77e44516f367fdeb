"""`tandem tenants add|set|rotate-key|rm|ls`: tenants as desired state; gateways follow within a second."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cluster.commands.help import GroupedHelp
from cluster.commands.redis_of import RedisUrl, ServiceAt, Url, service_at, with_redis
from configs.errors import SettingsError

if TYPE_CHECKING:
    from cluster.tenants.store import KeyedTenant, Reading, TenantStore
    from cluster.tenants.tenant import Tenant

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="a-z, 0-9, dot, dash and underscore.")]
Requests = Annotated[str | None, typer.Option("--requests-per-minute", help="Requests a minute.", metavar="N")]
Tokens = Annotated[
    str | None, typer.Option("--tokens-per-minute", help="Tokens a minute, prompt and output together.", metavar="N")
]
Concurrency = Annotated[str | None, typer.Option("--concurrency", help="Requests at once.", metavar="N")]
Adapters = Annotated[str | None, typer.Option("--max-adapters", help="Adapters of its own.", metavar="N")]
KvShare = Annotated[
    str | None, typer.Option("--kv-share", help="Share of all KV memory for its requests, 0 to 1.", metavar="X")
]
Weight = Annotated[
    str | None, typer.Option("--weight", help="Share of busy groups against other tenants'. Default: 1.", metavar="X")
]
Priority = Annotated[
    str | None,
    typer.Option("--priority", help="Of requests that name none; lower goes first. Default: 0.", metavar="N"),
]
Budget = Annotated[
    str | None, typer.Option("--token-budget", help="Tokens in all; setting it starts it anew.", metavar="N")
]


def tenants_app() -> typer.Typer:
    """The verbs under `tandem tenants`."""
    app = typer.Typer(no_args_is_help=True, help="Add, change and remove tenants of a running service.")
    for name, verb in (("add", add), ("set", change), ("rotate-key", rotate_key), ("rm", remove), ("ls", show)):
        app.command(name, cls=GroupedHelp)(verb)
    return app


def add(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrency: Concurrency = None,
    max_adapters: Adapters = None,
    kv_share: KvShare = None,
    weight: Weight = None,
    priority: Priority = None,
    token_budget: Budget = None,
    url: Url = None,
    redis_url: RedisUrl = None,
) -> None:
    """Make a tenant and print its key, once. A limit that is not given is none."""
    limits = _limits(locals())
    made = _run(service_at(url, redis_url), lambda store: store.add(name, limits))
    _print_key(made)


def change(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrency: Concurrency = None,
    max_adapters: Adapters = None,
    kv_share: KvShare = None,
    weight: Weight = None,
    priority: Priority = None,
    token_budget: Budget = None,
    url: Url = None,
    redis_url: RedisUrl = None,
) -> None:
    """Change limits; what is not given stays, `none` lifts a limit."""
    limits = _limits(locals())
    if not limits:
        raise SettingsError("give a limit to change")
    typer.echo(_line(_run(service_at(url, redis_url), lambda store: store.change(name, limits))))


def rotate_key(
    name: Name,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            help="Seconds that the keys of before go on working. Default: 0.",
            metavar="X",
            show_default=False,
        ),
    ] = 0.0,
    url: Url = None,
    redis_url: RedisUrl = None,
) -> None:
    """Replace a tenant's keys by a new one and print it, once."""
    _print_key(_run(service_at(url, redis_url), lambda store: store.rotate_key(name, grace)))


def remove(name: Name, url: Url = None, redis_url: RedisUrl = None) -> None:
    """Remove a tenant that has no adapters. Its usage stays in the ledger."""
    left = _run(service_at(url, redis_url), lambda store: _removed(store, name))
    typer.echo(f"{name} removed")
    if left.is_empty:
        message = "that was the last tenant: a service without --api-key is open to everybody again"
        typer.echo(f"tandem: {message}", err=True)


async def _removed(store: "TenantStore", name: str) -> "Reading":
    """What is there after the tenant was removed."""
    await store.remove(name)
    return await store.read()


def show(url: Url = None, redis_url: RedisUrl = None) -> None:
    """List the tenants and their limits."""
    reading = _run(service_at(url, redis_url), lambda store: store.read())
    for name in sorted(reading.tenants):
        typer.echo(_line(reading.tenants[name]))
    if not reading.tenants:
        typer.echo("tandem: there are no tenants", err=True)


def _run(at: ServiceAt, work: "Callable[[TenantStore], Awaitable[T]]") -> T:
    from cluster.tenants.store import TenantStore

    return with_redis(at.redis_url, lambda redis: work(TenantStore(redis)))


def _limits(given: dict[str, Any]) -> dict[str, Any]:
    """The limits among a verb's arguments, as numbers; `none` is None. SettingsError names what is not a number."""
    limits: dict[str, Any] = {}
    for name, text in given.items():
        if name in ("name", "url", "redis_url") or text is None:
            continue
        kind = float if name in ("kv_share", "weight") else int
        try:
            limits[name] = None if text == "none" else kind(text)
        except ValueError as error:
            raise SettingsError(f"{text!r} is neither a number nor `none`", "--" + name.replace("_", "-")) from error
    return limits


def _print_key(made: "KeyedTenant") -> None:
    """The key alone on standard output, so that scripts can take it; the rest beside it."""
    typer.echo(f"tandem: {_line(made.tenant)}; its key, on standard output, is shown once", err=True)
    typer.echo(made.key)


def _line(tenant: "Tenant") -> str:
    import msgspec

    limits = msgspec.structs.asdict(tenant.limits)
    shown = [f"{name.replace('_', '-')} {_number(value)}" for name, value in limits.items() if value is not None]
    return f"{tenant.name}  {'  '.join(shown)}"


def _number(value: float) -> str:
    """As one types it: whole numbers in full."""
    return str(int(value)) if value == int(value) else repr(value)
