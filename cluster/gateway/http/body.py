"""Reads a request body: the bytes within their cap and deadline, then JSON without the things JSON parsers let pass.

Refused: duplicate keys, nesting beyond the cap, NaN and infinities (1e999 too), lone surrogates, bytes that are not
UTF-8, other content types and encodings. Each failure is a RequestRefused; the meaning of a body is read elsewhere.
"""

import asyncio
import json
import math
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tandem.workers.messages.errors import RequestRefused

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
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


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `body`. `invalid_json` when it is not one, `invalid_value` for what strictness refuses."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except RequestRefused:
        raise
    except UnicodeDecodeError as error:
        raise _invalid(f"The body is not UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise _invalid(f"The body is nested deeper than {max_depth} levels.") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except ValueError:
        raise _invalid("The body holds a number with too many digits.") from None
    if not isinstance(value, dict):
        raise _invalid("The body must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(value, max_depth)
    if _SURROGATE_ESCAPE.search(body) is not None:
        _check_surrogates(value)
    return value


def _check_headers(request: Request) -> None:
    media, _, parameters = request.headers.get("content-type", "").partition(";")
    if not _JSON_TYPE.fullmatch(media.strip()):
        raise RequestRefused("The content type must be application/json.", code="content_type", status=415)
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if charset is not None and charset[1].lower() not in {"utf-8", "utf8"}:
        raise RequestRefused("The body must be UTF-8.", code="content_type", status=415)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestRefused("Compressed bodies are not accepted.", code="content_encoding", status=415)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _invalid(f"The key {printable(double)} comes twice in one object.")
    return found


def _no_constant(name: str) -> Any:
    raise _invalid(f"{name} is not a JSON number.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise RequestRefused("The body holds a number that is not finite.", code="invalid_value")
    return number


def _check_depth(value: Any, max_depth: int) -> None:
    """Breadth first, so that it ends at the first level beyond the cap."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            below += [child for child in children if isinstance(child, (dict, list))]
        level = below
        if not level:
            return
    raise _invalid(f"The body is nested deeper than {max_depth} levels.")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid("The body holds half of a surrogate pair, which is no character.") from None


def printable(text: str, limit: int = 64) -> str:
    """A client's string for an error message: quoted, shortened, without control characters or surrogates."""
    shown = text[:limit] + ("..." if len(text) > limit else "")
    return json.dumps(shown)


def _too_large(max_bytes: int) -> RequestRefused:
    return RequestRefused(f"The body exceeds {max_bytes} bytes.", code="content_too_large", status=413)


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_json")
