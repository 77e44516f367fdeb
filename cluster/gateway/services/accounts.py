"""Accounts: who may use the gateway, and how much. Built once (wiring.py, tests)."""

from dataclasses import dataclass, field

from tandem.cluster.gateway.http.auth import Authenticator
from tandem.cluster.tenants.billing_record import Ledger
from tandem.cluster.tenants.tenant_admin import TenantAdmin
from tandem.cluster.tenants.tenant_admission import Tenancy


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """Keys and limits of those who may use the gateway, and the changes of both. By default there are no tenants,
    and nothing is billed."""

    auth: Authenticator
    tenancy: Tenancy = field(default_factory=Tenancy)
    tenants: TenantAdmin = field(default_factory=TenantAdmin)
    ledger: Ledger = field(default_factory=Ledger)
