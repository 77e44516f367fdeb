"""Everything the gateway's routes share, built once: settings, text tools, backend, auth, ledger, metrics.

`make_state` fills in what follows from the rest; tests and cluster/gateway/wiring.py call it. Nothing here changes
later, except inside the objects it points to (tasks, metrics).
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.running import RunningAdapters
from tandem.cluster.gateway.generation.backend import Backend
from tandem.cluster.gateway.http.auth import Authenticator, StaticKeys
from tandem.cluster.gateway.http.draining import Draining
from tandem.cluster.gateway.http.gateway_metrics import Alone, GatewayMetrics, Peers, Scrapes
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.cluster.tenants.billing_record import Ledger, NoLedger
from tandem.cluster.tenants.tenant_admin import NoTenantAdmin, TenantAdmin
from tandem.cluster.tenants.tenant_admission import OpenTenancy, Tenancy
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, kw_only=True)
class GatewayTimes:
    """Seconds. keep_alive: silence before an SSE comment; stuck_send: a client that does not read; drain: an aborted
    request's last delta; usage: the counts after a stop string; unload: the last request of an adapter."""

    keep_alive_s: float = 15.0
    stuck_send_s: float = 60.0
    drain_s: float = 5.0
    usage_s: float = 1.0
    unload_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class GatewayState:
    """Shared by all routes of one app. adapters: None when none are served; adapter_roots: where clients may load
    from."""

    settings: GatewaySettings
    model_names: tuple[str, ...]
    tokenizer: ModelTokenizer
    detokenizers: DetokenizerFactory
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    backend: Backend
    auth: Authenticator
    tenancy: Tenancy
    tenants: TenantAdmin
    ledger: Ledger
    registry: CollectorRegistry
    metrics: GatewayMetrics
    tasks: TaskOwner
    text: TextWorkers
    draining: Draining
    times: GatewayTimes
    extra_stop_token_ids: tuple[int, ...]
    fingerprint: str
    created_s: int
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    random_seed: Callable[[], int]
    adapters: AdapterService | None
    adapter_roots: tuple[str, ...]
    running_adapters: RunningAdapters
    peers: Peers
    scrapes: Scrapes


def make_state(
    *,
    settings: GatewaySettings,
    model_names: tuple[str, ...],
    tokenizer: ModelTokenizer,
    chat_template: ChatTemplate | None,
    max_model_len: int,
    vocab_size: int,
    backend: Backend,
    engine_eos_token_ids: frozenset[int] | None = None,
    auth: Authenticator | None = None,
    tenancy: Tenancy | None = None,
    tenants: TenantAdmin | None = None,
    ledger: Ledger | None = None,
    registry: CollectorRegistry | None = None,
    times: GatewayTimes | None = None,
    fingerprint: str = "tandem",
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    random_seed: Callable[[], int] = lambda: secrets.randbits(63),
    adapters: AdapterService | None = None,
    adapter_roots: tuple[str, ...] = (),
    peers: Peers | None = None,
) -> GatewayState:
    """A GatewayState. engine_eos_token_ids: what the engine stops at by itself; the tokenizer's other EOS ids are sent
    with each request as stop ids (None: the engine has them all)."""
    assert model_names, "a service has a model name"
    registry = registry if registry is not None else CollectorRegistry()
    known = tokenizer.eos_token_ids if engine_eos_token_ids is None else engine_eos_token_ids
    metrics = GatewayMetrics(registry, settings.metrics_prefix, model_names[0])
    return GatewayState(
        settings=settings,
        model_names=model_names,
        tokenizer=tokenizer,
        detokenizers=DetokenizerFactory(tokenizer),
        chat_template=chat_template,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        backend=backend,
        auth=auth if auth is not None else StaticKeys(settings.api_keys, settings.admin_keys, settings.metrics_keys),
        tenancy=tenancy if tenancy is not None else OpenTenancy(),
        tenants=tenants if tenants is not None else NoTenantAdmin(),
        ledger=ledger if ledger is not None else NoLedger(),
        registry=registry,
        metrics=metrics,
        tasks=TaskOwner(),
        text=TextWorkers(meter=metrics),
        draining=Draining(),
        times=times if times is not None else GatewayTimes(),
        extra_stop_token_ids=tuple(sorted(tokenizer.eos_token_ids - known)),
        fingerprint=fingerprint,
        created_s=int(wall_clock()),
        clock=clock,
        wall_clock=wall_clock,
        random_seed=random_seed,
        adapters=adapters,
        adapter_roots=adapter_roots,
        running_adapters=adapters.running if adapters is not None else RunningAdapters(),
        peers=peers if peers is not None else Alone(),
        scrapes=Scrapes(),
    )
