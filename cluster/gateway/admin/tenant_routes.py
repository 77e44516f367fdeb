"""/admin/tenants: what `tandem tenants` does, over HTTP, for who has an admin key.

Bodies hold the limits of cluster/tenants/tenant.py, unknown fields are refused by name. A key is in the answer that
makes it, and in no other.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import read_fields
from tandem.cluster.tenants.store import KeyedTenant, no_tenant
from tandem.cluster.tenants.tenant import Limits, Tenant


class TenantBody(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new tenant, for the OpenAPI document."""

    name: str


class RotateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """grace_s: how many seconds the keys of before go on working. For the OpenAPI document."""

    grace_s: float = 0.0


async def list_tenants(accounts: Accounts, _: Request, __: Principal) -> Response:
    """All tenants and their limits; no keys."""
    tenants = await accounts.tenants.all()
    return json_response({"object": "list", "data": [_shown(tenants[name]) for name in sorted(tenants)]})


async def add_tenant(text: TextServices, accounts: Accounts, request: Request, principal: Principal) -> Response:
    """Make a tenant; its key is in this answer only."""
    fields = await _fields(text, request, principal, {"name", *Limits.__struct_fields__})
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise invalid("name", "name must be a string.")
    return _keyed(await accounts.tenants.add(name, fields), status=201)


async def show_tenant(accounts: Accounts, request: Request, _: Principal) -> Response:
    """One tenant."""
    name = request.path_params["name"]
    tenant = (await accounts.tenants.all()).get(name)
    if tenant is None:
        raise no_tenant(name[:64])
    return json_response(_shown(tenant))


async def change_tenant(text: TextServices, accounts: Accounts, request: Request, principal: Principal) -> Response:
    """Change the given limits; null lifts one, and token_budget starts anew."""
    fields = await _fields(text, request, principal, set(Limits.__struct_fields__))
    return json_response(_shown(await accounts.tenants.change(request.path_params["name"], fields)))


async def remove_tenant(accounts: Accounts, request: Request, _: Principal) -> Response:
    """Remove a tenant that has no adapters: its keys stop working, its usage stays in the ledger."""
    name = request.path_params["name"]
    await accounts.tenants.remove(name)
    return json_response({"object": "tenant", "name": name, "deleted": True})


async def rotate_key(text: TextServices, accounts: Accounts, request: Request, principal: Principal) -> Response:
    """Replace a tenant's keys; the new one is in this answer only."""
    fields = await _fields(text, request, principal, {"grace_s"})
    grace_s = fields.get("grace_s") or 0
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float):
        raise invalid("grace_s", "grace_s must be a number of seconds.")
    return _keyed(await accounts.tenants.rotate_key(request.path_params["name"], grace_s))


async def _fields(text: TextServices, request: Request, principal: Principal, known: set[str]) -> dict[str, Any]:
    """The body's fields; what is not known is refused by name."""
    fields = await read_fields(text, request, principal)
    for name in fields:
        if name not in known:
            raise unsupported(name, f"The field {printable(name)} is unknown.")
    return fields


def _shown(tenant: Tenant) -> dict[str, Any]:
    limits = msgspec.structs.asdict(tenant.limits)
    return {"object": "tenant", "name": tenant.name, "created": int(tenant.created_s), "limits": limits}


def _keyed(made: KeyedTenant, status: int = 200) -> Response:
    return json_response(_shown(made.tenant) | {"key": made.key}, status)
