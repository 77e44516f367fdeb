"""How many adapters of its own a tenant may have. Asked by the desk of a gateway and of `tandem adapters`."""

from collections.abc import Mapping

from cluster.tenants.tenant import DEFAULT_TENANT, Tenant
from workers.errors import RequestRefused


def adapter_limit(tenants: Mapping[str, Tenant], name: str) -> int | None:
    """None: any number. RequestRefused 400 when there is no such tenant: an adapter of nobody's would be lost."""
    tenant = tenants.get(name)
    if tenant is not None:
        return tenant.limits.max_adapters
    if name != DEFAULT_TENANT:
        raise RequestRefused(f"There is no tenant {name!r}.", code="invalid_value", param="tenant")
    return None
