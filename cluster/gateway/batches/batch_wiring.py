"""Files and batches of a gateway, from the service's settings."""

from collections.abc import Callable, Mapping

from tandem.cluster.gateway.batches.batch_routes import Batches
from tandem.cluster.gateway.batches.batch_run import BatchServices
from tandem.cluster.gateway.batches.batch_runner import BatchRunner
from tandem.cluster.gateway.batches.batch_store import BatchStore
from tandem.cluster.gateway.batches.idle_rows import IdleRows
from tandem.cluster.gateway.batches.line_calls import LineHandler
from tandem.cluster.gateway.batches.tenant_shares import LineShares
from tandem.cluster.gateway.files.file_store import FileStore
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.state.redis_client import Commands
from tandem.configs.schema import GatewaySettings, ServiceSettings


def open_batches(own: GatewaySettings, redis: Commands, model: str, gateway: str) -> Batches:
    """Returns what the routes use. model: the base model's name. gateway: its id, which leases of batches name."""
    if not own.files_ttl_s:
        return Batches(None, None)
    files = FileStore(redis, ttl_s=own.files_ttl_s, max_file_bytes=own.max_file_bytes, max_bytes=own.files_bytes)
    return Batches(files, BatchStore(redis, model, gateway))


def batch_runner(
    settings: ServiceSettings,
    gateway: str,
    batches: Batches,
    handlers: Mapping[str, LineHandler],
    text: TextServices,
    context: GatewayContext,
    is_leaving: Callable[[], bool],
    is_tenant: Callable[[str], bool],
) -> BatchRunner | None:
    """Returns what runs batches; None where there are none. gateway: as open_batches(). handlers: of
    build_gateway_app()."""
    if batches.files is None:
        return None
    dispatch = context.dispatch
    rows = settings.engine.scheduler.max_num_seqs
    services = BatchServices(
        store=batches.store,
        files=batches.files,
        text=text,
        context=context,
        handlers=handlers,
        idle=IdleRows(dispatch.load, rows, lambda: dispatch.is_asleep),
        max_lines=settings.gateway.max_batch_lines,
        is_leaving=is_leaving,
        is_tenant=is_tenant,
        shares=LineShares(gateway),
    )
    return BatchRunner(services, batches.created)
