"""Reads the bytes of a request body, within their cap and deadline.

Refused: other content types and encodings. Each failure is a RequestRefused; the JSON is read by serving/json_body.py.
"""

import asyncio
import json
import re

from starlette.requests import ClientDisconnect, Request

from tandem.workers.messages.errors import RequestRefused

_JSON_TYPE = re.compile(r"application/(?:[\w.-]+\+)?json", re.IGNORECASE)
BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The body of a JSON request. 415 for a foreign type or encoding, 413 beyond max_bytes, 408 when it dawdles."""
    _check_headers(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        message = f"The body did not arrive within {timeout_s:g} s."
        raise RequestRefused(message, code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise RequestRefused("The client left.", code="invalid_json") from None
    return b"".join(chunks)


def _check_headers(request: Request) -> None:
    media, _, parameters = request.headers.get("content-type", "").partition(";")
    if not _JSON_TYPE.fullmatch(media.strip()):
        raise RequestRefused("The content type must be application/json.", code="content_type", status=415)
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if charset is not None and charset[1].lower() not in {"utf-8", "utf8"}:
        raise RequestRefused("The body must be UTF-8.", code="content_type", status=415)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestRefused("Compressed bodies are not accepted.", code="content_encoding", status=415)


def printable(text: str, limit: int = 64) -> str:
    """A client's string for an error message: quoted, shortened, without control characters or surrogates."""
    shown = text[:limit] + ("..." if len(text) > limit else "")
    return json.dumps(shown)


def _too_large(max_bytes: int) -> RequestRefused:
    return RequestRefused(f"The body exceeds {max_bytes} bytes.", code="content_too_large", status=413)
