"""`tandem top`: groups, queues, tokens a second, KV, adapters and tenants of a running service, again and again."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import with_redis
from tandem.cluster.cli.client.service_reading import (
    AddressFlag,
    AppFlag,
    ShownService,
    application_shown,
    check_one_name,
    progress,
    read_service,
    services_here,
)
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.cluster.state.redis_client import BackgroundClient

SHORTEST_S = 0.2


def top(
    url: Annotated[
        str | None,
        typer.Option("--url", help="Address of a service of yours on this machine. Default: the newest one."),
    ] = None,
    app: AppFlag = None,
    address: AddressFlag = "auto",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two readings.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit, as without a terminal: rates of one interval.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, a line for each interval.")] = False,
) -> None:
    """Follow a running service until Ctrl-C.

    Shows groups, their queues, tokens a second, KV, adapters and tenants.
    """
    check_one_name(url, app)
    if not interval >= SHORTEST_S:
        raise SettingsError(f"{interval:g} must be at least {SHORTEST_S:g} seconds", "--interval")
    shown = _chosen(url) if app is None else application_shown(app, address)
    ends = once or not (as_json or sys.stdout.isatty())
    try:
        with_redis(shown.redis_url, partial(_follow, shown, interval, ends, as_json), timeout_s=1.0, retries=1)
    except KeyboardInterrupt:
        sys.exit(0)  # the way to end it


def _chosen(url: str | None) -> ShownService:
    services = services_here(url)
    if len(services) > 1:
        say(f"{len(services)} services run here; this is {services[0].title} (--url chooses another)")
    return services[0]


async def _follow(shown: ShownService, interval_s: float, ends: bool, as_json: bool, redis: "BackgroundClient") -> None:
    """Shows a service until Ctrl-C; once if it `ends`."""
    from tandem.cluster.cli.live.top_screen import draw, lines_of, whole_screen

    with nullcontext() if ends or as_json else whole_screen():
        async for title, figures in _figures(shown, interval_s, redis):
            if as_json:
                typer.echo(json.dumps({"service": title, "time": time.time(), **figures}))
            elif ends:
                typer.echo("\n".join(lines_of(figures, title)))
            else:
                draw(lines_of(figures, f"{title}  {time.strftime('%H:%M:%S')}"))
            if ends:
                return


async def _figures(
    shown: ShownService, interval_s: float, redis: "BackgroundClient"
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields the title and the figures of each interval."""
    from tandem.cluster.cli.live.top_figures import figures

    before, read_s = await read_service(shown, redis), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, now_s = await read_service(shown, redis), time.monotonic()
        yield f"{shown.title}{progress(shown, now)}", figures(before, now, now_s - read_s)
        before, read_s = now, now_s
