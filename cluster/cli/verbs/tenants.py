"""`tandem tenants add|set|rotate-key|rm|ls`: changes the tenants in Redis; gateways apply it within a second."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tandem.cluster.cli.base.flags import Command, flag, with_flags
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import ServiceAt, on_service, with_redis
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.cluster.state.durable_map import Reading
    from tandem.cluster.tenants.store import KeyedTenant, TenantStore
    from tandem.cluster.tenants.tenant import Tenant

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant, of a-z, 0-9, dot, dash and underscore.")]
LIMITS = (
    flag("requests_per_minute", str, metavar="N", help="Requests per minute."),
    flag("tokens_per_minute", str, metavar="N", help="Tokens per minute, prompt and output together."),
    flag("concurrency", str, metavar="N", help="Requests at the same time."),
    flag("max_adapters", str, metavar="N", help="Number of adapters of its own."),
    flag("kv_share", str, metavar="X", help="Fraction of all KV memory for its requests, 0 to 1."),
    flag("weight", str, metavar="X", help="Share of busy groups relative to other tenants. Default: 1."),
    flag("priority", str, metavar="N", help="Priority of requests without one; lower goes first. Default: 0."),
    flag("token_budget", str, metavar="N", help="Total number of tokens; setting it restarts the count."),
)


def with_limits(function: Command) -> Command:
    """Makes `function(..., limits)` a command with a flag for each limit. `limits` holds those that were given."""
    return with_flags(function, "limits", LIMITS, _limits)


def _limits(**given: str | None) -> dict[str, Any]:
    """Limits as numbers, `none` as None. SettingsError names a flag whose value is neither."""
    limits: dict[str, Any] = {}
    for name, text in given.items():
        if text is None:
            continue
        kind = float if name in ("kv_share", "weight") else int
        try:
            limits[name] = None if text == "none" else kind(text)
        except ValueError as error:
            raise SettingsError(f"{text!r} is neither a number nor `none`", "--" + name.replace("_", "-")) from error
    return limits


@with_limits
@on_service
def add(name: Name, limits: dict[str, Any], at: ServiceAt) -> None:
    """Add a tenant and print its key. The key is shown only once. A limit that is not given does not apply."""
    _print_key(_run(at, lambda store: store.add(name, limits)))


@with_limits
@on_service
def change(name: Name, limits: dict[str, Any], at: ServiceAt) -> None:
    """Change limits of a tenant. Limits that are not given stay; `none` removes one."""
    if not limits:
        raise SettingsError("give a limit to change")
    typer.echo(_line(_run(at, lambda store: store.change(name, limits))))


@on_service
def rotate_key(
    name: Name,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="X", help="Seconds that the old keys go on working. Default: 0.", show_default=False
        ),
    ] = 0.0,
    *,
    at: ServiceAt,
) -> None:
    """Replace a tenant's keys with a new one and print it. The key is shown only once."""
    _print_key(_run(at, lambda store: store.rotate_key(name, grace)))


@on_service
def remove(name: Name, at: ServiceAt) -> None:
    """Remove a tenant that has no adapters. Its usage stays in the ledger."""

    async def removed(store: "TenantStore") -> "Reading[Tenant]":
        await store.remove(name)
        return await store.read()

    left = _run(at, removed)
    typer.echo(f"{name} removed")
    if not left.values and not left.unreadable:
        say("that was the last tenant: the service stays closed, and without --api-key it answers nobody")


@on_service
def show(at: ServiceAt) -> None:
    """List the tenants and their limits."""
    reading = _run(at, lambda store: store.read())
    for name in sorted(reading.values):
        typer.echo(_line(reading.values[name]))
    if not reading.values:
        say("there are no tenants")


VERBS = {"add": add, "set": change, "rotate-key": rotate_key, "rm": remove, "ls": show}


def _run(at: ServiceAt, work: "Callable[[TenantStore], Awaitable[T]]") -> T:
    from tandem.cluster.tenants.store import TenantStore

    return with_redis(at.redis_url, lambda redis: work(TenantStore(redis)))


def _print_key(made: "KeyedTenant") -> None:
    """Prints only the key on standard output, for scripts; the tenant goes to standard error."""
    say(f"{_line(made.tenant)}; its key, on standard output, is shown once")
    typer.echo(made.key)


def _line(tenant: "Tenant") -> str:
    import msgspec

    limits = msgspec.structs.asdict(tenant.limits)
    shown = [f"{name.replace('_', '-')} {_number(value)}" for name, value in limits.items() if value is not None]
    return f"{tenant.name}  {'  '.join(shown)}"


def _number(value: float) -> str:
    """A limit as a user types it, whole numbers without a decimal point."""
    return str(int(value)) if value == int(value) else repr(value)
