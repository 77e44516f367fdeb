"""The gateway of a service: what its routes use, from the service's settings.

Called by the gateway deployment and by `tandem run-batch`. Reads the model folder's tokenizer, template and config;
loads no weights and no torch.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.sources import roots_of
from tandem.cluster.gateway.app.model_text import read_model_text
from tandem.cluster.gateway.generation.dispatch import Dispatch
from tandem.cluster.gateway.generation.gateway_context import (
    FindOverlaps,
    GatewayContext,
    GatewayTimes,
    no_overlaps,
)
from tandem.cluster.gateway.generation.quarantine import Quarantine
from tandem.cluster.gateway.http.auth import KnownKeys, StaticKeys, TenantKeys
from tandem.cluster.gateway.http.gateway_metrics import Alone, GatewayMetrics, Peers
from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.cluster.gateway.records.request_log import AccessLog
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.text_services import TextServices, extra_stop_token_ids
from tandem.cluster.gateway.tracing.tracing import Tracing
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.configs.schema import GatewaySettings, ServiceSettings
from tandem.workers.build import resolve_max_model_len
from tandem.workers.engine.waiting.probation import probation_tokens
from tandem.workers.planning.resolve import pooling_facts
from tandem.workers.text.detokenizer import DetokenizerFactory

log = logging.getLogger("tandem.gateway")


def build_metrics(settings: ServiceSettings, tenants: TenantService | None = None) -> GatewayMetrics:
    """The metrics of one gateway, in a registry of their own. tenants: None when there is no Redis to hold any."""
    registry, name = CollectorRegistry(), model_names(settings)[0]
    if tenants is None:
        return GatewayMetrics(registry, settings.gateway.metrics_prefix, name)
    directory = tenants.directory
    return GatewayMetrics(registry, settings.gateway.metrics_prefix, name, known=lambda: directory.tenants)


def build_text_services(settings: ServiceSettings, metrics: GatewayMetrics) -> TextServices:
    """Text in and out of the service's model. settings: this machine's, whose model is a folder. SettingsError when the
    folder lacks what a gateway needs."""
    model = settings.engine.model
    text = read_model_text(settings)
    for note in text.notes():
        log.info(note)
    return TextServices(
        settings=_with_logprobs(settings.gateway, text.spec.vocab_size),
        model_names=model_names(settings),
        tokenizer=text.tokenizer,
        detokenizers=DetokenizerFactory(text.tokenizer),
        chat_template=text.template,
        tool_format=text.formats.tool,
        reasoning_format=text.formats.reasoning,
        judge=text.judge,
        max_model_len=resolve_max_model_len(settings.engine, text.spec),
        vocab_size=text.spec.vocab_size,
        extra_stop_token_ids=extra_stop_token_ids(text.tokenizer, frozenset(text.eos_token_ids)),
        pooling=pooling_facts(settings.engine),
        workers=TextWorkers(meter=metrics),
        max_drafts=settings.engine.max_drafts,
        batching_policy=settings.engine.scheduler.batching_policy,
        fingerprint=f"tandem-{model.revision or Path(model.model).name}"[:64],
    )


def use_settings(settings: GatewaySettings, text: TextServices, context: GatewayContext) -> None:
    """Puts other settings in the place of those that requests are read with (live_settings.LIVE); those that run keep
    what they were read with."""
    text.settings = _with_logprobs(settings, text.vocab_size)
    context.queue_timeout_s = settings.queue_timeout_s
    context.max_answer_bytes = settings.max_answer_bytes


def _with_logprobs(settings: GatewaySettings, vocab_size: int) -> GatewaySettings:
    """Return the settings with the vocabulary's size for a max_logprobs of -1."""
    return replace(settings, max_logprobs=vocab_size) if settings.max_logprobs == -1 else settings


def build_accounts(settings: GatewaySettings, tenants: TenantService | None = None, *, open_port: bool) -> Accounts:
    """tenants: None when there is no Redis to hold any. open_port: the gateway listens itself, at the settings'
    address; else Serve's proxy does."""
    if tenants is None:
        return Accounts(auth=static_keys(settings))
    return Accounts(
        auth=tenant_keys(settings, tenants.directory, open_port=open_port),
        tenancy=tenants.quota,
        tenants=tenants.admin,
        ledger=tenants.ledger,
    )


def build_context(
    settings: ServiceSettings,
    dispatch: Dispatch,
    accounts: Accounts,
    metrics: GatewayMetrics,
    *,
    adapters: AdapterService | None = None,
    peers: Peers | None = None,
    quarantined: Callable[[], Iterable[str]] = lambda: (),
    access_log: AccessLog | None = None,
    records: RequestRecords | None = None,
    tracing: Tracing | None = None,
    find_overlaps: FindOverlaps = no_overlaps,
) -> GatewayContext:
    """peers: None for a service with one gateway. quarantined: digests of prompts that other gateways have in
    quarantine."""
    return GatewayContext(
        dispatch=dispatch,
        tenancy=accounts.tenancy,
        ledger=accounts.ledger,
        metrics=metrics,
        quarantine=Quarantine(time.monotonic, quarantined),
        max_answer_bytes=settings.gateway.max_answer_bytes,
        queue_timeout_s=settings.gateway.queue_timeout_s,
        times=_times(settings.gateway.sse_keep_alive_s),
        peers=peers if peers is not None else Alone(),
        adapters=adapters,
        adapter_roots=roots_of(settings.adapters),
        probation_tokens=probation_tokens(settings.engine.max_drafts),
        access_log=access_log if access_log is not None else AccessLog(),
        records=records if records is not None else RequestRecords(),
        tracing=tracing,
        find_overlaps=find_overlaps,
    )


def _times(keep_alive_s: float | None) -> GatewayTimes:
    """keep_alive_s: of --sse-keep-alive-interval, None if it was not given."""
    return GatewayTimes() if keep_alive_s is None else GatewayTimes(keep_alive_s=keep_alive_s, early_keep_alive=True)


def model_names(settings: ServiceSettings) -> tuple[str, ...]:
    """The names of the base model; answers and metrics bear the first."""
    return settings.engine.model.served_model_name or (Path(settings.engine.model.model).name,)


def static_keys(settings: GatewaySettings) -> StaticKeys:
    """The keys that the settings give."""
    return StaticKeys(settings.api_keys, settings.admin_keys, settings.metrics_keys)


def tenant_keys(settings: GatewaySettings, tenants: KnownKeys, *, open_port: bool) -> TenantKeys:
    """The authenticator. Admin routes are open only where the API is and the gateway itself listens on loopback."""
    may_be_open = settings.is_open(listens_itself=open_port)
    return TenantKeys(
        static_keys(settings), tenants, may_be_open=may_be_open, open_admin=open_port and settings.is_local
    )
