"""Tracing: spans of requests, sent to a collector over OTLP (--otlp-traces-endpoint).

A request's place in its trace is known when it comes: of the client's traceparent, with a span id of its own, and
whether it is sampled. Groups get it with the request. The spans are made of the request's record when it has ended, and
go out in batches on a thread of OpenTelemetry's. Sampling, headers, certificates and batches are set by OpenTelemetry's
own variables, OTEL_*; see docs/serving/traces.md. All of it is imported here, once traces are on.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tandem.cluster.gateway.records.request_record import RequestRecord
from tandem.cluster.gateway.records.request_records import Export
from tandem.cluster.gateway.records.trace_context import TraceContext
from tandem.cluster.gateway.tracing.span_plan import ROOT, SpanPlan, span_plan
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("tandem.gateway")
FLAG = "--otlp-traces-endpoint"
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Modules of the exporters, by protocol."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""Variables that name the protocol, the first one counts most."""
HTTP_PATH = "/v1/traces"
NS = 1_000_000_000


def protocol_of(endpoint: str) -> str:
    """Returns the protocol for an endpoint: of the variables, else http/protobuf for a URL with OTLP's path, else grpc,
    as in vLLM. SettingsError for one that there is not."""
    given = next((value for name in PROTOCOLS if (value := os.environ.get(name))), None)
    protocol = given or ("http/protobuf" if endpoint.rstrip("/").endswith(HTTP_PATH) else "grpc")
    if protocol not in EXPORTERS:
        raise SettingsError(f"{PROTOCOLS[0]} is {protocol!r}, not {' or '.join(EXPORTERS)}", FLAG)
    return protocol


def check_tracing(endpoint: str | None) -> None:
    """SettingsError when traces are asked for and the packages for them are not installed here."""
    if endpoint is None:
        return
    module = EXPORTERS[protocol_of(endpoint)]
    with suppress(ModuleNotFoundError):
        if find_spec(module) is not None:
            return
    raise SettingsError(
        f"{module} is not installed: pip install 'tandem-serve[traces]' where gateways run, or leave the flag out", FLAG
    )


class Tracing:
    """The traces of one gateway. One event loop."""

    def __init__(self, provider: "TracerProvider", ids: "ChosenIds") -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanKind, get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("tandem")
        self._read, self._span_in, self._empty = TraceContextTextMapPropagator().extract, get_current_span, Context()
        self._server, self._sampled = SpanKind.SERVER, Decision.RECORD_AND_SAMPLE

    def begin(self, headers: Mapping[str, str]) -> TraceContext:
        """Returns the place of a request that has come: in the client's trace, if it names one, and else in a new
        one."""
        if "traceparent" not in headers:
            trace_id = _random_id(128)
            return TraceContext(trace_id, _random_id(64), self._is_sampled(self._empty, trace_id))
        context = self._read({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        client = self._span_in(context).get_span_context()
        trace_id = client.trace_id if client.is_valid else _random_id(128)
        return TraceContext(
            trace_id=trace_id,
            span_id=_random_id(64),
            is_sampled=self._is_sampled(context, trace_id),
            parent_id=client.span_id if client.is_valid else None,
            state=client.trace_state.to_header() if client.is_valid else "",
        )

    def _is_sampled(self, context: "Context", trace_id: int) -> bool:
        sampled = self._provider.sampler.should_sample(context, trace_id, ROOT, self._server)
        return sampled.decision is self._sampled

    def export(self, record: RequestRecord, trace: TraceContext) -> None:
        """Hands the spans of a request that has ended to the thread that sends them, if it is sampled. Never waits."""
        if not trace.is_sampled:
            return
        try:
            self._make(span_plan(record), _parent_of(trace), record.time_s, trace)
        except Exception:
            log.exception("the spans of request %s were not made", record.request_id)

    def close(self) -> None:
        """Sends what is left. Blocks, as long as OpenTelemetry's timeouts say."""
        self._provider.shutdown()

    def _make(self, plan: SpanPlan, parent: Any, time_s: float, root: TraceContext | None = None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._ids.root = root
        span = self._tracer.start_span(
            plan.name,
            context=parent,
            kind=SpanKind.INTERNAL if root is None else SpanKind.SERVER,
            attributes=plan.attributes,
            start_time=int((time_s + plan.begin_s) * NS),
        )
        self._ids.root = None
        if plan.error is not None:
            span.set_status(Status(StatusCode.ERROR, plan.error))
        inside = set_span_in_context(span)
        for each in plan.inside:
            self._make(each, inside, time_s)
        span.end(end_time=int((time_s + max(plan.begin_s, plan.end_s)) * NS))


class ChosenIds:
    """An IdGenerator of OpenTelemetry. root: the place whose ids the next span has; None: new ones."""

    root: TraceContext | None = None

    def generate_span_id(self) -> int:
        return _random_id(64) if self.root is None else self.root.span_id

    def generate_trace_id(self) -> int:
        return _random_id(128) if self.root is None else self.root.trace_id

    def is_trace_id_random(self) -> bool:
        """True, as all bits of the ids are."""
        return True


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1


def _parent_of(trace: TraceContext) -> Any:
    """The client's span as the context of ours; an empty context where there is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if trace.parent_id is None:
        return Context()
    state = TraceState.from_header([trace.state]) if trace.state else None
    flags = TraceFlags(TraceFlags.SAMPLED)
    client = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags, trace_state=state)
    return set_span_in_context(NonRecordingSpan(client), Context())


def open_tracing(endpoint: str | None, gateway: str) -> Tracing | None:
    """Opens the traces of a gateway; None for no endpoint. SettingsError when the packages are not installed, or the
    endpoint is none."""
    if endpoint is None:
        return None
    check_tracing(endpoint)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.instance.id": gateway})
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "tandem"}))
    ids = ChosenIds()
    provider = TracerProvider(resource=resource, id_generator=_as_generator(ids), shutdown_on_exit=False)
    try:
        exporter = _exporter(endpoint)
    except Exception as error:
        raise SettingsError(f"{endpoint} cannot be used: {type(error).__name__}: {error}", FLAG) from error
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("traces go to %s over %s", endpoint, protocol_of(endpoint))
    return Tracing(provider, ids)


def exporting(tracing: Tracing | None) -> Export:
    """Returns what takes the records of requests with a trace."""
    return (lambda record, trace: None) if tracing is None else tracing.export


async def end_within(tracing: Tracing, limit_s: float) -> None:
    """Sends what is left, if the collector takes it in this time."""
    closing = asyncio.get_running_loop().run_in_executor(None, tracing.close)
    await asyncio.wait({closing}, timeout=limit_s)


def _as_generator(ids: ChosenIds) -> Any:
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    IdGenerator.register(ChosenIds)
    return ids


def _exporter(endpoint: str) -> Any:
    if protocol_of(endpoint) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp(endpoint=endpoint)
