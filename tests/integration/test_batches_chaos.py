"""Batches of a real service through what ends their gateways, groups and services, files of hundreds of MiB, and a
request with a key whose gateway dies."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import NotFoundError, OpenAI

from tests.support.plain_http import plain_http
from tests.support.private_redis import private_redis
from tests.support.service import Service, tandem_serve, wait_for
from tests.support.verbs import run_verb_of

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
ADMIN = {"authorization": "Bearer root"}
TITLE = "ray::ServeReplica:tandem:tandem-gateway"
LINES, TOKENS = 300, 300
FILE_MIB = 384
GROWTH_MIB = 128
"""Most memory that gateways may gain while such a file comes and goes."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    arguments = (
        "--device",
        "cpu",
        "-dp",
        "2",
        "--api-server-count",
        "2",
        "--admin-api-key",
        "root",
        "--max-num-seqs",
        "8",
    )
    with tandem_serve("demo", *arguments, "--redis-timeout-ms", "5000") as running:
        wait_for(lambda: "serving demo" in running.output, 60, "both are ready")
        yield running


def client_of(service: Service, tenant: str) -> OpenAI:
    key = service.post("/admin/tenants", {"name": tenant}, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}"}
    wait_for(lambda: all(service.get("/v1/models", headers=headers).status_code == 200 for _ in range(12)), 60, "known")
    return OpenAI(base_url=service.url + "/v1", api_key=key, max_retries=5)


def lines(count: int = LINES, tokens: int = TOKENS) -> bytes:
    body = {"model": "demo", "prompt": "The sun", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    asked: dict[str, Any] = {"method": "POST", "url": "/v1/completions", "body": body}
    return "\n".join(json.dumps({"custom_id": f"line-{n}", **asked}) for n in range(count)).encode()


def begin(client: OpenAI, content: bytes) -> str:
    given = client.files.create(file=("in.jsonl", content), purpose="batch")
    asked: Any = {"input_file_id": given.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.batches.create(**asked).id


def answered(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def rows_of(client: OpenAI, batch_id: str, within_s: float = 240) -> list[dict[str, Any]]:
    """The rows of the output, once the batch is completed and has no errors."""
    wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", within_s, "the batch is over", 0.5)
    batch = client.batches.retrieve(batch_id)
    assert batch.output_file_id is not None and batch.error_file_id is None, batch
    return list(map(json.loads, client.files.content(batch.output_file_id).text.splitlines()))


def bills(service: Service, tenant: str) -> Counter[int]:
    """How many rows of the ledger have so many output tokens."""
    asked = ("usage", "--url", service.url, "--tenant", tenant, "--format", "json")
    rows = run_verb_of(service.temp, *asked).stdout.splitlines()
    return Counter(json.loads(row)["completion_tokens"] for row in rows)


def pids(service: Service) -> dict[str, int]:
    """The gateways by their names."""
    shown = run_verb_of(service.temp, "status", "--url", service.url).stdout
    return {name: int(pid) for name, pid in re.findall(r"^  gateway (\S+) .*pid (\d+)", shown, re.MULTILINE)}


def runner(service: Service, named: dict[str, int]) -> int:
    """The pid of the gateway that runs lines, 0 where none does."""
    text = service.get("/metrics", headers=ADMIN).text
    found = re.findall(r'^tandem:batch_lines_running\{gateway="([^"]+)".*\} ([0-9.]+)$', text, re.MULTILINE)
    running = [name for name, count in found if float(count)]
    return named.get(running[0], 0) if running else 0


def test_a_batch_outlives_its_gateway_and_a_group(service: Service) -> None:
    """Each line has one row and one bill, and other tenants see nothing of it."""
    client = client_of(service, "steady")
    named = wait_for(lambda: found if len(found := pids(service)) == 2 else {}, 60, "two gateways")
    batch_id = begin(client, lines())
    wait_for(lambda: answered(client, batch_id) >= 10, 120, "lines are answered")
    psutil.Process(wait_for(lambda: runner(service, named), 60, "the gateway that runs it")).kill()
    before = answered(client, batch_id)
    assert before + 20 < LINES, "it was killed in the middle"
    wait_for(lambda: answered(client, batch_id) >= before + 10, 120, "another one goes on")
    next(iter(service.titled("tandem rank"))).kill()
    stranger = client_of(service, "stranger")
    assert not list(stranger.files.list()) and not list(stranger.batches.list())
    batch = client.batches.retrieve(batch_id)
    for tried in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(NotFoundError):
            tried(batch_id)
    for kept in (batch.input_file_id,):
        for read in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(NotFoundError):
                read(kept)

    rows = rows_of(client, batch_id)
    assert [row["custom_id"] for row in rows] == [f"line-{n}" for n in range(LINES)]
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in rows} == {TOKENS}
    texts = {row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(texts) == 1, "a greedy line says the same wherever it runs"
    wait_for(lambda: bills(service, "steady")[TOKENS] >= LINES, 60, "rows of the ledger")
    assert bills(service, "steady")[TOKENS] == LINES
    assert set(bills(service, "steady")) <= {TOKENS, 0}, "what the dead gateway ran is not billed"


def test_a_file_of_hundreds_of_mebibytes_is_never_held(service: Service) -> None:
    """Through gateways that hold pieces of it; a fifth of it is noise, which does not compress."""
    key = service.post("/admin/tenants", {"name": "bulky"}, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}"}
    wait_for(lambda: all(service.get("/v1/models", headers=headers).status_code == 200 for _ in range(12)), 60, "known")
    wait_for(lambda: len(service.titled(TITLE)) == 2, 60, "two gateways")
    gateways = service.titled(TITLE)
    before = {gateway.pid: gateway.memory_info().rss for gateway in gateways}
    most: Counter[int] = Counter()

    def look() -> None:
        for gateway in gateways:
            most[gateway.pid] = max(most[gateway.pid], gateway.memory_info().rss)

    sent, mebibyte = hashlib.sha256(), 2**20
    noise = hashlib.shake_256(b"noise").digest(mebibyte // 5)
    piece = noise + b"x" * (mebibyte - len(noise))

    def body() -> Iterator[bytes]:
        disposition = b"Content-Disposition: form-data; "
        yield b"--b\r\n" + disposition + b'name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        yield disposition + b'name="file"; filename="large.jsonl"\r\n\r\n'
        for number in range(FILE_MIB):
            sent.update(piece)
            yield piece
            if number % 16 == 0:
                look()
        yield b"\r\n--b--\r\n"

    form = {**headers, "content-type": "multipart/form-data; boundary=b"}
    answer = plain_http.post(service.url + "/v1/files", content=body(), headers=form, timeout=600)
    assert (answer.status_code, answer.json()["bytes"]) == (200, FILE_MIB * mebibyte), answer.text
    place = f"{service.url}/v1/files/{answer.json()['id']}"
    got, size = hashlib.sha256(), 0
    with plain_http.stream("GET", f"{place}/content", headers=headers, timeout=600) as content:
        for number, data in enumerate(content.iter_bytes()):
            got.update(data)
            size += len(data)
            if number % 64 == 0:
                look()
    assert (size, got.digest()) == (FILE_MIB * mebibyte, sent.digest())
    grown = {pid: (most[pid] - before[pid]) / mebibyte for pid in before}
    print(f"{FILE_MIB} MiB came and went; gateways grew by {', '.join(f'{one:.0f} MiB' for one in grown.values())}")
    assert max(grown.values()) < GROWTH_MIB, grown
    assert plain_http.delete(place, headers=headers, timeout=60).status_code == 200


def test_a_batch_outlives_its_service(service: Service, tmp_path: Path) -> None:
    """Where its Redis does: the next start goes on, and no line runs twice that has its row."""
    with private_redis() as server:
        flags = ("--device", "cpu", "--redis-url", server.url, "--state-dir", str(tmp_path), "--max-num-seqs", "8")
        flags = (*flags, "--shutdown-timeout", "60", "--redis-timeout-ms", "5000")
        with tandem_serve("demo", *flags) as first:
            client = OpenAI(base_url=first.url + "/v1", api_key="none")
            batch_id = begin(client, lines())
            wait_for(lambda: answered(client, batch_id) >= 10, 120, "lines are answered")
            before = answered(client, batch_id)
            assert first.stop() == 0, first.output
            assert before < LINES
        with tandem_serve("demo", *flags) as second:
            client = OpenAI(base_url=second.url + "/v1", api_key="none")
            assert before <= answered(client, batch_id)
            rows = rows_of(client, batch_id)
            assert [row["custom_id"] for row in rows] == [f"line-{n}" for n in range(LINES)]
            wait_for(lambda: bills(second, "default")[TOKENS] >= LINES, 60, "rows of the ledger")
            assert bills(second, "default") == {TOKENS: LINES}, "what ran ended before the service did"
            assert second.stop() == 0, second.output


def test_a_request_with_a_key_outlives_its_gateway(service: Service) -> None:
    """It is answered once more, by another gateway, with the same id and tokens, and billed once."""
    wait_for(lambda: len(service.titled(TITLE)) == 2, 60, "two gateways")
    key = service.post("/admin/tenants", {"name": "careful"}, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "once"}
    wait_for(lambda: all(service.get("/v1/models", headers=headers).status_code == 200 for _ in range(12)), 60, "known")
    asked = {"model": "demo", "prompt": "The sun", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with plain_http.stream("POST", service.url + "/v1/completions", json=asked, headers=headers, timeout=60) as cut:
        seen = cut.iter_lines()
        first = json.loads(next(line for line in seen if line).removeprefix("data: "))
        gateway_of(service, cut).kill()
        with pytest.raises(httpx.HTTPError):
            list(seen)

    def again() -> httpx.Response:
        return plain_http.post(service.url + "/v1/completions", json=asked, headers=headers, timeout=120)

    whole = again()
    assert whole.status_code == 200, whole.text
    *chunks, done = [line.removeprefix("data: ") for line in whole.text.splitlines() if line]
    assert done == "[DONE]" and {json.loads(chunk)["id"] for chunk in chunks} == {first["id"]}
    assert json.loads(chunks[0])["choices"][0]["text"] == first["choices"][0]["text"], "from the start"
    replayed = again()
    assert replayed.content == whole.content and replayed.headers["idempotent-replayed"] == "true"
    other = plain_http.post(service.url + "/v1/completions", json=asked | {"n": 2}, headers=headers, timeout=60)
    assert other.status_code == 409
    wait_for(lambda: bills(service, "careful")[1500] == 1, 60, "its row, whatever the dead gateway's journal says")
    assert bills(service, "careful").total() == 1


def gateway_of(service: Service, response: httpx.Response) -> psutil.Process:
    """The gateway at the other end."""
    _, port = response.extensions["network_stream"].get_extra_info("client_addr")[:2]
    for gateway in service.titled(TITLE):
        if any(c.raddr and c.raddr.port == port for c in gateway.net_connections("tcp")):
            return gateway
    raise AssertionError("no gateway has this connection")


def test_a_client_may_leave_in_the_middle(service: Service) -> None:
    """Nothing of its file stays, and the service goes on."""
    key = service.post("/admin/tenants", {"name": "leaver"}, headers=ADMIN).json()["key"]
    headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=b"}
    wait_for(lambda: all(service.get("/v1/models", headers=headers).status_code == 200 for _ in range(12)), 60, "known")

    def body() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield b"x" * 2**22
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, httpx.HTTPError)):
        plain_http.post(service.url + "/v1/files", content=body(), headers=headers, timeout=60)
    assert service.get("/v1/files", headers={"authorization": headers["authorization"]}).json()["data"] == []
