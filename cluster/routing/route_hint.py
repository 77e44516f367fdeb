"""RouteHint: what the router and the group's load report need of a request. It travels beside the encoded request, so
that nobody decodes a prompt to choose a group."""

import msgspec

from tandem.cluster.routing.outstanding import cost_tokens
from tandem.cluster.routing.residency import adapter_key
from tandem.workers.messages.request import GenerationRequest


class RouteHint(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the router sees it."""

    request_id: str
    cost_tokens: int  # prompt and allowed output of all choices
    gateway: str = ""  # names this life of the gateway that sends it
    adapter: str | None = None  # its key (residency.adapter_key), None without one
    tenant: str = "default"
    avoid: tuple[str, ...] = ()  # groups to choose only when there is no other


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
