"""`tandem usage`: the ledger, by tenant and time."""

import csv
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.commands.redis_of import RedisUrl, Url, service_at, with_redis

if TYPE_CHECKING:
    from cluster.tenants.usage import UsageRow


def usage(
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only this tenant. Default: all.", show_default=False)
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            help="24h, 90m, 7d, or a date like 2026-01-31 (UTC). Default: 24h.",
            metavar="TIME",
            show_default=False,
        ),
    ] = "24h",
    form: Annotated[
        Literal["csv", "json", "table"],
        typer.Option(
            "--format", help="csv and json: a row each request; table: sums. Default: table.", show_default=False
        ),
    ] = "table",
    url: Url = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show what tenants have used.

    Rows are kept for --usage-days of the service. They come a second or so after their requests have ended.
    """
    from cluster.tenants.usage import parse_since, read_usage

    now_s = time.time()
    since_s = parse_since(since, now_s)
    rows = with_redis(service_at(url, redis_url).redis_url, lambda redis: read_usage(redis, tenant, since_s, now_s + 1))
    {"csv": _print_csv, "json": _print_json, "table": _print_table}[form](rows)
    if not rows:
        typer.echo(f"tandem: nothing was used{'' if tenant is None else f' by {tenant}'} in that time", err=True)


def _print_csv(rows: "Sequence[UsageRow]") -> None:
    from cluster.tenants.usage import UsageRow

    writer = csv.writer(sys.stdout)
    writer.writerow(UsageRow.__struct_fields__)
    writer.writerows([getattr(row, name) for name in UsageRow.__struct_fields__] for row in rows)


def _print_json(rows: "Sequence[UsageRow]") -> None:
    """A line each."""
    import msgspec

    for row in rows:
        typer.echo(msgspec.json.encode(msgspec.structs.asdict(row)))


def _print_table(rows: "Sequence[UsageRow]") -> None:
    from cluster.tenants.usage import summed

    lines: list[tuple[str, ...]] = [("tenant", "model", "adapter", "requests", "prompt", "cached", "completion")]
    for entry in summed(rows):
        name, _, digest = (entry.adapter or "-").partition("@")
        adapter = f"{name[:60]}@{digest[:12]}" if digest else name[:60]
        lines.append((entry.tenant, entry.model, adapter, *(str(count) for count in entry[3:])))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        names = [text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)]
        counts = [text.rjust(width) for text, width in zip(line[3:], widths[3:], strict=True)]
        typer.echo("  ".join([*names, *counts]))
