"""Reads a multipart/form-data body piece by piece: however large a part is, a piece or two are held.

A body is parts between boundaries, each with headers of its own (RFC 7578). Names and file names are texts in the
header Content-Disposition; other headers of a part are not read.
"""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from tandem.workers.messages.errors import RequestRefused

MAX_HEAD_BYTES = 8 * 1024
MAX_FIELD_BYTES = 4 * 1024
_TYPE = re.compile(r"\s*multipart/form-data\s*;(.*)", re.IGNORECASE | re.DOTALL)
_BOUNDARY = re.compile(r"\bboundary=(?:\"([^\"]{1,70})\"|([^\s;,\"]{1,70}))", re.IGNORECASE)
_DISPOSITION = re.compile(r"^content-disposition:\s*form-data\s*(;.*)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(r";\s*([\w*]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^;]*))")


class FormPart(NamedTuple):
    """The head of a part. filename: None for a field that is no file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. RequestRefused 415 for another type."""
    found = _TYPE.fullmatch(content_type)
    boundary = None if found is None else _BOUNDARY.search(found[1])
    if boundary is None:
        text = "The content type must be multipart/form-data, with a boundary."
        raise RequestRefused(text, code="content_type", status=415)
    return (boundary[1] or boundary[2]).encode("latin-1", "replace")


class FormReader:
    """The parts of one body, in order: next_part(), then its body(). What is left of a part is skipped."""

    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes) -> None:
        self._pieces = pieces
        self._mark = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # the first boundary needs no line before it
        self._is_in_part = True

    async def next_part(self) -> FormPart | None:
        """The next part, None behind the last one. RequestRefused for what is no form."""
        async for _ in self.body():
            pass
        await self._hold(2)
        if self._held.startswith(b"--"):
            return None
        head = await self._head()
        self._is_in_part = True
        found = _DISPOSITION.search(head)
        named = {} if found is None else {m[1].lower(): _plain(m[2], m[3]) for m in _PARAMETER.finditer(found[1])}
        if "name" not in named:
            raise _malformed("a part has no name")
        return FormPart(named["name"], named.get("filename"))

    async def body(self) -> AsyncIterator[bytes]:
        """Yields the bytes of the part."""
        while self._is_in_part:
            at = self._held.find(self._mark)
            end = at if at >= 0 else max(0, len(self._held) - len(self._mark) + 1)
            piece = bytes(self._held[:end])
            del self._held[:end]
            if at >= 0:
                del self._held[: len(self._mark)]
                self._is_in_part = False
            if piece:
                yield piece
            if at < 0 and not await self._more():
                raise _malformed("it ends within a part")

    async def text(self, name: str) -> str:
        """The whole of a part that is a short text."""
        held = bytearray()
        async for piece in self.body():
            held += piece
            if len(held) > MAX_FIELD_BYTES:
                raise RequestRefused(f"The field {name} is too long.", code="invalid_value", param=name[:128])
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            raise RequestRefused(f"The field {name} is not UTF-8.", code="invalid_value", param=name[:128]) from None

    async def _head(self) -> str:
        """The headers of a part, without the line that is left of the boundary's."""
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > MAX_HEAD_BYTES or not await self._more():
                raise _malformed("the headers of a part do not end")
        head = bytes(self._held[:end]).decode("utf-8", "replace").replace("\r\n", "\n")
        del self._held[: end + 4]
        return head

    async def _hold(self, count: int) -> None:
        while len(self._held) < count:
            if not await self._more():
                raise _malformed("it ends within a boundary")

    async def _more(self) -> bool:
        """Reads on. False at the end."""
        piece = await anext(self._pieces, None)
        if piece is not None:
            self._held += piece
        return piece is not None


def _plain(quoted: str | None, bare: str | None) -> str:
    """A parameter's value. Browsers write a quote within it as %22, others escape it."""
    if quoted is None:
        return (bare or "").strip()
    return re.sub(r"\\(.)", r"\1", quoted).replace("%22", '"')


def _malformed(why: str) -> RequestRefused:
    return RequestRefused(f"The body is not multipart/form-data as its type says: {why}.", code="invalid_value")
