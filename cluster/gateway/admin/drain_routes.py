"""POST /admin/drain: the planned end of a group, or of a node of Ray."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import read_fields

MOST_S = 7 * 86400.0


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """target: the id of a group, or the id, address or name of a node. timeout_s: how long requests may go on where
    they are, by default --shutdown-timeout. For the OpenAPI document."""

    target: str
    timeout_s: float | None = None


async def drain(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Take new requests from a group or a node, let those it has end or move, and end it. Again: how far that is."""
    fields = await read_fields(text, request, principal)
    for name in fields.keys() - {"target", "timeout_s"}:
        raise unsupported(name, f"The field {printable(name)} is not supported.")
    target, timeout_s = fields.get("target"), fields.get("timeout_s")
    if not isinstance(target, str) or not target:
        raise invalid("target", "target must be the id of a group or the name of a node.")
    if timeout_s is not None and not _is_time(timeout_s):
        raise invalid("timeout_s", f"timeout_s must be a number of seconds from 0 to {MOST_S:.0f}.")
    state = await context.dispatch.drain(target, timeout_s)
    return json_response({"object": "drain", **msgspec.structs.asdict(state)})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_S
