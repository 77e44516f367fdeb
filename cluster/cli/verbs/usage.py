"""`tandem usage`: usage records of the ledger, by tenant and time."""

import csv
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.cluster.cli.base.terminal import say, table
from tandem.cluster.cli.client.running_service import ServiceAt, on_service, with_redis

if TYPE_CHECKING:
    from tandem.cluster.state.redis_client import Commands
    from tandem.cluster.tenants.billing_record import BillingRecord, UsageSum


SINCE = "Start of the period: 24h, 90m, 7d, or a date like 2026-01-31 (UTC). Default: 24h."
FORM = "csv, json: a row per request; table: sums per tenant, model and adapter. Default: table."


@on_service
def usage(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant. Default: all tenants.")] = None,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help=SINCE, show_default=False)] = "24h",
    form: Annotated[Literal["csv", "json", "table"], typer.Option("--format", help=FORM, show_default=False)] = "table",
    *,
    at: ServiceAt,
) -> None:
    """Show the usage of tenants.

    Records are kept for --usage-days of the service, the latest --usage-rows of them as rows, earlier ones as sums by
    hour, which the table includes. They appear about a second after their requests have ended.
    """
    from tandem.cluster.tenants.billing_record import parse_since, read_rows_and_sums

    now_s = time.time()
    since_s = parse_since(since, now_s)

    async def read(redis: "Commands") -> "tuple[list[BillingRecord], list[UsageSum]]":
        return await read_rows_and_sums(redis, tenant, since_s, now_s + 1)

    rows, sums = with_redis(at.redis_url, read)
    if form == "table":
        _print_table(rows, sums)
    else:
        {"csv": _print_csv, "json": _print_json}[form](rows)
    if summed := sum(one.requests for one in sums):
        say(f"{summed} earlier requests are kept as sums by hour, of whole hours, and have no rows (--usage-rows)")
    if not rows and not sums:
        say(f"nothing was used{'' if tenant is None else f' by {tenant}'} in that time")


def _print_csv(rows: "Sequence[BillingRecord]") -> None:
    from tandem.cluster.tenants.billing_record import BillingRecord

    writer = csv.writer(sys.stdout)
    writer.writerow(BillingRecord.__struct_fields__)
    writer.writerows([getattr(row, name) for name in BillingRecord.__struct_fields__] for row in rows)


def _print_json(rows: "Sequence[BillingRecord]") -> None:
    """Prints one JSON object per line."""
    import msgspec

    for row in rows:
        typer.echo(msgspec.json.encode(msgspec.structs.asdict(row)))


def _print_table(rows: "Sequence[BillingRecord]", sums: "Sequence[UsageSum]") -> None:
    from tandem.cluster.tenants.billing_record import summed

    lines = [["tenant", "model", "adapter", "requests", "prompt", "cached", "completion"]]
    for entry in summed(rows, sums):
        name, _, digest = (entry.adapter or "-").partition("@")
        adapter = f"{name[:60]}@{digest[:12]}" if digest else name[:60]
        lines.append([entry.tenant, entry.model, adapter, *map(str, entry[3:])])
    typer.echo("\n".join(table(lines, num_names=3)))
