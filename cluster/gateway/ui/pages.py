"""GET / (a chat, and the state of the service for admins), /docs (the API reference) and /ui/NAME (their files).

All of them are public and hold no data: what a page shows, it asks of other routes with the key that was typed in.
`make ui` builds the files of static/ from source/ (docs/serving/ui.md). Files whose names bear a digest of their
content are kept by browsers for ever; all others are asked for each time, and answered with 304 if unchanged.
"""

import asyncio
import gzip
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.http.auth import Principal
from tandem.configs.schema import GatewaySettings

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
DIGEST = re.compile(r"-[0-9A-Z]{8}\.\w+$")
PACKED_FROM = 1024
_OWN = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
_OWN += "form-action 'none'; frame-ancestors 'none'; img-src 'self'"
POLICIES = {
    "index.html": f"{_OWN}; require-trusted-types-for 'script'; trusted-types 'none'",
    "docs.html": f"{_OWN} data:",
}
"""Content-Security-Policy by page. Swagger UI's style sheet has pictures in it."""
GUARDS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class StaticFile:
    """One file of static/."""

    name: str
    body: bytes

    @cached_property
    def packed(self) -> bytes | None:
        """The body by gzip; None where that saves nothing. Takes up to a tenth of a second, once."""
        packed = gzip.compress(self.body, mtime=0) if len(self.body) >= PACKED_FROM else self.body
        return packed if len(packed) < len(self.body) else None

    @cached_property
    def headers(self) -> dict[str, str]:
        """All but those of the encoding."""
        kept = "public, max-age=31536000, immutable" if DIGEST.search(self.name) else "no-cache"
        return GUARDS | {
            "content-type": f"{TYPES[Path(self.name).suffix]}; charset=utf-8",
            "cache-control": kept,
            "etag": f'W/"{sha256(self.body).hexdigest()[:24]}"',
            "vary": "accept-encoding",
            **({"content-security-policy": POLICIES[self.name]} if self.name in POLICIES else {}),
        }


@cache
def static_files() -> dict[str, StaticFile]:
    """All files of static/ by name, read once."""
    return {path.name: StaticFile(path.name, path.read_bytes()) for path in STATIC.iterdir() if path.suffix in TYPES}


async def chat_page(request: Request, _: Principal) -> Response:
    """A page for a browser: chat, and for admin keys the state of the service."""
    return await _answer("index.html", request)


async def docs_page(request: Request, _: Principal) -> Response:
    """A page for a browser: this document, to read and to try."""
    return await _answer("docs.html", request)


async def page_file(request: Request, _: Principal) -> Response:
    """A script, style sheet or picture of the pages, or the licences of what is in them."""
    return await _answer(request.path_params["name"], request)


Page = Callable[[Request, Principal], Coroutine[Any, Any, Response]]


def served(settings: GatewaySettings) -> dict[str, Page]:
    """The pages and their files by path, as far as the settings leave them in."""
    if settings.disable_ui:
        return {}
    pages: dict[str, Page] = {"/": chat_page, "/ui/{name}": page_file}
    return pages if settings.disable_fastapi_docs else pages | {"/docs": docs_page}


async def _answer(name: str, request: Request) -> Response:
    file = static_files().get(name)
    if file is None or (name in POLICIES and "name" in request.path_params):
        raise HTTPException(404)
    if _is_known(file.headers["etag"], request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=file.headers)
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        packed = await asyncio.to_thread(lambda: file.packed)
        if packed is not None:
            return Response(packed, headers=file.headers | {"content-encoding": "gzip"})
    return Response(file.body, headers=file.headers)


def _is_known(etag: str, given: str) -> bool:
    """True if an If-None-Match names the content, however it was encoded."""
    plain = etag.removeprefix("W/")
    return any(one.strip().removeprefix("W/") in (plain, "*") for one in given.split(","))


def _takes_gzip(given: str) -> bool:
    """True if an Accept-Encoding names gzip and does not forbid it."""
    for coding in given.lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() == "gzip":
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", quality)
    return False
