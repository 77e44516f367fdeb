"""RouteHint: what the router and the group's load report need of a request. It travels beside the encoded request, so
that nobody decodes a prompt to choose a group."""

import msgspec

from tandem.cluster.routing.outstanding import cost_tokens
from tandem.cluster.routing.residency import adapter_key
from tandem.workers.messages.request import GenerationRequest


class RouteHint(msgspec.Struct, frozen=True, kw_only=True):
    """cost_tokens: prompt and allowed output of all choices. gateway: names this life of the gateway that sends it.
    adapter: its key (residency.adapter_key), None without one. avoid: groups to choose only when there is no other."""

    request_id: str
    cost_tokens: int
    gateway: str = ""
    adapter: str | None = None
    tenant: str = "default"
    avoid: tuple[str, ...] = ()


def hint_of(request: GenerationRequest, avoid: tuple[str, ...] = ()) -> RouteHint:
    """Returns the hint of a request. O(1) in the length of its prompt."""
    return RouteHint(
        request_id=request.request_id,
        cost_tokens=cost_tokens(request),
        gateway=request.reply_to.nonce if request.reply_to is not None else "",
        adapter=adapter_key(request.adapter.digest) if request.adapter is not None else None,
        tenant=request.tenant,
        avoid=avoid,
    )
