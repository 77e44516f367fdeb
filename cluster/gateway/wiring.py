"""The gateway of a service: its state from the service's settings, and the app over it.

Called by the gateway deployment and by `tandem run-batch`. Reads the model folder's tokenizer, template and config;
loads no weights and no torch.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.sources import roots_of
from tandem.cluster.gateway.generation.dispatch import Dispatch
from tandem.cluster.gateway.http.auth import KnownKeys, StaticKeys, TenantKeys
from tandem.cluster.gateway.http.gateway_metrics import Peers
from tandem.cluster.gateway.routes import build_gateway_app
from tandem.cluster.gateway.services import GatewayState, make_state
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.configs.schema import GatewaySettings, ServiceSettings
from tandem.workers.build import eos_token_ids, resolve_max_model_len
from tandem.workers.models.spec.families import load_spec
from tandem.workers.text.chat_template import find_chat_template
from tandem.workers.text.tokenizer import load_tokenizer

__all__ = ["GatewayState", "build_gateway_app", "build_gateway_state"]


def build_gateway_state(
    settings: ServiceSettings,
    dispatch: Dispatch,
    tenants: TenantService | None = None,
    adapters: AdapterService | None = None,
    *,
    open_port: bool = False,
    peers: Peers | None = None,
    quarantined: Callable[[], Iterable[str]] = lambda: (),
) -> GatewayState:
    """The state of one gateway. SettingsError when the model folder lacks what a gateway needs.

    tenants: None when there is no Redis to hold any. open_port: the gateway listens itself, at the settings'
    address; else Serve's proxy does. peers: None for a service with one gateway. quarantined: digests of prompts that
    other gateways have in quarantine. `settings.engine.model.model` is a
    folder here (the launcher resolved it).
    """
    model = settings.engine.model
    folder = Path(model.model)
    text_folder = Path(model.tokenizer) if model.tokenizer is not None else folder
    tokenizer = load_tokenizer(text_folder)
    spec = load_spec(folder, model.hf_overrides or None)
    return make_state(
        settings=settings.gateway,
        model_names=model.served_model_name or (folder.name,),
        tokenizer=tokenizer,
        chat_template=find_chat_template(text_folder, model.chat_template, tokenizer),
        max_model_len=resolve_max_model_len(settings.engine, spec),
        vocab_size=spec.vocab_size,
        dispatch=dispatch,
        engine_eos_token_ids=frozenset(eos_token_ids(folder, spec)),
        auth=None if tenants is None else tenant_keys(settings.gateway, tenants.directory, open_port=open_port),
        tenancy=None if tenants is None else tenants.quota,
        tenants=None if tenants is None else tenants.admin,
        ledger=None if tenants is None else tenants.ledger,
        adapters=adapters,
        adapter_roots=roots_of(settings.adapters),
        peers=peers,
        quarantined=quarantined,
        fingerprint=f"tandem-{model.revision or folder.name}"[:64],
    )


def tenant_keys(settings: GatewaySettings, tenants: KnownKeys, *, open_port: bool) -> TenantKeys:
    """The authenticator. Admin routes are open only where the API is and the gateway itself listens on loopback."""
    static = StaticKeys(settings.api_keys, settings.admin_keys, settings.metrics_keys)
    may_be_open = settings.is_open(listens_itself=open_port)
    return TenantKeys(static, tenants, may_be_open=may_be_open, open_admin=open_port and settings.is_local)
