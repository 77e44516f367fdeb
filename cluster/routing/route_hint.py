"""RouteHint: what the router and the group's load report need of a request. It travels beside the encoded request, so
that nobody decodes a prompt to choose a group."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from tandem.cluster.routing.outstanding import cost_tokens
from tandem.cluster.routing.residency import adapter_key
from tandem.workers.messages.request import GenerationRequest


class RouteHint(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the router sees it."""

    request_id: str
    # prompt and expected output of all choices (route_charges.py); before that is known, their allowed output
    cost_tokens: int
    gateway: str = ""  # names this life of the gateway that sends it
    adapter: str | None = None  # its key (residency.adapter_key), None without one
    tenant: str = "default"
    avoid: tuple[str, ...] = ()  # groups to choose only when there is no other
    # by group that has KV of the prompt's beginning: tokens on its device, tokens below it only (host memory, disk)
    overlaps: Mapping[str, tuple[int, int]] = {}
    session: str = ""  # names the session, and its tenant, where the client says which it is

    def __reduce__(self) -> tuple[Callable[[], "RouteHint"], tuple[()]]:
        """Leaves out what only the router looks at, which may be long, when it travels to a group. Groups of earlier
        versions know these fields too."""
        made = partial(
            RouteHint,
            request_id=self.request_id,
            cost_tokens=self.cost_tokens,
            gateway=self.gateway,
            adapter=self.adapter,
            tenant=self.tenant,
            avoid=self.avoid,
        )
        return made, ()

    def cost_at(self, group: str) -> int:
        """Returns what it costs a group in tokens: less where KV of its prompt is on the device."""
        return max(0, self.cost_tokens - self.overlaps.get(group, (0, 0))[0])


def session_key(tenant: str, session: str) -> str:
    """Names a session of a tenant; "" where there is none. Equal names of two tenants are two sessions."""
    return hashlib.blake2b(f"{tenant}\0{session}".encode(), digest_size=8).hexdigest() if session else ""


def hint_of(
    request: GenerationRequest,
    avoid: tuple[str, ...] = (),
    session: str = "",
    overlaps: Mapping[str, tuple[int, int]] = {},
) -> RouteHint:
    """Returns the hint of a request. O(1) in the length of its prompt."""
    return RouteHint(
        request_id=request.request_id,
        cost_tokens=cost_tokens(request),
        gateway=request.reply_to.nonce if request.reply_to is not None else "",
        adapter=adapter_key(request.adapter.digest) if request.adapter is not None else None,
        tenant=request.tenant,
        avoid=avoid,
        session=session,
        overlaps=overlaps,
    )
