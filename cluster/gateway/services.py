"""Everything the gateway's routes share, built once: settings, text tools, dispatch, auth, ledger, metrics.

`make_state` fills in what follows from the rest; tests and cluster/gateway/wiring.py call it. Nothing here changes
later, except inside the objects it points to (tasks, metrics).
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.running import RunningAdapters
from tandem.cluster.gateway.generation.dispatch import Dispatch
from tandem.cluster.gateway.generation.generations import GatewayTimes, Generations
from tandem.cluster.gateway.generation.quarantine import Quarantine
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
    dispatch: Dispatch
    generations: Generations
    quarantine: Quarantine
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
    dispatch: Dispatch,
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
    quarantined: Callable[[], Iterable[str]] = lambda: (),
) -> GatewayState:
    """A GatewayState. engine_eos_token_ids: what the engine stops at by itself; the tokenizer's other EOS ids are sent
    with each request as stop ids (None: the engine has them all). quarantined: digests that other gateways have."""
    assert model_names, "a service has a model name"
    registry = registry if registry is not None else CollectorRegistry()
    known = tokenizer.eos_token_ids if engine_eos_token_ids is None else engine_eos_token_ids
    metrics = GatewayMetrics(registry, settings.metrics_prefix, model_names[0], clock)
    tenancy = tenancy if tenancy is not None else OpenTenancy()
    ledger = ledger if ledger is not None else NoLedger()
    times = times if times is not None else GatewayTimes()
    tasks, quarantine = TaskOwner(), Quarantine(clock, quarantined)
    generations = Generations(
        dispatch=dispatch,
        tenancy=tenancy,
        ledger=ledger,
        metrics=metrics,
        tasks=tasks,
        quarantine=quarantine,
        times=times,
        max_answer_bytes=settings.max_answer_bytes,
        queue_timeout_s=settings.queue_timeout_s,
        clock=clock,
        wall_clock=wall_clock,
    )
    return GatewayState(
        settings=settings,
        model_names=model_names,
        tokenizer=tokenizer,
        detokenizers=DetokenizerFactory(tokenizer),
        chat_template=chat_template,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        dispatch=dispatch,
        generations=generations,
        quarantine=quarantine,
        auth=auth if auth is not None else StaticKeys(settings.api_keys, settings.admin_keys, settings.metrics_keys),
        tenancy=tenancy,
        tenants=tenants if tenants is not None else NoTenantAdmin(),
        ledger=ledger,
        registry=registry,
        metrics=metrics,
        tasks=tasks,
        text=TextWorkers(meter=metrics),
        draining=Draining(),
        times=times,
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
