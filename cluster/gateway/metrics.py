"""The gateway's own Prometheus metrics; the engines' come from Backend.metrics(). Labels: routes, statuses, reasons.

Route labels are route templates of ours, never a client's path.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from workers.messages import Usage

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class GatewayMetrics:
    """Counters and histograms of one gateway in the given registry; `tenants` has those that name tenants."""

    def __init__(self, registry: CollectorRegistry, prefix: str, model_name: str) -> None:
        self.registry = registry
        self._model_name = model_name
        self._requests = Counter(
            f"{prefix}:http_requests", "HTTP answers by route and status.", ("route", "status"), registry=registry
        )
        self._ended = Counter(
            f"{prefix}:gateway_requests",
            "Generation requests by how they ended.",
            ("model_name", "outcome"),
            registry=registry,
        )
        self._open = Gauge(
            f"{prefix}:gateway_requests_open",
            "Generation requests in this gateway.",
            ("model_name",),
            registry=registry,
        ).labels(model_name)
        self._moved = Counter(
            f"{prefix}:request_migrations",
            "Requests that went on with another group because theirs was lost.",
            ("model_name",),
            registry=registry,
        ).labels(model_name)
        self._ttft = Histogram(
            f"{prefix}:gateway_time_to_first_token_seconds",
            "From the request's arrival to its first token, at the gateway.",
            ("model_name",),
            buckets=TTFT_BUCKETS,
            registry=registry,
        ).labels(model_name)
        self._e2e = Histogram(
            f"{prefix}:gateway_request_seconds",
            "From the request's arrival to its last byte, at the gateway.",
            ("model_name",),
            buckets=E2E_BUCKETS,
            registry=registry,
        ).labels(model_name)

        self.tenants = CollectorRegistry()
        self._tenant_tokens = Counter(
            f"{prefix}:tenant_tokens", "Tokens billed to tenants, by kind.", ("tenant", "kind"), registry=self.tenants
        )
        self._tenant_requests = Counter(
            f"{prefix}:tenant_requests", "Requests that tenants were billed for.", ("tenant",), registry=self.tenants
        )
        self._tenant_rejections = Counter(
            f"{prefix}:tenant_rejections", "Requests of tenants refused.", ("tenant", "reason"), registry=self.tenants
        )

    def http_answered(self, route: str, status: int) -> None:
        """One HTTP answer; `route` is a template of ours, or "unknown"."""
        self._requests.labels(route, str(status)).inc()

    def generation_began(self) -> None:
        self._open.inc()

    def moved(self) -> None:
        """A request goes on with another group."""
        self._moved.inc()

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def generation_ended(self, outcome: str, after_s: float) -> None:
        """`outcome` is a terminal state: stop, length, abort, error or rejected."""
        self._open.dec()
        self._ended.labels(self._model_name, outcome).inc()
        self._e2e.observe(after_s)

    def tenant_billed(self, tenant: str, usage: Usage) -> None:
        """One accepted request has ended. `tenant` is one that is known, never a client's word."""
        self._tenant_requests.labels(tenant).inc()
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._tenant_tokens.labels(tenant, kind).inc(tokens)

    def tenant_rejected(self, tenant: str, reason: str) -> None:
        """`reason` is the limit that was over, or the code of another refusal."""
        self._tenant_rejections.labels(tenant, reason).inc()
