"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers.

Both need an admin key once any key exists. What they do is cluster/adapters/adapter_service.py's; here it is HTTP.
"""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import changed
from tandem.cluster.adapters.sources import allowed_source
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.error_answers import model_not_found
from tandem.cluster.gateway.schemas.reading import ShortText, invalid, read
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.received import read_fields
from tandem.workers.messages.errors import RequestRefused


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's, and ours: tenant (whose it is; absent: as it was, at first everyone's; "": everyone's) and pinned."""

    lora_name: ShortText
    lora_path: ShortText
    load_inplace: bool | None = None
    base_model_name: ShortText | None = None
    tenant: ShortText | None = None
    pinned: bool | None = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's, without lora_int_id: its own number of an adapter, which nothing here has."""

    lora_name: ShortText


async def load_adapter(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Lists an adapter that lies under --lora-root, or switches a name to other content."""
    adapter_service = _adapter_service(context)
    body = read(await read_fields(text, request, principal), LoadBody)
    if body.base_model_name is not None and body.base_model_name not in text.model_names:
        raise invalid("base_model_name", "This is not the model that is served here.")
    source = allowed_source(body.lora_path, context.adapter_roots)
    before = adapter_service.adapters.entries.get(body.lora_name)
    load = adapter_service.load(
        body.lora_name, source, tenant=body.tenant, pinned=body.pinned, inplace=bool(body.load_inplace)
    )
    # a client that leaves does not leave it half done
    outcome = await asyncio.shield(context.tasks.start(load, f"load {body.lora_name}"))
    done = {"listed": "added", "switched": "replaced", "unchanged": "there already, unchanged"}[outcome]
    if also := changed(before, adapter_service.adapters.entries.get(body.lora_name)):
        done += f"; {also}"
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' {done}.")


async def unload_adapter(
    text: TextServices, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """Unlists an adapter; answers when no request of this gateway uses it any more."""
    adapter_service = _adapter_service(context)
    body = read(await read_fields(text, request, principal), UnloadBody)
    unload = context.tasks.start(adapter_service.unload(body.lora_name), f"unload {body.lora_name}")
    if (gone := await asyncio.shield(unload)) is None:
        refused = model_not_found(body.lora_name)
        raise RequestRefused(str(refused), code=refused.code, status=refused.status, param="lora_name")
    if not await adapter_service.wait_idle(gone.ref, context.times.unload_s):
        left = adapter_service.requests_of(gone.ref)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed; {left} requests still use it.")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed.")


def _adapter_service(context: GatewayContext) -> AdapterService:
    if context.adapters is None:
        message = "Adapters are not served: the service was started without --enable-lora."
        raise RequestRefused(message, code="unsupported_parameter", param="lora_name")
    return context.adapters
