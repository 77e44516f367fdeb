"""Accounts: who may use the gateway, and how much. Built once (wiring.py, tests)."""

from dataclasses import dataclass, field

from tandem.cluster.gateway.http.auth import Authenticator
from tandem.cluster.tenants.billing_record import Ledger, NoLedger
from tandem.cluster.tenants.tenant_admin import NoTenantAdmin, TenantAdmin
from tandem.cluster.tenants.tenant_admission import OpenTenancy, Tenancy


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """Who may use the gateway, and how much: keys, limits, and the changes of both. By default there are no tenants,
    and nothing is billed."""

    auth: Authenticator
    tenancy: Tenancy = field(default_factory=OpenTenancy)
    tenants: TenantAdmin = field(default_factory=NoTenantAdmin)
    ledger: Ledger = field(default_factory=NoLedger)
