"""Prometheus metrics of the gateways: this one's own, and those that its peers left in Redis.

Metrics of the groups come from Backend.metrics(). Route labels are our route templates, never a client's path.
"""

import asyncio
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from functools import cache, partial
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.fleet.engine_metrics import WITHOUT_TOTAL, Families
from tandem.cluster.fleet.gateway_records import GatewayRecord
from tandem.cluster.tenants.tenant import DEFAULT_TENANT
from tandem.workers.messages.request import Usage

disable_created_metrics()  # type: ignore[no-untyped-call]  # vLLM has none either, and they are a third of the series
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
OVERLAP_BUCKETS = (127, 511, 2047, 8191, 32767)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


TENANT_IDLE_S = 3600.0
"""A removed tenant for which nothing was counted for so long loses its series."""
FORGET_PERIOD_S = 60.0


class TenantCounters:
    """Counters with a tenant as their first label. Those of known tenants and of `default` stay, however idle: a series
    that goes and comes back at 1 never grows for a scraper. Those of others, which were removed, go when nothing was
    counted for TENANT_IDLE_S. Used on one event loop; a registry may be rendered on a thread meanwhile."""

    def __init__(self, clock: Callable[[], float], known: Callable[[], Container[str]]) -> None:
        self._clock = clock
        self._known = known
        self._used_s: dict[str, float] = {}
        self._series: dict[str, dict[tuple[Counter, tuple[str, ...]], Counter]] = {}
        self._forget_at_s = 0.0

    def add(self, counter: Counter, amount: float, tenant: str, *labels: str) -> None:
        """Counts, in the series of the tenant and the other labels."""
        now_s = self._clock()
        if now_s >= self._forget_at_s:
            self._forget_at_s = now_s + FORGET_PERIOD_S
            self.forget_removed()
        self._used_s.pop(tenant, None)
        self._used_s[tenant] = now_s
        series = self._series.setdefault(tenant, {})
        if (one := series.get((counter, labels))) is None:
            one = series[counter, labels] = counter.labels(tenant, *labels)
        one.inc(amount)

    def forget_removed(self) -> None:
        """Removes the series of tenants that are idle and not known any more."""
        before_s, known = self._clock() - TENANT_IDLE_S, self._known()
        for tenant, used_s in list(self._used_s.items()):  # in the order of their last use
            if used_s > before_s:
                return
            if tenant in known or tenant == DEFAULT_TENANT:
                continue
            del self._used_s[tenant]
            for counter, labels in self._series.pop(tenant):
                counter.remove(tenant, *labels)


class GatewayMetrics:
    """Counters and histograms of one gateway, in the given registry; in `tenants` those that name tenants. known: the
    names of the tenants that there are now, whose series are kept."""

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        known: Callable[[], Container[str]] = lambda: (),
    ) -> None:
        self.registry = registry
        self.tenants = CollectorRegistry()
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str, registry: CollectorRegistry = registry) -> Counter:
            return Counter(f"{prefix}:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            name = f"{prefix}:{name}_seconds"
            return Histogram(name, text, ("model_name",), buckets=buckets, registry=registry).labels(model_name)

        # each series is looked up once: prometheus_client takes a lock and checks the labels each time
        self._requests = cache(counter("http_requests", "HTTP answers by route and status.", "route", "status").labels)
        text = "Generation requests by how they ended."
        self._ended = cache(partial(counter("gateway_requests", text, "model_name", "outcome").labels, model_name))
        text = "Generation requests in this gateway."
        gauge = Gauge(f"{prefix}:gateway_requests_open", text, ("model_name",), registry=registry)
        self._open = gauge.labels(model_name)
        text = "Requests that went on with another group, as theirs was lost or ended as planned."
        self._moved = counter("request_migrations", text, "model_name").labels(model_name)
        text = "From the request's arrival to its first token, at the gateway."
        self._ttft = histogram("gateway_time_to_first_token", text, TTFT_BUCKETS)
        text = "From the request's arrival to its last byte, at the gateway."
        self._e2e = histogram("gateway_request", text, E2E_BUCKETS)
        text = "Answers of /v1/responses that were to be stored: stored, too_large or failed."
        self._responses_stored = counter("responses_stored", text, "model_name", "outcome")
        text = "Batches of /v1/batches that ended in this gateway, by how: completed, failed, expired or cancelled."
        self._batches = counter("batches", text, "model_name", "outcome")
        text = "Lines of batches that got their rows in this gateway: in the output, or among the errors."
        self._batch_lines = counter("batch_lines", text, "model_name", "file")
        text = "Lines of batches that run in this gateway."
        lines = Gauge(f"{prefix}:batch_lines_running", text, ("model_name",), registry=registry)
        self._lines_running = lines.labels(model_name)
        text = "CPU seconds of parsing, rendering and tokenizing, on threads or at once on the event loop."
        text_seconds = counter("gateway_text_seconds", text, "model_name", "place")
        self._loop_seconds, self._thread_seconds = (text_seconds.labels(model_name, at) for at in ("loop", "thread"))
        self._text_queue = histogram("gateway_text_queue", "How long text work waited for a thread.", TTFT_BUCKETS)
        text = "Prompt tokens by which a router took its group to have too many (over), or as many or too few (under)."
        name, labels = f"{prefix}:route_overlap_error_tokens", ("model_name", "direction")
        errors = Histogram(name, text, labels, buckets=OVERLAP_BUCKETS, registry=registry)
        self._overlap_over, self._overlap_under = (errors.labels(model_name, way) for way in ("over", "under"))

        self._by_tenant = TenantCounters(clock, known)
        of_tenants = partial(counter, registry=self.tenants)
        text = "CPU seconds of the gateway for tenants' text."
        self._tenant_text = of_tenants("tenant_text_seconds", text, "tenant")
        self._tenant_tokens = of_tenants("tenant_tokens", "Tokens billed to tenants, by kind.", "tenant", "kind")
        self._tenant_requests = of_tenants("tenant_requests", "Requests that tenants were billed for.", "tenant")
        self._tenant_rejections = of_tenants("tenant_rejections", "Requests of tenants refused.", "tenant", "reason")

    def http_answered(self, route: str, status: int) -> None:
        """Counts one HTTP answer; `route` is a template of ours, or "unknown"."""
        self._requests(route, status).inc()

    def generation_began(self) -> None:
        self._open.inc()

    def moved(self) -> None:
        """Counts a request that goes on with another group."""
        self._moved.inc()

    def overlap_missed(self, tokens: int) -> None:
        """Counts a prediction of the router. tokens: predicted minus found."""
        (self._overlap_over if tokens > 0 else self._overlap_under).observe(abs(tokens))

    def response_stored(self, outcome: str) -> None:
        """Counts an answer that was to be stored. outcome: stored, too_large or failed."""
        self._responses_stored.labels(self._model_name, outcome).inc()

    def batch_ended(self, outcome: str) -> None:
        """Counts a batch. outcome: its last status."""
        self._batches.labels(self._model_name, outcome).inc()

    def batch_line(self, file: str) -> None:
        """Counts a line of a batch that has its row. file: output or errors."""
        self._batch_lines.labels(self._model_name, file).inc()

    def lines_running(self, change: int) -> None:
        """Counts lines of batches that begin, and those that end."""
        self._lines_running.inc(change)

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def generation_ended(self, outcome: str, after_s: float) -> None:
        """Counts the end of a generation. `outcome` is a terminal state: stop, length, abort, error or rejected."""
        self._open.dec()
        self._ended(outcome).inc()
        self._e2e.observe(after_s)

    def text_worked(self, tenant: str, cpu_s: float, *, waited_s: float | None) -> None:
        """See text_workers.Meter. `tenant` is a known one, never a client's word."""
        (self._loop_seconds if waited_s is None else self._thread_seconds).inc(cpu_s)
        self._by_tenant.add(self._tenant_text, cpu_s, tenant)
        if waited_s is not None:
            self._text_queue.observe(waited_s)

    def tenant_billed(self, tenant: str, usage: Usage) -> None:
        """Counts an accepted request that ended. `tenant` is a known one, never a client's word."""
        self._by_tenant.add(self._tenant_requests, 1, tenant)
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._by_tenant.add(self._tenant_tokens, tokens, tenant, kind)

    def tenant_rejected(self, tenant: str, reason: str) -> None:
        """Counts a refusal. `reason` is the limit that was exceeded, or the code of another refusal."""
        self._by_tenant.add(self._tenant_rejections, 1, tenant, reason)


LABEL = "gateway"
"""Added to every sample where a service has several gateways, as `engine` names a group."""


class Peers(Protocol):
    """The other gateways of a service."""

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        """Prometheus text of all gateways. own: this gateway's text. own_of_tenants: its families that name tenants,
        empty when no gateway's are shown."""
        ...

    def in_flight(self) -> int:
        """HTTP requests that the other gateways have in flight."""
        ...


class Alone:
    """Peers of a service with one gateway."""

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        return own + own_of_tenants

    def in_flight(self) -> int:
        return 0


class Scrapes:
    """Renderings under way, which scrapes share: however many come at once, each kind is rendered once at a time."""

    def __init__(self) -> None:
        self._under_way: dict[bool, asyncio.Task[bytes]] = {}

    async def text(self, with_tenants: bool, render: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """The text of the rendering of this kind that is under way, else of a new one. A client that leaves ends it
        for nobody else."""
        task = self._under_way.get(with_tenants)
        if task is None:
            task = self._under_way[with_tenants] = asyncio.get_running_loop().create_task(render(), name="metrics")
            task.add_done_callback(lambda done: self._ended(with_tenants, done))
        return await asyncio.shield(task)

    def _ended(self, with_tenants: bool, task: "asyncio.Task[bytes]") -> None:
        del self._under_way[with_tenants]
        if not task.cancelled():
            task.exception()  # every scrape may have left


class Together:
    """Peers by their last records, up to a few seconds old. `others` is called each time."""

    def __init__(self, gateway_id: str, others: Callable[[], Sequence[GatewayRecord]]) -> None:
        self._id = gateway_id
        self._others = others

    async def merge(self, own: bytes, own_of_tenants: bytes) -> bytes:
        texts = [(self._id, own), (self._id, own_of_tenants)]
        for record in self._others():
            texts += [(record.gateway, record.metrics)]
            texts += [(record.gateway, record.tenant_metrics)] if own_of_tenants else []
        return await asyncio.to_thread(merged, [(name, text.decode()) for name, text in texts])

    def in_flight(self) -> int:
        return sum(record.in_flight for record in self._others())


def merged(texts: Iterable[tuple[str, str]]) -> bytes:
    """Merges (gateway, Prometheus text) pairs: one family for each name, each sample labelled with its gateway."""
    families: dict[str, Metric] = {}
    for name, text in texts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [sample._replace(labels=sample.labels | {LABEL: name}) for sample in found.samples]
    return generate_latest(Families(made=families.values()))


def as_open_metrics(text: bytes) -> bytes:
    """Returns Prometheus text in the form of OpenMetrics 1.0, with the same names of samples. A counter without _total
    in its name, as vLLM calls some, is of an unknown type there."""
    families: dict[str, Metric] = {}
    for found in text_string_to_metric_families(text.decode()):
        if WITHOUT_TOTAL.search(found.name):  # the parser gives every counter a _total
            found.type, found.samples = "unknown", [sample._replace(name=found.name) for sample in found.samples]
        families.setdefault(found.name, Metric(found.name, found.documentation, found.type)).samples += found.samples
    made = Families(made=families.values())
    rendered: bytes = generate_open_metrics(made, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return rendered
