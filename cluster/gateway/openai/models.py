"""GET /v1/models and one of them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.services.model_lookup import ServedModel, all_shown, shown_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response


async def models(text: TextServices, context: GatewayContext, _: Request, principal: Principal) -> Response:
    """All names that `model` may take: the base's, public adapters and the tenant's own; for an admin all adapters."""
    shown = all_shown(text.model_names, context.adapters, principal)
    data = [model_object(text, served, principal) for served in shown]
    return json_response({"object": "list", "data": data})


async def model(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """One model; 404 in the words of an unknown one."""
    served = shown_model(text.model_names, context.adapters, request.path_params["model"], principal)
    return json_response(model_object(text, served, principal))


Names = tuple[str, ...]


Adapters = AdapterService | None


def model_object(text: TextServices, served: ServedModel, principal: Principal) -> dict[str, Any]:
    """OpenAI's model object with vLLM's additions. A tenant's adapter is owned by that tenant. An adapter's root is its
    source for those who may load adapters, and its version for others, who must not see paths."""
    shown: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": text.created_s,
        "owned_by": "tandem",
        "root": text.model_names[0],
        "parent": None,
        "max_model_len": text.max_model_len,
    }
    if (entry := served.entry) is not None:
        version = f"{entry.name}@{entry.digest}"
        shown["created"] = int(entry.listed_at_s)
        shown["owned_by"] = entry.tenant or shown["owned_by"]
        shown["root"] = entry.source if principal.is_admin else version
        shown["parent"] = text.model_names[0]
        shown["version"] = version
    return shown
