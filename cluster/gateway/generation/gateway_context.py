"""GatewayContext: what all requests of one gateway share. Built once (wiring.py). Its two limits are replaced later
(app/live_settings.py); else nothing changes, except inside the objects it points to."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.gateway.generation.dispatch import Dispatch
from tandem.cluster.gateway.generation.quarantine import Quarantine
from tandem.cluster.gateway.http.draining import Draining
from tandem.cluster.gateway.http.gateway_metrics import Alone, GatewayMetrics, Peers
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.records.request_log import AccessLog
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.gateway.tracing.tracing import Tracing
from tandem.cluster.tenants.billing_record import Ledger
from tandem.cluster.tenants.tenant_admission import Tenancy
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tandem.workers.messages.request import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class GatewayTimes:
    """Seconds."""

    keep_alive_s: float = 15.0  # silence before an SSE comment
    early_keep_alive: bool = False  # also before the first event, so that the headers go out with it
    stuck_send_s: float = 60.0  # for a client that does not read
    drain_s: float = 5.0  # for an aborted request's last delta
    usage_s: float = 1.0  # for the counts after a stop string
    unload_s: float = 600.0  # for the last request of an adapter


FindOverlaps = Callable[[GenerationRequest], Awaitable[Mapping[str, tuple[int, int]]]]


async def no_overlaps(request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
    """Finds nothing."""
    return {}


@dataclass(kw_only=True)
class GatewayContext:
    """See the module."""

    dispatch: Dispatch
    tenancy: Tenancy
    ledger: Ledger
    metrics: GatewayMetrics
    quarantine: Quarantine
    # memory of an answer that is not streamed
    max_answer_bytes: int
    # until a request's first step; None: without a group as long as dispatch says, in a queue for ever
    queue_timeout_s: float | None
    tasks: TaskOwner = field(default_factory=TaskOwner)
    draining: Draining = field(default_factory=Draining)
    times: GatewayTimes = GatewayTimes()
    peers: Peers = field(default_factory=Alone)
    # None when none are served
    adapters: AdapterService | None = None
    # where clients may load adapters from
    adapter_roots: tuple[str, ...] = ()
    # how far a suspect must come to be none
    probation_tokens: int = PROBATION_TOKENS
    access_log: AccessLog = field(default_factory=AccessLog)
    records: RequestRecords = field(default_factory=RequestRecords)
    # what groups have of a request's prompt, as in its RouteHint
    find_overlaps: FindOverlaps = no_overlaps
    # None when there are no traces
    tracing: Tracing | None = None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
