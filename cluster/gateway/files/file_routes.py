"""POST and GET /v1/files, GET and DELETE of one, and GET of its content. Bodies go in and out in pieces: however large
a file is, a gateway holds a piece or two of it."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.cluster.gateway.files.file_store import (
    FileGone,
    FileRecord,
    Files,
    FileStore,
    FileWriter,
    checked_files,
    new_file_id,
    not_found,
    too_large,
    unavailable,
)
from tandem.cluster.gateway.files.form_reader import FormReader, boundary_of
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import BODY_TIMEOUT_S, printable
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

BATCH = "batch"
PURPOSES = (BATCH,)
FORM_BYTES = 64 * 1024
"""Bytes of a form beside its file."""
LEAST_LIFE_S = 3600
STUCK_S = 60.0
"""Time for a client to take a piece of a file."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


async def upload_file(files: Files, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Takes a file: a form with `purpose` and `file`."""
    store = checked_files(files)
    boundary = boundary_of(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > store.max_file_bytes + FORM_BYTES:
        raise too_large(store.max_file_bytes)
    writer = FileWriter(store, principal.tenant, new_file_id())
    try:
        async with aclosing(_body(request)) as pieces:
            fields, filename = await _read_form(FormReader(pieces, boundary), writer)
        record = await writer.finish(filename, BATCH, int(context.wall_clock()), _life_s(fields, store))
    except BaseException as error:
        context.tasks.start(writer.drop(), "drop a file")  # where Redis is away it goes by itself, later
        if isinstance(error, RedisUnavailable):
            raise unavailable(error) from None
        if isinstance(error, FileGone):
            raise RequestRefused("The file took too long to come.", code="request_timeout", status=408) from None
        raise
    return json_response(record.shown())


async def _read_form(form: FormReader, writer: FileWriter) -> tuple[dict[str, str], str]:
    """The fields of the form, and the name of its file, which is written."""
    fields: dict[str, str] = {}
    filename: str | None = None
    while (part := await form.next_part()) is not None:
        if part.name in fields or (part.name == "file" and filename is not None):
            raise invalid(part.name[:128], f"The field {printable(part.name)} comes twice.")
        if part.name == "file":
            if part.filename is None:
                raise invalid("file", "file must be a file, with a name.")
            _check_purpose(fields)  # where it came before
            filename = _UNPRINTABLE.sub("", part.filename)[:255] or "file"
            await writer.begin()
            async for piece in form.body():
                await writer.write(piece)
        elif part.name in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            fields[part.name] = await form.text(part.name)
        else:
            raise unsupported(part.name, f"The field {printable(part.name)} is unknown.")
    if "purpose" not in fields:
        raise invalid("purpose", 'The field purpose is required: "batch".')
    _check_purpose(fields)
    if filename is None:
        raise invalid("file", "The field file is required.")
    return fields, filename


def _check_purpose(fields: Mapping[str, str]) -> None:
    given = fields.get("purpose", BATCH)
    if given not in PURPOSES:
        raise invalid("purpose", f'purpose must be "batch", not {printable(given)}.')


def _life_s(fields: Mapping[str, str], store: FileStore) -> int:
    """Seconds that the file is kept."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return store.ttl_s
    if anchor != "created_at":
        raise invalid("expires_after[anchor]", 'expires_after[anchor] must be "created_at".')
    if seconds is None or not (seconds.isascii() and seconds.isdecimal()):
        raise invalid("expires_after[seconds]", "expires_after[seconds] must be a number of seconds.")
    return checked_life("expires_after[seconds]", int(seconds[:12]), store)


def checked_life(param: str, seconds: int, store: FileStore) -> int:
    """A life that a client asks for. RequestRefused outside what the service allows."""
    least = min(LEAST_LIFE_S, store.ttl_s)
    if not least <= seconds <= store.ttl_s:
        raise invalid(param, f"{param} must be from {least} to {store.ttl_s} (--files-ttl), not {seconds}.")
    return seconds


async def _body(request: Request) -> AsyncGenerator[bytes]:
    """The pieces of the body, which the gateway does not hold any more once the next one is asked for."""
    pieces = request.stream()
    try:
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece
            if (held := request.scope.get("tandem.body")) is not None:
                held.release()
    except TimeoutError:
        text = f"The body stood still for {BODY_TIMEOUT_S:g} s."
        raise RequestRefused(text, code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise RequestRefused("The client left.", code="invalid_value") from None


async def list_files(files: Files, request: Request, principal: Principal) -> Response:
    """The tenant's files, newest first."""
    query = page_query(request, ("after", "limit", "order", "purpose"), most=10_000)
    found = await checked_files(files).all_of(principal.tenant)
    if (purpose := query.get("purpose")) is not None:
        found = [record for record in found if record.purpose == purpose]
    if query.get("order", "desc") == "desc":
        found.reverse()
    return json_response(page([record.shown() for record in found], query, 10_000))


async def show_file(files: Files, request: Request, principal: Principal) -> Response:
    """One file, without its content."""
    record = await checked_files(files).get(principal.tenant, request.path_params["file_id"])
    return json_response(record.shown())


async def delete_file(files: Files, request: Request, principal: Principal) -> Response:
    """Deletes a file; a batch that still reads it fails, with the rows that it has."""
    file_id = request.path_params["file_id"]
    await checked_files(files).delete(principal.tenant, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def file_content(files: Files, request: Request, principal: Principal) -> Response:
    """The bytes of a file."""
    store = checked_files(files)
    record = await store.get(principal.tenant, request.path_params["file_id"])
    try:
        first = await store.piece(principal.tenant, record, 0) if record.pieces else b""
    except FileGone:
        raise not_found(record.id, None) from None
    except RedisUnavailable as error:
        raise unavailable(error) from None
    return FileContent(store, principal.tenant, record, first)


class FileContent(Response):
    """A file as it is sent, piece by piece. first: its first one, which was found."""

    def __init__(self, store: FileStore, tenant: str, record: FileRecord, first: bytes) -> None:
        super().__init__(b"", media_type="application/octet-stream")
        self.headers["content-length"] = str(record.bytes)
        self._store, self._tenant, self._record, self._first = store, tenant, record, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the file. What fails on the way cuts the connection, before content-length is reached."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = max(0, self._record.pieces - 1)
        for number in range(last + 1):
            piece = await self._store.piece(self._tenant, self._record, number) if number else self._first
            async with asyncio.timeout(STUCK_S):
                await send({"type": "http.response.body", "body": piece, "more_body": number < last})


def page_query(request: Request, known: tuple[str, ...], most: int) -> dict[str, str]:
    """The checked parameters of a list."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
        query[name] = value
    limit = query.get("limit", "1")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise invalid("limit", f"limit must be from 1 to {most}, not {printable(limit)}.")
    if query.get("order", "asc") not in ("asc", "desc"):
        raise invalid("order", f'order must be "asc" or "desc", not {printable(query["order"])}.')
    return query


def page(shown: list[dict[str, Any]], query: Mapping[str, str], usual: int) -> dict[str, Any]:
    """The part of a list that a query asks for. usual: its length where the query does not say."""
    if (after := query.get("after")) is not None:
        at = next((i for i, one in enumerate(shown) if one["id"] == after), None)
        if at is None:
            raise invalid("after", f"after: there is nothing with the id {printable(after)}.")
        shown = shown[at + 1 :]
    data = shown[: int(query.get("limit", usual))]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(shown) > len(data)}
