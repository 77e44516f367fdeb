"""Two groups x TP 2 behind the real gateway: answers equal the offline engine's, and groups that die come back."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tandem import LLM, SamplingParams, StructuredOutputsParams
from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.fleet.fleet_view import RECORD_TTL_S
from tandem.configs.environment import memory_folder
from tests.support.metric_names import absent_names, not_in_the_reference, not_served, sample_names, stock_names
from tests.support.mixed_requests import PREFIX, PROMPTS, answers, greedy
from tests.support.plain_http import plain_http
from tests.support.records import command, group_records, group_reports, rank_pids
from tests.support.service import Service, is_alive, stopped, title_of, wait_for
from tools import dashboards

pytestmark = pytest.mark.cluster

LONG, LONGEST = 300, 900
"""Tokens of streams during which one process is hit, and of those during which two are, one after the other."""
SOON_S = 20
"""On cores that others want, the step under way takes a while. That nothing came to its own end is asked for beside."""
JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "Tell me a short story about a whale."}]


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def long_answers(offline: LLM) -> list[str]:
    return greedy(offline, PROMPTS[:8], [LONG] * 8)


@pytest.fixture(scope="module")
def longest_answers(offline: LLM) -> list[str]:
    return greedy(offline, PROMPTS[:8], [LONGEST] * 8)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_completion_whole_and_streamed_are_the_same(client: openai.OpenAI, offline: LLM) -> None:
    asked = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
    streamed = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(streamed)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert whole.choices[0].text == greedy(offline, [PROMPTS[0]], [24])[0]
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24


async def test_chat_with_the_async_client(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked = {"model": "demo", "messages": CHAT, "max_tokens": 20, "temperature": 0}
        whole = await client.chat.completions.create(**asked)
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**asked, stream=True)
            if chunk.choices
        ]
    assert whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content


def test_structured_output_is_the_offline_engines_streamed_or_not(client: openai.OpenAI, offline: LLM) -> None:
    """Through two groups of two ranks. Forms that cannot be compiled are refused, and harm nobody."""
    schema = {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 2, "maxItems": 6}
    form = {"type": "json_schema", "json_schema": {"name": "colors", "schema": schema, "strict": True}}
    asked: Any = {"model": "demo", "messages": CHAT, "max_tokens": 60, "temperature": 0, "response_format": form}
    params = SamplingParams(max_tokens=60, temperature=0, structured_outputs=StructuredOutputsParams(json=schema))
    wanted = offline.chat(CHAT, params, use_tqdm=False)[0].text
    assert 2 <= len(json.loads(wanted)) <= 6 and set(json.loads(wanted)) <= {"red", "green", 7}
    for bad in ({"type": "array", "uniqueItems": True}, {"pattern": "(", "type": "string"}):
        body = {**asked, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**body)
        assert (refused.value.code, refused.value.param) == ("invalid_grammar", "response_format")
    for _ in range(3):
        assert client.chat.completions.create(**asked).choices[0].message.content == wanted
    pieces = [
        c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True) if c.choices
    ]
    assert "".join(pieces) == wanted


def test_a_seed_gives_the_same_words_whichever_group_runs_it(client: openai.OpenAI) -> None:
    answers = {
        client.completions.create(model="demo", prompt="The", max_tokens=16, temperature=1, seed=7).choices[0].text
        for _ in range(4)
    }
    assert len(answers) == 1


async def test_32_at_once_equal_the_offline_engine(service: Service, offline: LLM) -> None:
    assert await answers(service.url) == greedy(offline)

    def both_report() -> bool:
        lines = service.get("/metrics").text.splitlines()
        return len([line for line in lines if line.startswith("tandem:prompt_tokens_total{")]) == 2

    wait_for(both_report, 60, "the other group may have come later")
    rows = [row for row in dashboards.ROWS if row not in dashboards.EXTRA]
    text = service.get("/metrics").text
    assert not_served(text, *rows) == {}, "each panel of the dashboard finds its metrics"
    assert not absent_names(stock_names(), sample_names(text)), (
        "and those of vLLM's and Ray Serve LLM's stock dashboards"
    )
    assert not not_in_the_reference(text), "docs/reference/metrics.md: make reference"


def test_embeddings_are_the_offline_engines_beside_requests_that_generate(
    service: Service, client: openai.OpenAI, offline: LLM
) -> None:
    """By the official client, which asks for base64; two groups of two ranks share 32 inputs and some texts."""
    wanted = [output.outputs.embedding for output in offline.embed(PROMPTS, use_tqdm=False)]
    asked = {"model": "demo", "prompt": "The", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(service.post, "/v1/completions", asked) for _ in range(3)]
        answer = client.embeddings.create(model="demo", input=PROMPTS)
        assert {text.result().json()["choices"][0]["text"] for text in texts} == set(greedy(offline, ["The"], [60]))
    assert [item.index for item in answer.data] == list(range(len(PROMPTS)))
    for item, vector in zip(answer.data, wanted, strict=True):
        assert max(abs(a - b) for a, b in zip(item.embedding, vector, strict=True)) < 1e-5
    (plain,) = client.embeddings.create(model="demo", input=PROMPTS[:1], encoding_format="float").data
    assert max(abs(a - b) for a, b in zip(plain.embedding, wanted[0], strict=True)) < 1e-5
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="x", dimensions=8)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "demo"}', 400),
        (b'{"model": "demo", "prompt": "x", "max_tokens": -1}', 400),
        (b'{"model": "demo", "prompt": "x", "temperature": "hot"}', 400),
        (b'{"model": "demo", "prompt": [99999999]}', 400),
        (b'{"model": "demo", "prompt": "x", "no_such_field": 1}', 400),
        (b'{"model": "other", "prompt": "x"}', 404),
        (json.dumps({"model": "demo", "prompt": "word " * 20000}).encode(), 400),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_bad_body_is_refused_in_openais_words(service: Service, body: bytes, status: int) -> None:
    answer = plain_http.post(service.url + "/v1/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_requests_at_the_same_time_are_shared_by_the_groups(service: Service) -> None:
    """A group that was slow for a moment is avoided for another: then once more."""

    def generated() -> Counter[str]:
        lines = service.get("/metrics").text.splitlines()
        mine = [line.rpartition(" ") for line in lines if line.startswith("tandem:generation_tokens_total{")]
        return Counter({group: int(float(value)) for group, _, value in mine})

    wait_for(lambda: len(generated()) == 2, 60, "both groups have reported")
    asked = {"model": "demo", "prompt": "The", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    for _ in range(5):
        before = generated()
        with ThreadPoolExecutor(6) as pool:
            posts = [pool.submit(service.post, "/v1/completions", asked) for _ in range(6)]
            assert [post.result().status_code for post in posts] == [200] * 6
        wait_for(lambda b=before: (generated() - b).total() >= 1200, 60, "all is counted")
        if len(generated() - before) == 2:
            return
    raise AssertionError("five times, all requests went to one group")


def test_what_has_ended_keeps_nobody_away_from_a_group(service: Service) -> None:
    """Two streams at a time, for longer than the groups' reports are apart: one to each group, every time, although
    reports tell of streams that are over when they come. A group that was slow for a moment is avoided for another:
    then once more."""
    for _ in range(5):
        pairs, dealt = deal_pairs(service)
        if sorted(dealt.values()) == [pairs, pairs]:
            return
        print(f"{pairs} pairs, dealt {dealt}")
    raise AssertionError("five times, some pairs went to one group")


def deal_pairs(service: Service, choices: int = 4) -> tuple[int, Counter[str]]:
    """Pairs of streams for six seconds, left as soon as both run: how many, and how many streams each group had."""

    def aborted() -> Counter[str]:
        lines = [line for line in service.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
        mine = [line.rpartition(" ") for line in lines if line.startswith("tandem:request_success_total{")]
        return Counter({group: int(float(count)) for group, _, count in mine})

    @contextmanager
    def stream() -> Iterator[None]:
        asked = {"model": "demo", "prompt": "The", "max_tokens": 2000, "n": choices, "ignore_eos": True, "stream": True}
        with plain_http.stream("POST", service.url + "/v1/completions", json=asked, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            yield

    wait_for(lambda: service.get("/load").json()["num_requests_running"] == 0, 60, "all is quiet")
    before = aborted()
    pairs, begun_s = 0, time.monotonic()
    while time.monotonic() < begun_s + 6:
        with stream(), stream():
            pairs += 1
        wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 0, 60, "both are over")
    wait_for(lambda: (aborted() - before).total() == 2 * choices * pairs, 60, "all are counted")
    return pairs, Counter({group: count // choices for group, count in (aborted() - before).items()})


def test_a_client_that_leaves_frees_its_blocks(service: Service) -> None:
    asked = {"model": "demo", "prompt": PREFIX, "max_tokens": 1500, "n": 24, "stream": True, "ignore_eos": True}
    with plain_http.stream("POST", service.url + "/v1/completions", json=asked, timeout=60) as response:
        lines = response.iter_lines()  # kept: the stream is closed with its last reference
        line = next(lines)
        assert response.status_code == 200, line
        wait_for(lambda: service.metric("kv_cache_usage_perc") > 0, 60, "the request holds blocks")
    wait_for(lambda: service.metric("kv_cache_usage_perc") == 0, 60, "its blocks are free again")

    def is_idle() -> bool:
        load = service.get("/load").json()
        return (load["num_requests_running"], load["num_requests_waiting"]) == (0, 0)

    wait_for(is_idle, 60, "nothing runs, nothing waits")


@pytest.mark.parametrize(
    ("path", "asked", "choices"),
    [
        ("/v1/completions", {"prompt": PREFIX, "n": 12}, 12),
        ("/v1/completions", {"prompt": [PREFIX, PREFIX + PREFIX]}, 2),
        ("/v1/chat/completions", {"messages": CHAT}, 1),
    ],
    ids=["one prompt, 12 choices", "two prompts", "chat"],
)
def test_a_client_that_leaves_before_its_whole_answer_frees_its_blocks(
    service: Service, path: str, asked: dict[str, Any], choices: int
) -> None:
    """Not streaming: nothing is ever written to that client, so only its closed connection says that it has left."""
    body = json.dumps({"model": "demo", "max_tokens": 1500, "ignore_eos": True, **asked}).encode()
    ranks = {p.pid for p in service.titled("tandem rank")}
    for _ in range(5):  # until it is held before its end
        wait_for(lambda: at_rest(service), 60, "nothing else runs")
        before = aborted(service)
        with connected(service, path, body) as client:
            wait_for(lambda c=client: holds_blocks(service) or is_answered(c), 60, "the request holds blocks", 0.01)
            with stopped(ranks):
                if not is_answered(client):
                    client.close()
                    break
    else:
        raise AssertionError("it was over before its client could leave, five times")
    left_s = time.monotonic()
    wait_for(lambda: not holds_blocks(service), SOON_S, "its blocks are free again", 0.01)
    print(f"blocks free {time.monotonic() - left_s:.2f} s after the client had left")
    wait_for(lambda: at_rest(service), SOON_S, "the request is over")
    wait_for(lambda: aborted(service) >= before + choices, SOON_S, "all were aborted, none had come to its end")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompts_are_computed_or_wait_frees_all_at_once(
    service: Service, stream: bool
) -> None:
    """More long prompts than fit: some are being computed when it leaves, and held until then, most wait, none has a
    token."""
    prompts = [[5 + (7 * i + j * j) % 200 for j in range(1500)] for i in range(64)]
    asked = {"model": "demo", "max_tokens": 500, "ignore_eos": True, "prompt": prompts, "stream": stream}
    for _ in range(5):  # until all come before their ranks, which stand still, would be given up
        wait_for(lambda: at_rest(service), 60, "nothing else runs")
        before = aborted(service)
        with (
            stopped({p.pid for p in service.titled("tandem rank")}),
            connected(service, "/v1/completions", json.dumps(asked).encode()),
            suppress(AssertionError),
        ):
            wait_for(lambda: sum(r.waiting + r.running for r in group_records(service)) == 64, 4, "all came", 0.01)
            break
    else:
        raise AssertionError("five times, some had not come after 4 s")
    left_s = time.monotonic()
    wait_for(lambda: at_rest(service), SOON_S, "no block is held, nothing waits", 0.01)
    print(f"at rest {time.monotonic() - left_s:.2f} s after the client had left")
    wait_for(lambda: aborted(service) >= before + len(prompts), SOON_S, "all were aborted, none had come to its end")


@contextmanager
def connected(service: Service, path: str, body: bytes) -> Iterator[socket.socket]:
    """A client that has sent its request and reads nothing; it leaves with the block."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as client:
        client.sendall(head.encode() + b"\r\n" + body)
        yield client


def is_answered(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0)[0])


def holds_blocks(service: Service) -> bool:
    return any(record.kv_used > 0 for record in group_records(service))


def at_rest(service: Service) -> bool:
    records = group_records(service)
    return all((r.kv_used, r.running, r.waiting, r.outstanding_tokens) == (0, 0, 0, 0) for r in records)


def aborted(service: Service) -> int:
    """Choices that were aborted, over all groups."""
    found = [decode_stats(report) for report in group_reports(service)]
    return sum(stats.finished["abort"] for stats in found if stats is not None)


def test_every_process_says_its_part(service: Service) -> None:
    loaded = [0 < record.total_bytes == record.loaded_bytes for record in group_records(service)]
    assert any(loaded), "the groups that serve say so"
    titles = [title_of(p) for p in service.descendants()]
    ranks = [t for t in titles if t.startswith("tandem rank ")]
    assert sorted(t.split()[-2:] for t in ranks) == [["tp0", "pp0"]] * 2 + [["tp1", "pp0"]] * 2
    assert len({t.split()[2] for t in ranks}) == 2, "two groups"
    for part in (
        "tandem redis",
        "ray::ServeReplica:tandem:tandem-gateway",
        "ray::ServeReplica:tandem:tandem-coordinator",
    ):
        assert any(t.startswith(part) for t in titles), titles


def test_only_ranks_load_torch(service: Service) -> None:
    def have_torch(title: str) -> set[bool]:
        return {"libtorch" in Path(f"/proc/{p.pid}/maps").read_text() for p in service.titled(title)}

    assert have_torch("tandem rank") == {True}
    assert have_torch("ray::ServeReplica:tandem:") == {False}


def test_a_rank_that_dies_while_nothing_runs_is_noticed(service: Service) -> None:
    before, losses = {p.pid for p in service.titled("tandem rank")}, service.metric("group_losses_total")
    migrations = service.metric("request_migrations_total")
    os.kill(max(before), signal.SIGKILL)
    wait_for(lambda: len({p.pid for p in service.titled("tandem rank")} - before) == 2, 180, "the group is replaced")
    wait_until_healed(service, before)
    assert service.metric("group_losses_total") - losses == 1, "an alert can see it"
    assert service.metric("request_migrations_total") == migrations


@dataclass
class Hit:
    """What 8 running streams saw of a signal to one process. Seconds after the signal; `gap_s`: the longest pause of
    one stream."""

    before: set[int]
    answers: list[str]
    pid: int
    gone_s: float
    gap_s: float
    ended_s: float


async def hit_a_rank(service: Service, number: signal.Signals, choose: Callable[[set[int]], int] = min) -> Hit:
    """hit() of one of four ranks."""
    return await hit(service, number, choose({p.pid for p in service.titled("tandem rank")}))


async def hit(service: Service, number: signal.Signals, pid: int) -> Hit:
    """Sends the signal to the process while 8 greedy streams run, and reads the streams to their end."""
    before = {p.pid for p in service.titled("tandem rank")}
    assert len(before) == 4
    victim = psutil.Process(pid)
    begun: set[int] = set()
    all_begun = asyncio.Event()
    gaps: list[float] = []
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def warm_up(i: int) -> None:
            """A new group's first steps may take longer than the other one's whole streams, which must still run."""
            await client.completions.create(model="demo", prompt=PROMPTS[i], max_tokens=8, temperature=0)

        async def one(i: int) -> str:
            asked = {"model": "demo", "prompt": PROMPTS[i], "max_tokens": LONG, "temperature": 0, "stream": True}
            pieces: list[str] = []
            last_s = time.monotonic()
            async for chunk in await client.completions.create(**asked, extra_body={"ignore_eos": True}):
                gaps.append(time.monotonic() - last_s)
                last_s += gaps[-1]
                pieces += [choice.text for choice in chunk.choices]
                begun.add(i)
                if len(begun) == 8:
                    all_begun.set()
            return "".join(pieces)

        async def both_run(streams: list[asyncio.Task[str]]) -> bool:
            """Some of the streams each, which are held and do not end, as the groups' records say by and by."""
            until_s = time.monotonic() + 3
            running: list[int] = []
            while time.monotonic() < until_s and not any(stream.done() for stream in streams):
                running = [record.running for record in await asyncio.to_thread(group_records, service)]
                if sum(running) == 8:
                    break
                await asyncio.sleep(0.05)
            tried.append((running, sum(stream.done() for stream in streams)))
            return sum(running) == 8 and len(running) == 2 and all(running)

        async def until_gone(hit_s: float) -> float:
            """Stopped processes end only by being killed."""
            while is_alive(victim):
                assert time.monotonic() < hit_s + 30, "the process is ended"
                await asyncio.sleep(0.02)
            return time.monotonic() - hit_s

        await asyncio.gather(*map(warm_up, range(8)))
        tried: list[tuple[list[int], int]] = []
        for _ in range(20):  # until both run some: a group that was slow for a moment is avoided for another
            await asyncio.to_thread(wait_until_idle, service)
            begun.clear()
            all_begun.clear()
            running = [asyncio.create_task(one(i)) for i in range(8)]
            await asyncio.wait_for(all_begun.wait(), 60)
            with stopped(before - {pid}):
                if hits := await both_run(running):
                    gaps.clear()
                    os.kill(pid, number)
                    hit_s = time.monotonic()
            if hits:
                break
            await asyncio.gather(*running)
        else:
            raise AssertionError(f"one of the groups never ran a stream, or one was over: (running, over) {tried}")
        gone_s = await until_gone(hit_s)
        answers = await asyncio.gather(*running)
    return Hit(before, answers, pid, gone_s, max(gaps), time.monotonic() - hit_s)


def wait_until_healed(service: Service, before: set[int]) -> None:
    """Two of the ranks are as before, two are new; both groups serve."""

    def healed() -> bool:
        ranks = {p.pid for p in service.titled("tandem rank") if is_alive(p)}
        return len(ranks) == 4 and len(ranks & before) == 2 and service.get("/load").json()["groups"] == 2

    wait_for(healed, 180, "the group is replaced")
    wait_for(lambda: group_readiness(service) == [True, True], 60, "and is ready")
    answer = service.post("/v1/completions", {"model": "demo", "prompt": "The", "max_tokens": 4})
    assert answer.status_code == 200


def wait_until_idle(service: Service) -> None:
    """As the groups' records say: what they say later is of requests that began later."""
    wait_for(lambda: not any(r.running + r.waiting for r in group_records(service)), 60, "the groups are idle")


def groups_of(service: Service) -> set[str]:
    return {record.group for record in group_records(service)}


def group_readiness(service: Service) -> list[bool]:
    """Of every group, by its record."""
    return [record.is_ready for record in group_records(service)]


@pytest.mark.chaos
@pytest.mark.parametrize("choose", [pytest.param(min, id="the first rank"), pytest.param(max, id="the last rank")])
async def test_a_frozen_rank_costs_no_request_and_its_group_comes_back(
    service: Service, long_answers: list[str], choose: Callable[[set[int]], int]
) -> None:
    """Its process lives but no step ends any more: within 10 s the group counts as lost, and the rank is killed before
    it could wake up."""
    hit = await hit_a_rank(service, signal.SIGSTOP, choose)
    print(f"frozen rank: killed after {hit.gone_s:.2f} s, longest gap {hit.gap_s:.2f} s, all ended {hit.ended_s:.2f} s")
    assert hit.answers == long_answers
    assert hit.gone_s <= 10
    assert 4 < hit.gap_s <= 12, "some stream was on that group, and went on"
    await asyncio.to_thread(wait_until_healed, service, hit.before)


async def test_a_frozen_coordinator_costs_no_request_and_its_group_comes_back(
    service: Service, long_answers: list[str]
) -> None:
    """It neither beats nor sends tokens: its streams go on with the other group, it is killed, its group replaced."""
    hit_s = time.monotonic()
    records = await asyncio.to_thread(group_records, service)
    seen = await hit(service, signal.SIGSTOP, min(record.pid for record in records))
    print(f"frozen coordinator: killed after {seen.gone_s:.2f} s, longest gap {seen.gap_s:.2f} s")
    assert seen.answers == long_answers
    assert seen.gone_s <= 15
    assert seen.gap_s <= 10
    await asyncio.to_thread(wait_until_healed, service, seen.before)
    print(f"both groups serve {time.monotonic() - hit_s:.2f} s after the streams began")


@pytest.mark.chaos
async def test_a_killed_coordinator_costs_no_request_and_its_group_comes_back(
    service: Service, long_answers: list[str]
) -> None:
    """Nobody can say in which step its group was: its streams run alone for a moment in the other group."""
    records = await asyncio.to_thread(group_records, service)
    seen = await hit(service, signal.SIGKILL, min(record.pid for record in records))
    print(f"coordinator: gone after {seen.gone_s:.2f} s, longest gap {seen.gap_s:.2f} s")
    assert seen.answers == long_answers
    assert seen.gap_s <= 15
    await asyncio.to_thread(wait_until_healed, service, seen.before)


@pytest.mark.parametrize("part", [pytest.param("rank", marks=pytest.mark.chaos), "coordinator"])
async def test_a_group_that_is_told_to_end_hands_its_streams_over(
    service: Service, long_answers: list[str], part: str
) -> None:
    """SIGTERM is a planned end: the process is gone soon, nobody speaks of a loss, and Serve starts another group."""
    said, losses = len(service.output), service.metric("group_losses_total")
    victim = min(await asyncio.to_thread(group_records, service), key=lambda record: record.pid)
    ranks = await asyncio.to_thread(rank_pids, service, victim.group)
    seen = await hit(service, signal.SIGTERM, victim.pid if part == "coordinator" else ranks[0])
    print(f"{part}: gone after {seen.gone_s:.2f} s, longest gap {seen.gap_s:.2f} s")
    assert seen.answers == long_answers
    assert seen.gone_s <= 15
    await asyncio.to_thread(wait_until_healed, service, seen.before)
    lines = wait_for(
        lambda: [
            line for line in service.output[said:].splitlines() if line.startswith(f"tandem: group {victim.group} ")
        ],
        60,
        "its line",
    )
    assert lines == [f"tandem: group {victim.group} has ended"]
    assert service.metric("group_losses_total") == losses


async def test_a_gateway_that_is_told_to_end_finishes_its_streams(service: Service, long_answers: list[str]) -> None:
    """Its port is free for the next one while they run."""
    title = "ray::ServeReplica:tandem:tandem-gateway"
    (gateway,) = service.titled(title)
    begun: set[int] = set()
    all_begun = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def one(i: int) -> str:
            asked = {"model": "demo", "prompt": PROMPTS[i], "max_tokens": LONG, "temperature": 0, "stream": True}
            pieces: list[str] = []
            async for chunk in await client.completions.create(**asked, extra_body={"ignore_eos": True}):
                pieces += [choice.text for choice in chunk.choices]
                begun.add(i)
                if len(begun) == 8:
                    all_begun.set()
            return "".join(pieces)

        running = [asyncio.create_task(one(i)) for i in range(8)]
        await asyncio.wait_for(all_begun.wait(), 60)
        gateway.terminate()
        assert await asyncio.gather(*running) == long_answers
    wait_for(lambda: not is_alive(gateway), 30, "it is gone")
    wait_for(lambda: [p for p in service.titled(title) if p.pid != gateway.pid], 60, "another is started")
    service.wait_ready()


@pytest.mark.chaos
async def test_both_groups_lost_one_after_the_other_cost_no_request(
    service: Service, longest_answers: list[str]
) -> None:
    """Same texts, no gap, no duplicate. The second group is lost soon after the first one's streams go on in it, when
    none of them is examined alone any more: else it would look as if that one had ended both. Then nothing runs until
    a group is back. Who runs the service can see it all."""
    before = {p.pid for p in service.titled("tandem rank")}
    migrations, said = service.metric("request_migrations_total"), len(service.output)
    gone = await asyncio.to_thread(groups_of, service)
    heard = [0] * 8
    news = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def one(i: int) -> str:
            asked = {"model": "demo", "prompt": PROMPTS[i], "max_tokens": LONGEST, "temperature": 0, "stream": True}
            pieces: list[str] = []
            async for chunk in await client.completions.create(**asked, extra_body={"ignore_eos": True}):
                pieces += [choice.text for choice in chunk.choices]
                heard[i] += 1
                news.set()
            return "".join(pieces)

        async def until_heard(more: int) -> None:
            wanted = [count + more for count in heard]
            async with asyncio.timeout(120):
                while any(count < want for count, want in zip(heard, wanted, strict=True)):
                    news.clear()
                    await news.wait()

        def all_run_in_one() -> bool:
            lines = service.get("/metrics").text.splitlines()
            running = [
                float(line.rpartition(" ")[2]) for line in lines if line.startswith("tandem:num_requests_running{")
            ]
            return 8 in running

        running = [asyncio.create_task(one(i)) for i in range(8)]
        await until_heard(5)
        groups = {p.pid: title_of(p) for p in service.titled("tandem rank")}
        assert len(groups) == 4, (groups, service.output)
        first = min(groups)
        second = next(pid for pid, title in groups.items() if title.split()[2] != groups[first].split()[2])
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(wait_for, all_run_in_one, 120, "all streams run in the second group")
        wanted = service.metric("generation_tokens_total") + 8 * 20
        await asyncio.to_thread(
            wait_for, lambda: service.metric("generation_tokens_total") >= wanted, 120, "nobody is examined any more"
        )
        assert not any(stream.done() for stream in running)
        moved = round(service.metric("request_migrations_total") - migrations)
        assert 1 <= moved <= 8, "the lost group's went on"
        os.kill(second, signal.SIGKILL)
        assert await asyncio.gather(*running) == longest_answers
    wait_for(
        lambda: service.metric("request_migrations_total") - migrations >= moved + 8, 60, "and all of the second one's"
    )

    def healed() -> bool:
        ranks = {p.pid for p in service.titled("tandem rank") if is_alive(p)}
        return len(ranks) == 4 and not ranks & before and service.get("/load").json()["groups"] == 2

    await asyncio.to_thread(wait_for, healed, 180, "both groups are replaced")
    await asyncio.to_thread(check_lines_of_groups, service, said, gone)


def check_lines_of_groups(service: Service, said: int, gone: set[str]) -> None:
    """The terminal has one line for each group that was lost, and for each that serves in its place. said: its length
    before."""

    def lines() -> list[str]:
        return [line for line in service.output[said:].splitlines() if line.startswith("tandem: group ")]

    wait_for(lambda: len(groups_of(service)) == 2, 60, "records of lost groups expire")
    new = groups_of(service) - gone
    assert len(gone) == len(new) == 2
    served = {f"tandem: group {group} serves" for group in new}
    wait_for(lambda: served <= set(lines()) and len(lines()) == 4, 60, "a line for each")
    for group in gone:
        (lost,) = [line for line in lines() if f" {group} " in line]
        why = rf"rank \d of group {group} (was killed by SIGKILL|has died \(exit status or signal unknown.*\))"
        assert re.fullmatch(rf"tandem: group {group} is lost: {why}; its requests .*", lost)


@contextmanager
def posting(service: Service) -> Iterator[None]:
    """One request after the other while the block runs; none may be refused, and the service stays ready."""
    asked = {"model": "demo", "prompt": "The", "max_tokens": 4, "temperature": 0}
    refused: list[str] = []
    over = threading.Event()

    def post() -> None:
        while not over.wait(0.05):
            try:
                answers = service.post("/v1/completions", asked), service.get("/readyz")
            except httpx.HTTPError as error:
                refused.append(repr(error))
                return
            refused.extend(answer.text for answer in answers if answer.status_code != 200)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert refused == []


def test_the_service_lives_without_redis_for_a_while(service: Service) -> None:
    """Emptied, full, both, frozen, killed: requests are answered all the time; the launcher starts Redis again."""
    (redis,) = service.titled("tandem redis")

    def redis_is(state: str) -> bool:
        return bool(service.get("/load").json()["redis"] == state)

    def outlive_the_records() -> None:
        """What a view that forgets its groups would forget by then, it has forgotten."""
        over_s = time.monotonic() + RECORD_TTL_S + 1
        wait_for(lambda: time.monotonic() > over_s, 60, "time has passed")

    with posting(service):
        command(redis, "FLUSHALL")
        wait_for(lambda: len(group_records(service)) == 2, 60, "the groups have written their records again")
        command(redis, "CONFIG", "SET", "maxmemory", "1")
        wait_for(lambda: not group_records(service), 60, "heartbeats are refused until their records expire")
        wait_for(lambda: redis_is("away"), 60, "the gateway asks before it believes it")
        command(redis, "CONFIG", "SET", "maxmemory", "0")
        wait_for(lambda: redis_is("here"), 60, "the gateway is back")
        command(redis, "FLUSHALL")
        command(
            redis, "CONFIG", "SET", "maxmemory", "1"
        )  # before the groups, or after one or both could list themselves
        wait_for(lambda: redis_is("away"), 60, "the gateway notices")
        outlive_the_records()
        command(redis, "CONFIG", "SET", "maxmemory", "0")
        wait_for(lambda: redis_is("here"), 60, "the gateway is back")
        redis.suspend()
        wait_for(lambda: redis_is("away"), 60, "the gateway notices")
        assert service.get("/metrics").status_code == 200
        outlive_the_records()
        redis.resume()
        wait_for(lambda: redis_is("here"), 60, "the gateway is back")
        redis.kill()
        again = wait_for(
            lambda: [p for p in service.titled("tandem redis") if p.pid != redis.pid], 60, "Redis restarts"
        )
        assert again
        wait_for(lambda: redis_is("here"), 60, "it listens")
        wait_for(lambda: len(group_records(service)) == 2, 60, "the groups have written their records again")
        wait_for(lambda: redis_is("here") and service.get("/load").json()["groups"] == 2, 60, "the gateway is back")


def test_the_service_lives_while_rays_gcs_is_started_again(service: Service, long_answers: list[str]) -> None:
    """No stream is lost, new requests are answered, and a Ray that knows all it knew replaces a group afterwards."""
    (gcs,) = gcs_of(service)
    kept = [file.path for file in gcs.open_files() if "/gcs/" in file.path]
    assert kept and all(Path(path).is_relative_to(memory_folder() or service.temp) for path in kept), kept
    seen = asyncio.run(hit(service, signal.SIGKILL, gcs.pid))
    assert seen.answers == long_answers
    (again,) = wait_for(lambda: [p for p in gcs_of(service) if p.pid != gcs.pid], 60, "the launcher starts it again")
    with posting(service):
        again.kill()
        wait_for(lambda: [p for p in gcs_of(service) if p.pid not in (gcs.pid, again.pid)], 60, "and again")
    assert service.output.count("Ray's GCS died and is started again; requests go on") == 2
    assert {p.pid for p in service.titled("tandem rank")} == seen.before
    psutil.Process(max(seen.before)).kill()
    wait_until_healed(service, seen.before)


def gcs_of(service: Service) -> list[psutil.Process]:
    return [p for p in service.descendants() if Path(title_of(p).partition(" ")[0]).name == "gcs_server"]


def test_a_rank_that_freezes_while_nothing_runs_is_noticed(service: Service) -> None:
    """Nobody waits for it, yet the next request must not go there."""
    wait_for(lambda: group_readiness(service) == [True, True], 60, "both groups are ready")
    before = {p.pid for p in service.titled("tandem rank")}
    frozen = psutil.Process(max(before))
    frozen.suspend()
    wait_for(lambda: group_readiness(service).count(True) < 2 or not is_alive(frozen), 60, "the group is given up")
    assert service.get("/readyz").status_code == 200, "the other one serves"
    wait_until_healed(service, before)


def test_all_ranks_slowed_down_by_stops_shorter_than_the_bound_are_left_alone(service: Service) -> None:
    """A machine that hangs for a moment, the coordinators included, costs nothing but the moment."""
    asked = {"model": "demo", "prompt": "The", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    wanted = service.post("/v1/completions", asked).json()["choices"][0]["text"]
    ranks, coordinators = wait_for(lambda: both_groups(service), 60, "nothing is left of groups that are gone")
    with ThreadPoolExecutor(1) as pool:
        for pids, seconds in ((ranks, 2.5), (coordinators, 6.0), (ranks | coordinators, 6.0)):
            with stopped(pids):
                post = pool.submit(service.post, "/v1/completions", asked)
                time.sleep(seconds)  # the length of the stop is what is tested; bounds are 5 s and 9 s at least
            assert post.result().json()["choices"][0]["text"] == wanted
    assert {p.pid for p in service.titled("tandem rank")} == ranks
    wait_for(lambda: group_readiness(service) == [True, True], 60, "both groups are ready")


def both_groups(service: Service) -> tuple[set[int], set[int]] | None:
    """Their ranks and their coordinators; None while there are others."""
    titles = ("tandem rank", "ray::ServeReplica:tandem:tandem-coordinator")
    ranks, coordinators = ({p.pid for p in service.titled(title) if is_alive(p)} for title in titles)
    return (ranks, coordinators) if (len(ranks), len(coordinators)) == (4, 2) else None
