"""Traces: W3C's headers in and out, vLLM's names, spans of a record, sampling, and nothing while they are off."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.records.request_record import GroupAttempt, PromptRecord, RequestRecord
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.gateway.tracing import tracing
from tandem.cluster.gateway.tracing.span_plan import SpanPlan, span_plan
from tandem.cluster.gateway.tracing.tracing import Tracing, check_tracing, exporting, open_tracing, protocol_of
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.course import Course, Phase
from tests.support.otlp_receiver import Received, over_grpc, over_http
from tests.unit.gateway.rig import gateway

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FROM = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SAID = "the lighthouse keeper"
AWAY = "http://127.0.0.1:1/v1/traces"
COURSE = Course(
    queue_s=0.5,
    waited_s={"adapter": 0.4},
    prefill=Phase(0.25, steps=2, rows=6, tokens=900, device_s=0.2),
    decode=Phase(2.0, steps=40, rows=240, tokens=300, device_s=1.6),
    cached_tokens=16,
)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go out soon, whatever the environment says else."""
    for name in (*tracing.PROTOCOLS, "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def traced(endpoint: str) -> Iterator[Tracing]:
    opened = open_tracing(endpoint, "g1")
    assert opened is not None
    try:
        yield opened
    finally:
        opened.close()


def record(**more: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "request_id": "r1", "time_s": 1.8e9, "tenant": "acme", "model": "demo", "outcome": "stop", "duration_s": 4.0,
        "prompt_tokens": 100, "completion_tokens": 41, "cached_tokens": 16, "first_token_s": 1.5, "ready_s": 0.1,
        "admitted_s": 0.2, "num_prompts": 1, "max_tokens": 64, "temperature": 0.5, "top_p": 1.0,
    }  # fmt: skip
    attempt = GroupAttempt(group="b", sent_s=0.7, begun_s=1.25, ended_s=3.6, course=COURSE)
    prompts = [PromptRecord(prompt_tokens=100, n=2, attempts=[attempt])]
    return RequestRecord(**{**given, "prompts": prompts, **more})


def names(plan: SpanPlan) -> Any:
    return plan.name, [names(each) for each in plan.inside]


def test_the_spans_of_a_request_have_vllms_attributes() -> None:
    plan = span_plan(record())
    assert names(plan) == (
        "llm_request",
        [("prepare", []), ("limits", []), ("attempt", [("queue", []), ("prefill", []), ("decode", [])])],
    )
    expected = {
        "gen_ai.request.id": "r1",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 41,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.e2e": 4.0,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.25,
    }
    assert {name: plan.attributes.get(name) for name in expected} == expected
    _, _, attempt = plan.inside
    queue, prefill, decode = attempt.inside
    assert attempt.attributes == {"tandem.group": "b"} and (attempt.begin_s, attempt.end_s) == (0.7, 3.6)
    assert queue.attributes == {"tandem.wait.adapter_s": 0.4} and (queue.begin_s, queue.end_s) == (0.75, 1.25)
    assert (prefill.begin_s, prefill.end_s, decode.begin_s, decode.end_s) == (1.25, 1.5, 1.5, 3.5)
    assert decode.attributes["tandem.sequences_per_step"] == 6.0 and decode.attributes["tandem.steps"] == 40


def test_a_request_that_moved_and_one_that_was_refused() -> None:
    lost = GroupAttempt(group="a", sent_s=0.2, ended_s=0.5, why="suspect")
    went_on = GroupAttempt(group="b", sent_s=0.7, begun_s=1.25, ended_s=3.6, course=COURSE)
    moved = span_plan(record(prompts=[PromptRecord(prompt_tokens=100, attempts=[lost, went_on])]))
    assert [(each.name, each.error) for each in moved.inside[2:]] == [("attempt", "suspect"), ("attempt", None)]
    assert moved.error is None
    refused = span_plan(record(outcome="rejected", status=429, code="slow_down", prompts=[], admitted_s=None))
    assert refused.error == "slow_down" and [each.name for each in refused.inside] == ["prepare"]
    assert refused.attributes["http.response.status_code"] == 429
    assert span_plan(RequestRecord(request_id="r", time_s=1.0, outcome="error", duration_s=1.0)).error == "error"


def check_tree(spans: list[Received], parent: str = "") -> Received:
    """Each span but the root is inside one that has come too; returns the root."""
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "llm_request"]
    assert root.parent_id == parent and root.is_server
    inside = {
        "prepare": "llm_request", "limits": "llm_request", "attempt": "llm_request",
        "queue": "attempt", "prefill": "attempt", "decode": "attempt",
    }  # fmt: skip
    for span in spans:
        if span is not root:
            assert by_id[span.parent_id].name == inside[span.name] and not span.is_server
    return root


@pytest.mark.parametrize("over", [over_http, over_grpc])
def test_a_collector_gets_them_in_the_clients_trace(over: Any) -> None:
    with over() as (receiver, endpoint), traced(endpoint) as opened:
        trace = opened.begin({**FROM, "authorization": "Bearer sk"})
        headers = {"traceparent": f"00-{TRACE}-{trace.span_id:016x}-01", "tracestate": "vendor=1"}
        assert trace.headers() == headers
        opened.export(record(), trace)
        spans = receiver.wait_for(7, "r1")
    root = check_tree(spans, parent=SPAN)
    assert (root.trace_id, root.span_id) == (TRACE, f"{trace.span_id:016x}"), "as groups were told"
    assert (root.begin_s, root.end_s) == pytest.approx((1.8e9, 1.8e9 + 4.0))
    assert root.resource["service.name"] == "tandem" and root.resource["service.instance.id"] == "g1"


def test_sampling_is_opentelemetrys(monkeypatch: pytest.MonkeyPatch) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    with traced(AWAY) as opened:
        assert opened.begin({}).is_sampled and opened.begin(FROM).is_sampled
        quiet = opened.begin(unsampled)
        assert not quiet.is_sampled and quiet.headers()["traceparent"].endswith("-00"), "the client's word counts"
        for broken in ("", "00-x-y-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{SPAN}", "ü"):
            made = opened.begin({"traceparent": broken})
            assert made.parent_id is None and made.trace_id and made.is_sampled, broken
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    with traced(AWAY) as some:
        assert 0.2 < sum(some.begin({}).is_sampled for _ in range(4000)) / 4000 < 0.3
        assert some.begin(FROM).is_sampled and not some.begin(unsampled).is_sampled


async def test_requests_of_a_gateway_are_traced_and_groups_are_told() -> None:
    keys: dict[str, Any] = {"settings": GatewaySettings(api_keys=("sk",)), "auth": StaticKeys(("sk",), (), ())}
    with over_http() as (receiver, endpoint), traced(endpoint) as opened:
        records = RequestRecords(export=exporting(opened))
        async with gateway(records=records, tracing=opened, **keys) as rig:
            post, sent = rig.client.post, {"authorization": "Bearer sk", "x-request-id": "mine", **FROM}
            body = {"prompt": [SAID, SAID], "max_tokens": 3}
            assert (await post("/v1/completions", json=body, headers=sent)).status_code == 200
            keyless = await post("/v1/completions", content="{", headers={"x-request-id": "keyless"})
            assert keyless.status_code == 401
            assert (await rig.client.get("/v1/models", headers=sent)).status_code == 200
            await rig.settle()
            told = [request.trace_ids for request in rig.backend.requests]
            found = await records.find("mine")
        spans, (refused,) = receiver.wait_for(5, "mine"), receiver.wait_for(1, "keyless")
        assert {span.attributes.get("gen_ai.request.id") for span in receiver.spans} == {"mine", "keyless", None}
    root = check_tree(spans, parent=SPAN)
    assert [span.name for span in spans].count("attempt") == 2, "a prompt each"
    headers = {"traceparent": f"00-{TRACE}-{root.span_id}-01", "tracestate": "vendor=1"}
    assert told == [{"x-request-id": "mine", **headers}] * 2
    assert found is not None and found.trace_id == TRACE
    assert refused.error == "invalid_api_key" and refused.parent_id == "" and refused.trace_id != TRACE
    assert SAID not in repr(receiver.spans) and "Bearer" not in repr(receiver.spans)


async def test_spans_that_cannot_be_made_cost_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(SAID)

    monkeypatch.setattr(tracing, "span_plan", fail)
    with traced(AWAY) as opened:
        async with gateway(records=RequestRecords(export=exporting(opened)), tracing=opened) as rig:
            assert (await rig.complete(max_tokens=2)).status_code == 200


def test_off_imports_nothing() -> None:
    """Ray itself imports OpenTelemetry for its metrics, and Serve the spans of its own; neither has an exporter."""
    assert open_tracing(None, "g") is None
    check_tracing(None)
    code = (
        "import sys\n"
        "from tandem.cluster.gateway.app import routes\n"
        "from tandem.cluster.gateway.tracing import tracing\n"
        "tracing.open_tracing(None, 'g')\n"
        "assert 'opentelemetry.exporter' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracing.EXPORTERS, "grpc", "opentelemetry.exporter.nothing.of_the_kind")
    for attempt in (check_tracing, lambda endpoint: open_tracing(endpoint, "g")):
        with pytest.raises(SettingsError, match=r"pip install 'tandem-serve\[traces\]'") as refused:
            attempt("http://localhost:4317")
        assert refused.value.flag == "--otlp-traces-endpoint"
    check_tracing("http://localhost:4318/v1/traces")


def test_the_protocol_is_of_the_variables_or_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    assert protocol_of("http://localhost:4317") == protocol_of("localhost:4317") == "grpc"
    assert protocol_of("http://localhost:4318/v1/traces") == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert protocol_of("http://localhost:4317") == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert protocol_of("http://localhost:4318/v1/traces") == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(SettingsError, match="http/json"):
        check_tracing("http://localhost:4317")
