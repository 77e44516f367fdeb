"""Two gateways on one port: work, counts and limits are shared, one that dies takes only its own clients with it. The
port has TLS, secrets come by reference, and none of them is in any line that the service logs.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.gateway.http.tls import client_context
from tests.support.certificates import Authority, Issued
from tests.support.doors import ADMIN as ROOT
from tests.support.doors import API, METRICS, PASSWORD, SENT, ask_with_keys, assert_unsaid, bearer
from tests.support.otlp_receiver import Receiver, over_http
from tests.support.plain_http import plain_http
from tests.support.private_redis import private_redis
from tests.support.service import BIN, Service, free_port, wait_for
from tests.support.verbs import run_verb_of

pytestmark = pytest.mark.cluster
ADMIN = bearer(ROOT)
ASKED = {"model": "demo", "prompt": "The sun", "temperature": 0, "ignore_eos": True}
TITLE = "ray::ServeReplica:tandem:tandem-gateway"


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Receiver, str]]:
    """A collector of traces, and its endpoint."""
    with over_http() as collector:
        yield collector


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return Authority(tmp_path_factory.mktemp("authority")).issue("tandem.example")


@pytest.fixture(scope="module")
def api_keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag's value."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{API}\n")
    return f"file:{file}"


@pytest.fixture(scope="module")
def service(collector: tuple[Receiver, str], issued: Issued, api_keys: str) -> Iterator[Service]:
    """Its Redis has a password."""
    arguments = ("--device", "cpu", "--api-server-count", "2", "--shutdown-timeout", "60")
    patient = ("--redis-timeout-ms", "5000")  # whoever gives Redis up goes on with its own part of the limits
    traces = ("--otlp-traces-endpoint", collector[1])
    doors = ("--ssl-certfile", issued.certfile, "--ssl-keyfile", issued.keyfile, "--redis-url", "env:REDIS_AT")
    keys = ("--api-key", api_keys, "--admin-api-key", "env:ROOT", "--metrics-api-key", "env:SCRAPE")
    lines = ("--enable-log-requests", "--log-level", "debug")
    env = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_TRACES_SAMPLER": "parentbased_always_off", "no_proxy": "127.0.0.1"}
    with private_redis(("127.0.0.1", free_port(), PASSWORD)) as redis:
        env |= {"REDIS_AT": redis.url, "ROOT": ROOT, "SCRAPE": METRICS}
        port = free_port()
        flags = (*arguments, *patient, *traces, *doors, *keys, *lines, "--port", str(port))
        running = Service([str(BIN / "tandem"), "serve", "demo", *flags], port, env=env)
        running.url = f"https://127.0.0.1:{port}"
        try:
            running.wait_ready()
            wait_for(lambda: f"on {running.url}/v1" in running.output, 60, "both are ready")
            yield running
        finally:
            running.clean()


def gateway_of(service: Service, response: httpx.Response) -> int:
    """The pid of the gateway at the other end."""
    _, port = response.extensions["network_stream"].get_extra_info("client_addr")[:2]
    for gateway in service.titled(TITLE):
        with suppress(psutil.NoSuchProcess):
            if any(c.raddr and c.raddr.port == port for c in gateway.net_connections("tcp")):
                return int(gateway.pid)
    raise AssertionError("no gateway has this connection")


@contextmanager
def stream_on_each(service: Service, headers: dict[str, str], **body: int) -> Iterator[dict[int, httpx.Response]]:
    """A stream on each of two gateways, by their pids; the kernel deals connections out at random."""
    found: dict[int, httpx.Response] = {}
    asked = {**ASKED, **body, "stream": True, "stream_options": {"include_usage": True}}
    with ExitStack() as kept:
        for _ in range(64):
            with ExitStack() as stack:
                opening = plain_http.stream(
                    "POST", service.url + "/v1/completions", json=asked, headers=headers, timeout=60
                )
                response = stack.enter_context(opening)
                assert response.status_code == 200
                if found.setdefault(gateway_of(service, response), response) is response:
                    kept.push(stack.pop_all())
            if len(found) == 2:
                yield found
                return
    raise AssertionError(f"64 connections went to {len(found)} gateway(s)")


def usage_of(stream: httpx.Response) -> int:
    *_, last, done = [line for line in stream.iter_lines() if line]
    assert done == "data: [DONE]"
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


def answered(service: Service) -> dict[str, float]:
    """Whole answers by gateway, as whichever gateway is asked tells."""
    families = list(text_string_to_metric_families(service.get("/metrics", headers=ADMIN).text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "each family stands once"
    (requests,) = [family for family in families if family.name == "tandem:http_requests"]
    return {
        sample.labels["gateway"]: sample.value
        for sample in requests.samples
        if sample.name.endswith("_total") and sample.labels["route"] == "/v1/completions"
    }


def test_any_gateway_speaks_for_all(service: Service) -> None:
    for _ in range(24):
        assert service.post("/v1/completions", {**ASKED, "max_tokens": 1}, headers=ADMIN).status_code == 200

    def all_are_told() -> bool:
        """By whichever is asked: eight connections go to both, most likely."""
        told = [answered(service) for _ in range(8)]
        return all(len(counts) == 2 and sum(counts.values()) == 24 for counts in told)

    wait_for(all_are_told, 60, "both have read the other's record")
    with stream_on_each(service, ADMIN, max_tokens=1500, n=16):
        wait_for(lambda: service.get("/load").json()["http_requests_in_hand"] >= 2, 60, "the other's record")
        shown = run_verb_of(service.temp, "status", "--url", service.url).stdout
        assert {line.split()[-1] for line in shown.splitlines() if line.startswith("  gateway ")} == {
            str(gateway.pid) for gateway in service.titled(TITLE)
        }


def test_every_door_asks_for_its_key_and_no_secret_is_said(service: Service, issued: Issued, api_keys: str) -> None:
    context = client_context(Path(issued.certfile).read_text())
    with httpx.Client(base_url=service.url, verify=context, timeout=60) as client:
        ask_with_keys(client)
    shown = run_verb_of(service.temp, "status")
    assert service.url in shown.stdout, shown
    for url in ((), ("--url", f"https://localhost:{service.port}")):
        done = run_verb_of(service.temp, "complete", "Once", *url, "--max-tokens", "4", "--api-key", api_keys)
        assert done.returncode == 0 and done.stdout.strip(), done
    assert_unsaid(service, (API, ROOT, METRICS, SENT, PASSWORD))
    asked = "".join(text for name, text in service.log_files().items() if name.startswith("requests-"))
    assert "code=invalid_api_key" in asked and '"GET /metrics HTTP/1.1" 401' in asked
    commands = [" ".join(process.cmdline()) for process in service.descendants()]
    assert not [line for line in commands if API in line or ROOT in line or PASSWORD in line]


def test_any_gateway_explains_a_request(service: Service) -> None:
    """It knows its own at once, and asks the other for one that it has not had."""
    sent = {**ADMIN, "x-request-id": "slow-one"}
    answer = service.post("/v1/completions", {**ASKED, "max_tokens": 8}, headers=sent)
    assert answer.status_code == 200

    def asked_of_both() -> list[httpx.Response]:
        """Most likely. The client has its answer a moment before there is a record."""
        answers = [service.get("/admin/requests/slow-one", headers=ADMIN) for _ in range(8)]
        return answers if {one.status_code for one in answers} == {200} else []

    asked = wait_for(asked_of_both, 30, "both find it")
    (attempt,) = asked[0].json()["prompts"][0]["attempts"]
    assert attempt["group"] and attempt["begun_s"] >= attempt["sent_s"]
    shown = run_verb_of(service.temp, "explain", "slow-one", "--url", service.url, "--api-key", ROOT)
    assert shown.returncode == 0, shown
    for words in ("request slow-one: length after", "until a group was there", "decode: 8 tokens", "most of it: "):
        assert words in shown.stdout, shown.stdout
    assert service.get("/admin/requests/other", headers=ADMIN).status_code == 404


def test_a_trace_goes_from_the_client_to_the_steps(service: Service, collector: tuple[Receiver, str]) -> None:
    """The client's word on sampling counts; without one, the variable's: none."""
    trace, client = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    asked = {**ASKED, "max_tokens": 8, "stream": True}
    for name, headers in (("untraced", {}), ("traced", {"traceparent": f"00-{trace}-{client}-01"})):
        answer = service.post("/v1/completions", asked, headers={**ADMIN, **headers, "x-request-id": name})
        assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    spans = {span.name: span for span in collector[0].wait_for(7, "traced")}
    assert spans.keys() == {"llm_request", "prepare", "limits", "attempt", "queue", "prefill", "decode"}
    root, attempt = spans["llm_request"], spans["attempt"]
    assert (root.trace_id, root.parent_id) == (trace, client)
    assert root.attributes["gen_ai.usage.completion_tokens"] == 8
    assert spans["decode"].attributes["tandem.steps"] >= 7 and attempt.attributes["tandem.group"]
    assert root.begin_s <= attempt.begin_s <= spans["decode"].end_s <= root.end_s + 0.5
    shown = run_verb_of(service.temp, "explain", "traced", "--url", service.url, "--api-key", ROOT)
    assert f"trace {trace}" in shown.stdout, shown
    assert not [span for span in collector[0].spans if span.trace_id != trace]


def wait_until_known(service: Service, headers: dict[str, str]) -> None:
    def known() -> bool:
        return all(
            [service.get("/v1/models", headers=sent).status_code for sent in ({}, headers)] == [401, 200]
            for _ in range(12)  # to both of them, most likely
        )

    wait_for(known, 60, "the key is known to both")


def listening(service: Service) -> list[psutil.Process]:
    """The gateways that take connections; a new one takes a while until it does."""
    found = []
    for gateway in service.titled(TITLE):
        with suppress(psutil.NoSuchProcess):
            sockets = gateway.net_connections("tcp")
            if any(s.status == psutil.CONN_LISTEN and s.laddr.port == service.port for s in sockets):
                found.append(gateway)
    return found


def test_a_limit_is_one_limit(service: Service) -> None:
    tenant = {"name": "small", "requests_per_minute": 5}
    key = service.post("/admin/tenants", tenant, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}"}

    wait_until_known(service, headers)
    statuses = [
        service.post("/v1/completions", {**ASKED, "max_tokens": 1}, headers=headers).status_code for _ in range(16)
    ]
    assert statuses.count(200) in (5, 6), "the minute gives one back every 12 s"
    assert statuses.count(429) == 16 - statuses.count(200)


def streamed_in_the_background(service: Service, gateway: int, headers: dict[str, str]) -> str:
    """The id of a response that this gateway makes, whose client has left."""
    asked = {"model": "demo", "input": "The sun", "ignore_eos": True, "max_output_tokens": 1000}
    for _ in range(64):
        body = {**asked, "background": True, "stream": True}
        with plain_http.stream("POST", service.url + "/v1/responses", json=body, headers=headers, timeout=60) as stream:
            assert stream.status_code == 200, stream.read()
            found = gateway_of(service, stream)
            first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        response_id = str(json.loads(first.removeprefix("data: "))["response"]["id"])
        if found == gateway:
            return response_id
        place = f"{service.url}/v1/responses/{response_id}"
        assert plain_http.request("DELETE", place, headers=headers, timeout=60).status_code == 200
    raise AssertionError("64 connections went to the other one")


def test_one_that_dies_takes_only_its_own_clients_with_it(service: Service) -> None:
    key = service.post("/admin/tenants", {"name": "frail"}, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}"}
    wait_until_known(service, headers)
    with stream_on_each(service, headers, max_tokens=1000, n=8) as streams:
        (dying, cut), (_, whole) = streams.items()
        background = streamed_in_the_background(service, dying, headers)
        psutil.Process(dying).kill()
        with pytest.raises(httpx.HTTPError):
            cut.read()
        assert usage_of(whole) == 8000
    for _ in range(8):
        answer = service.post("/v1/completions", {**ASKED, "max_tokens": 1}, headers=ADMIN)
        assert answer.status_code == 200, "nobody is sent to the dead one"

    place = f"{service.url}/v1/responses/{background}?stream=true"
    text = plain_http.get(place, headers=headers, timeout=90).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed"), "half a minute later"

    def bill() -> set[str]:
        asked = ("usage", "--url", service.url, "--tenant", "frail", "--format", "json")
        rows = run_verb_of(service.temp, *asked).stdout
        return {row["terminal"] for row in map(json.loads, rows.splitlines())}

    wait_for(lambda: bill() - {"abort"} == {"client_lost", "length"}, 45, "a row for each")
    wait_for(lambda: len(listening(service)) == 2, 60, "another one")


def test_the_end_waits_for_both(service: Service) -> None:
    wait_for(lambda: len(listening(service)) == 2, 60, "both are here")
    with stream_on_each(service, ADMIN, max_tokens=500, n=16) as streams:
        service.interrupt()
        assert [usage_of(stream) for stream in streams.values()] == [8000, 8000]
    assert service.process.wait(30) == 0, service.output
    assert any("ends, as its coordinator asked" in text for text in service.log_files().values())
    assert_unsaid(service, (API, ROOT, METRICS, SENT, PASSWORD))
    service.check_gone()
