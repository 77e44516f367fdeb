"""POST and GET /v1/batches, GET of one, and POST of its cancellation."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.batches.batch_records import BatchBody, BatchFacts, StoredBatch, read_batch, window_s
from tandem.cluster.gateway.batches.batch_store import PREFIX, BatchPlace, BatchStore, batch_not_found
from tandem.cluster.gateway.files.file_routes import BATCH, checked_life, page, page_query
from tandem.cluster.gateway.files.file_store import Files, FileStore, checked_files, new_file_id, unavailable
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import received
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused


class Batches:
    """Stores of the routes of files and batches; None: none are kept. created: set for each new batch."""

    def __init__(self, files: Files, store: BatchStore | None) -> None:
        self.files = files
        self.created = asyncio.Event()
        self._store = store

    @property
    def store(self) -> BatchStore:
        """The batches. RequestRefused where none are run."""
        checked_files(self.files)
        assert self._store is not None, "files and batches are kept together"
        return self._store


async def create_batch(
    text: TextServices, context: GatewayContext, batches: Batches, request: Request, principal: Principal
) -> Response:
    """Runs the lines of a file on idle capacity."""
    files, store = checked_files(batches.files), batches.store
    body, _ = await received(text, request, principal, lambda fields, _: read_batch(fields))
    record = await files.get(principal.tenant, body.input_file_id, "input_file_id")
    if record.purpose != BATCH:
        raise invalid("input_file_id", f'input_file_id: its purpose is "{record.purpose}", not "batch".')
    facts = _facts(body, principal.tenant, int(context.wall_clock()), files, text.random_ids)
    try:
        if await files.held_bytes(principal.tenant) >= files.max_bytes:
            message = f"Your files have {files.max_bytes} bytes or more (--files-bytes); delete some."
            raise RequestRefused(message, code="content_too_large", status=413, param="input_file_id")
        facts = await store.create(facts)
    except RedisUnavailable as error:
        raise unavailable(error) from None
    batches.created.set()
    return json_response(StoredBatch(facts=facts, status="validating", times={}).shown())


def _facts(body: BatchBody, tenant: str, now_s: int, files: FileStore, ids: Callable[[], str]) -> BatchFacts:
    """ids: of a request with an Idempotency-Key the same ones when it runs again."""
    window, life_s = window_s(body.completion_window), files.ttl_s
    if body.output_expires_after is not None:
        life_s = checked_life("output_expires_after.seconds", body.output_expires_after.seconds, files)
    return BatchFacts(
        id=PREFIX + ids(),
        tenant=tenant,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        created_s=now_s,
        expires_s=now_s + window,
        life_s=files.ttl_s + window,
        output_life_s=life_s,
        output_file_id=new_file_id(ids),
        error_file_id=new_file_id(ids),
        metadata=body.metadata,
    )


async def list_batches(batches: Batches, request: Request, principal: Principal) -> Response:
    """The tenant's batches, newest first."""
    query = page_query(request, ("after", "limit"), most=100)
    try:
        found = await batches.store.all_of(principal.tenant)
    except RedisUnavailable as error:
        raise unavailable(error) from None
    return json_response(page([batch.shown() for batch in reversed(found)], query, 20))


async def show_batch(batches: Batches, request: Request, principal: Principal) -> Response:
    """A batch, and how far it is."""
    return json_response((await _batch(batches, request, principal)).shown())


async def cancel_batch(batches: Batches, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Cancels a batch; what has been answered is written to its files. One that is over stays as it is."""
    batch = await _batch(batches, request, principal)
    place = BatchPlace(principal.tenant, batch.facts.id)
    try:
        await batches.store.move(place, "cancelling", context.wall_clock(), {}, is_owner=False)
    except RedisUnavailable as error:
        raise unavailable(error) from None
    return json_response((await _batch(batches, request, principal)).shown())


async def _batch(batches: Batches, request: Request, principal: Principal) -> StoredBatch:
    """The batch of a path. RequestRefused 404 where there is none, 503 while Redis is away."""
    batch_id = request.path_params["batch_id"]
    try:
        found = await batches.store.get(BatchPlace(principal.tenant, batch_id))
    except RedisUnavailable as error:
        raise unavailable(error) from None
    if found is None:
        raise batch_not_found(batch_id)
    return found
