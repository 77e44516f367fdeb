"""Usage rows as `tandem usage` reads them."""

from tandem.cluster.state.redis_client import Commands
from tandem.cluster.tenants.billing_record import BillingRecord, read_rows_and_sums


async def read_usage(redis: Commands, tenant: str | None, since_s: float, until_s: float) -> list[BillingRecord]:
    """The rows without the sums, oldest first."""
    rows, _ = await read_rows_and_sums(redis, tenant, since_s, until_s)
    return rows
