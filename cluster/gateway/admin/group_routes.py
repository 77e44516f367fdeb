"""GET /admin/groups: the groups and their ranks. POST /admin/groups/G/record: an order to one, /reset_prefix_cache:
to all."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.gateway.serving.answer import json_response
from tandem.workers.messages.errors import RequestRefused


async def list_groups(context: GatewayContext, _: Request, __: Principal) -> Response:
    """All groups and their ranks: where they run, what they load, what they do. Counts over time are in /metrics."""
    return json_response({"object": "list", "data": [_shown(*group) for group in await context.dispatch.groups()]})


async def reset_prefix_cache(context: GatewayContext, request: Request, _: Principal) -> Response:
    """Has every group forget the KV of its tiers that no running request uses."""
    for name in request.query_params:
        raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
    if left := await context.dispatch.reset_prefix_caches():
        message = f"The order was given, but {len(left)} groups have not confirmed it yet: {', '.join(sorted(left))}."
        raise RequestRefused(message, code="service_unavailable", status=503)
    return json_response({"status": "ok"})


async def record_group(context: GatewayContext, request: Request, _: Principal) -> Response:
    """Has a group write its last steps to a file beside its log, on its node, for `tandem replay`: needs
    --record-mib."""
    for name in request.query_params:
        raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
    recording = await context.dispatch.record(request.path_params["group"])
    return json_response({"object": "recording", **recording})


def _shown(record: GroupRecord, report: GroupReport | None) -> dict[str, Any]:
    """A group's record, and what only its report has: the ranks, and why its disk tier was switched off."""
    stats = None if report is None else decode_stats(report)
    return {
        "object": "group",
        "id": record.group,
        "model": record.model,
        "state": record.state,
        "node": record.host,
        "pid": record.pid,
        "ranks": [{"rank": rank, "pid": pid} for rank, pid in enumerate(report.rank_pids if report else ())],
        "running": record.running,
        "waiting": record.waiting,
        "outstanding_tokens": record.outstanding_tokens,
        "kv_usage": record.kv_used,
        "kv_tokens": record.kv_tokens,
        "stalled_s": record.stalled_s,
        "loaded_bytes": record.loaded_bytes,
        "total_bytes": record.total_bytes,
        "fetching": record.fetching,
        "load_s": record.load_s,
        "disk_disabled": None if stats is None or stats.offload is None else stats.offload.disk_disabled,
    }
