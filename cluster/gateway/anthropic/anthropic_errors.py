"""Error answers and error events in Anthropic's form. The message names the field at fault: there is no other place."""

import msgspec

from tandem.cluster.gateway.http.error_answers import OtherApi, as_refusal
from tandem.workers.messages.errors import RequestRefused

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
PATH = "/v1/messages"


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """The fields under "error"."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The whole body of an error answer."""

    error: AnthropicErrorDetail


def anthropic_error(refusal: RequestRefused, wait_s: int | None = None) -> bytes:
    """An ErrorForm."""
    kind = TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = str(refusal)
    if refusal.param is not None and refusal.param not in message:
        message = f"{refusal.param}: {message}"
    if wait_s is not None:
        message = f"{message.rstrip('.')}. Try again in {wait_s} s."
    return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorDetail(kind, message)))


def error_event(error: Exception) -> bytes:
    """The last event of a stream that an error has ended."""
    return b"event: error\ndata: " + anthropic_error(as_refusal(error)) + b"\n\n"


ANTHROPIC_API = OtherApi(PATH, anthropic_error, b"request-id")
