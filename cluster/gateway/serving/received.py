"""A request whose body has been read: what every route that takes a body begins with. Next, for a chat:
conversation/conversation.py."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import read_body
from tandem.cluster.gateway.records.trace_context import TraceContext
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.json_body import parse_object

Body = TypeVar("Body")
Fields = TypeVar("Fields", bound="QueueFields", covariant=True)
PARSED_FASTER = 8
"""Bytes that are parsed and checked in the time in which one is tokenized, roughly."""


class QueueFields(Protocol):
    """The fields of every body that groups serve, of the queue and the prefix cache."""

    @property
    def priority(self) -> int | None:
        """The request's; None: the tenant's."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """KV of the prefix cache is found under it only."""
        ...


class Posted(NamedTuple, Generic[Fields]):
    """One HTTP request: who asks, and with what body, which other APIs than OpenAI's translate. size: bytes of the
    client's body. began_s: of the gateway's clock."""

    request: Request
    principal: Principal
    body: Fields
    size: int
    began_s: float

    @property
    def trace(self) -> TraceContext | None:
        """The request's place in a trace; None when there are no traces."""
        trace: TraceContext | None = self.request.scope.get("tandem.trace")
        return trace

    def note_generation(self) -> TraceContext | None:
        """Notes that there is a Generation, which makes the request's record at its end. Returns its trace."""
        self.request.scope["tandem.is_to_generate"] = False
        return self.trace


async def received(
    text: TextServices, request: Request, principal: Principal, check: Callable[[dict[str, Any], IgnoredFields], Body]
) -> tuple[Body, int]:
    """The body, read and checked, and its size in bytes. check: notes what it ignores, which the answer's header names
    (http/middleware.py)."""
    data = await read_body(request, text.settings.max_body_bytes)
    ignored = begin_ignored(text, request)

    def parsed() -> Body:
        return check(parse_object(data, text.settings.max_json_depth), ignored)

    return await text.workers.run(principal.tenant, len(data) // PARSED_FASTER, parsed), len(data)


def begin_ignored(text: TextServices, request: Request) -> IgnoredFields:
    """The ignored fields of a request, of which there are none yet."""
    ignored = IgnoredFields(is_strict=text.settings.strict_fields)
    request.scope["tandem.ignored_fields"], request.scope["tandem.ignored"] = ignored, ignored.names
    request.scope["tandem.left_out"] = ignored.left_out
    return ignored


async def read_fields(text: TextServices, request: Request, principal: Principal) -> dict[str, Any]:
    """The body's JSON object."""
    return (await received(text, request, principal, lambda fields, _: fields))[0]


def ignored_fields(request: Request) -> IgnoredFields:
    """The ignored fields of a request whose body has been received: more may be noted until its answer begins."""
    ignored = request.scope["tandem.ignored_fields"]
    assert isinstance(ignored, IgnoredFields)
    return ignored
