"""Records of requests that have ended: bounded, found by x-request-id through any gateway, and worded by `explain`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import typer.testing

from tandem.cluster.cli.explain.explanation import explanation
from tandem.cluster.fleet import record_questions
from tandem.cluster.fleet.record_questions import RecordQuestions
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.records.request_record import GroupAttempt, PromptRecord, RequestRecord, named, read_named
from tandem.cluster.gateway.records.request_records import RequestRecords
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, Changes
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.course import Course, Phase
from tests.support.fake_backend import FakeBackend
from tests.support.verbs import invoked
from tests.unit.gateway.rig import EOS, MODEL, error_of, gateway, served
from tests.unit.tenants.tenant_rig import patient

SAID = "the lighthouse keeper"


def record(request_id: str, **more: Any) -> RequestRecord:
    given: dict[str, Any] = {"time_s": 1.8e9, "outcome": "stop", "duration_s": 1.0}
    return RequestRecord(request_id=request_id, **{**given, **more})


def test_records_are_bounded_in_bytes_and_the_oldest_go() -> None:
    records = RequestRecords(most_bytes=10_000)
    for number in range(100):
        records.add(record(f"r{number}", tenant="t" * 300))
        assert records.held_bytes <= 10_000
    known = [number for number in range(100) if records.encoded(f"r{number}") is not None]
    assert known == list(range(known[0], 100)) and 10 < len(known) < 30
    for _ in range(100):
        records.add(record("again"))
    assert records.encoded("r99") is not None, "an id that comes again takes the place of its older one"


async def test_no_tenant_takes_the_place_of_anothers_record() -> None:
    records = RequestRecords()
    for tenant, outcome in (("acme", "stop"), ("acme", "length"), ("other", "abort"), ("", "rejected")):
        records.add(record("r", tenant=tenant, outcome=outcome))

    async def outcome_of(tenant: str) -> str | None:
        found = await records.find("r", tenant)
        return None if found is None else found.outcome

    assert [await outcome_of(tenant) for tenant in ("acme", "other", "nobody")] == ["length", "abort", None]
    assert await outcome_of("") == "abort", "the last one that had a valid key"
    records.add(record("without a key", outcome="rejected"))
    assert await records.find("without a key") is not None


async def test_the_route_knows_what_a_request_met(rig_of_admin: Any) -> None:
    async with rig_of_admin() as rig:
        body = {"prompt": SAID, "max_tokens": 3, "n": 2}
        sent = {"authorization": "Bearer sk", "x-request-id": "a/b:1"}
        assert (await rig.client.post("/v1/completions", json=body, headers=sent)).status_code == 200
        await rig.settle()
        asked = {"authorization": "Bearer root"}
        answer = await rig.client.get("/admin/requests/a%2Fb%3A1", headers=asked)
        assert answer.status_code == 200, answer.text
        assert SAID not in answer.text
        found = read_named(answer.content)
        assert (found.request_id, found.model, found.outcome, found.completion_tokens) == ("a/b:1", MODEL, "length", 6)
        assert found.ready_s is not None and found.admitted_s is not None and found.first_token_s is not None
        assert 0 <= found.ready_s <= found.admitted_s <= found.first_token_s <= found.duration_s
        (prompt,) = found.prompts
        (attempt,) = prompt.attempts
        assert found.admitted_s <= attempt.sent_s <= attempt.ended_s <= found.duration_s
        assert (prompt.n, prompt.prompt_tokens, attempt.why) == (2, found.prompt_tokens, "")
        for path, key, status in (
            ("/admin/requests/a%2Fb%3A1", "sk", 403),
            ("/admin/requests/nobody", "root", 404),
            ("/admin/requests/a%2Fb%3A1?tenant=default", "root", 200),
            ("/admin/requests/a%2Fb%3A1?tenant=acme", "root", 404),
            (f"/admin/requests/a%2Fb%3A1?tenant={'x' * 1000}", "root", 404),
            (f"/admin/requests/{'x' * 1000}", "root", 404),
            ("/admin/requests/", "root", 404),
        ):
            refused = await rig.client.get(path, headers={"authorization": f"Bearer {key}"})
            assert refused.status_code == status, (path, refused.text)
            assert status == 200 or error_of(refused)["message"]


@pytest.fixture
def rig_of_admin() -> Callable[[], Any]:
    return lambda: gateway(settings=GatewaySettings(api_keys=("sk",)), auth=StaticKeys(("sk",), ("root",), ()))


async def test_a_request_that_was_sent_twice_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(FakeBackend):
        """Loses what it is sent first."""

        def has_group(self, avoid: Any = ()) -> bool:
            return True

        def send(self, part: Any, hint: Any) -> None:
            super().send(part, hint)
            if len(self.requests) == 1:
                self.drop(part.request.request_id)
                part.sender = b"group-a:5"
                part.lose("it is gone", "bystander")

    async with gateway(Twice(eos_token_ids=frozenset({EOS}))) as rig:
        answer = await rig.complete(max_tokens=2)
        await rig.settle()
        found = await rig.context.records.find(answer.headers["x-request-id"])
    assert found is not None and found.outcome == "length"
    said = [line for line in caplog.messages if "goes to another group" in line]
    assert said == [f"request {found.request_id} goes to another group: it is gone"], "by the id that all else has"
    first, second = found.prompts[0].attempts
    assert (first.group, first.why, first.course) == ("group-a", "bystander", None)
    assert second.why == "" and second.sent_s >= first.ended_s
    lines = explanation(found)
    assert any("with group-a, which ended its part: it was lost" in line for line in lines)
    assert any("until it was sent again" in line for line in lines)


async def test_the_verb(rig_of_admin: Any) -> None:
    async with rig_of_admin() as rig, served(rig.app) as url:
        sent = {"authorization": "Bearer sk", "x-request-id": "mine"}
        await rig.client.post("/v1/completions", json={"prompt": SAID, "max_tokens": 3}, headers=sent)
        await rig.settle()
        at = ("--url", url, "--api-key", "root")
        shown = await tandem("explain", "mine", *at)
        assert shown.exit_code == 0, shown
        assert shown.stdout.startswith("request mine: length after ") and "tenant default, model echo" in shown.stdout
        assert SAID not in shown.stdout
        assert '"request_id":"mine"' in (await tandem("explain", "mine", "--json", *at)).stdout
        assert (await tandem("explain", "mine", "--tenant", "default", *at)).stdout == shown.stdout
        assert 'of tenant "acme"' in str((await tandem("explain", "mine", "--tenant", "acme", *at)).exception)
        missing = await tandem("explain", "yours", *at)
        assert "No gateway remembers" in str(missing.exception)


async def tandem(*arguments: str) -> typer.testing.Result:
    return await asyncio.to_thread(invoked, arguments)


# ---- other gateways ----


@asynccontextmanager
async def two_gateways(
    redis: BackgroundClient, server: RedisServer, *, announced: bool
) -> AsyncIterator[tuple[RequestRecords, RequestRecords]]:
    """The records of two gateways that ask each other."""
    changes = [Changes(lambda: server.url, [keys.records_asked("s")]) for _ in range(2)]
    made: list[RequestRecords] = []
    asking: list[RecordQuestions] = []

    def ask(number: int) -> Callable[[str, str], Awaitable[bytes | None]]:
        return lambda request_id, tenant: asking[number].ask(request_id, tenant)

    for number, each in enumerate(changes):
        made.append(RequestRecords(gateway=f"g{number}", ask=ask(number)))
        announcements = each if announced else Announcements()
        asking.append(RecordQuestions(redis, "s", made[number].encoded, announcements))
        if announced:
            each.start()
    tasks = [asyncio.create_task(questions.run()) for questions in asking]
    try:
        yield made[0], made[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for each in changes:
            await each.close()


@pytest.mark.parametrize("announced", [True, False])
async def test_any_gateway_finds_it(
    redis: BackgroundClient, server: RedisServer, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_questions, "ANSWER_S", 20.0)
    async with two_gateways(redis, server, announced=announced) as (here, there):
        there.add(record("mine", tenant="acme"))
        there.add(record("mine", tenant="other"))
        here.add(record("mine", tenant="third"))
        here.add(record("own"))
        found = await asyncio.gather(
            *(here.find("mine", "acme") for _ in range(3)), there.find("mine"), here.find("own")
        )
        assert [one is not None and (one.request_id, one.tenant, one.gateway) for one in found] == [
            *[("mine", "acme", "")] * 3,
            ("mine", "other", "g1"),
            ("own", "", "g0"),
        ]
        there.add(record("yours", tenant="acme"))
        yours = await here.find("yours")
        assert yours is not None and yours.tenant == "acme", "whoever's it is"
        monkeypatch.setattr(record_questions, "ANSWER_S", 0.05)
        assert await here.find("nobody's") is None
    assert await redis.command("TTL", keys.records_asked("s")) > 0


async def test_without_redis_a_gateway_knows_its_own(server: RedisServer) -> None:
    client = patient(server)
    await client.close()
    away = BackgroundClient("redis://127.0.0.1:1", timeout_s=0.05)
    questions = RecordQuestions(away, "s", lambda *_: None, Announcements())
    records = RequestRecords(ask=questions.ask)
    records.add(record("own"))
    assert await records.find("own") is not None and await records.find("other") is None
    await away.close()


# ---- the words ----


def test_the_words_of_a_request_that_waited_and_moved() -> None:
    course = Course(
        queue_s=0.5,
        waited_s={"adapter": 0.4},
        prefill=Phase(0.25, steps=2, rows=6, tokens=900, device_s=0.2),
        decode=Phase(2.0, steps=40, rows=240, tokens=300, device_s=1.6),
        cached_tokens=16,
        num_drafts=40,
        num_accepted=30,
        num_preemptions=2,
        paused_s=0.75,
    )
    moved = record(
        "r1",
        tenant="acme",
        model="demo",
        adapter="pirate",
        prompt_tokens=100,
        cached_tokens=16,
        completion_tokens=41,
        first_token_s=1.5,
        duration_s=5.0,
        ready_s=0.1,
        admitted_s=0.2,
        num_prompts=1,
        gateway="g1",
        prompts=[
            PromptRecord(
                prompt_tokens=100,
                attempts=[
                    GroupAttempt(group="a", sent_s=0.2, begun_s=None, ended_s=0.5, why="suspect"),
                    GroupAttempt(group="b", sent_s=0.7, begun_s=1.25, ended_s=3.6, course=course),
                ],
            )
        ],
    )
    assert read_named(msgspec.json.encode(named(moved))) == moved, "by names as by positions"
    assert named(moved)["prompts"][0]["attempts"][1]["course"]["decode"]["steps"] == 40
    lines = explanation(moved)
    assert lines[0] == "request r1: stop after 5.000 s, first token after 1.500 s"
    assert "tenant acme, model demo, adapter pirate, 100 prompt tokens (16 cached), 41 output tokens" in lines[1]
    assert [line.split(None, 3) for line in lines[2:-1]] == [
        ["0.100", "s", "2.0%", "gateway: its body was read, its prompt rendered and tokenized"],
        ["0.100", "s", "2.0%", "gateway: the limits of its tenant"],
        [
            "0.300",
            "s",
            "6.0%",
            "with a, which ended its part: it was lost while it ran this request, which then ran alone",
        ],
        ["0.200", "s", "4.0%", "gateway: until it was sent again"],
        ["0.050", "s", "1.0%", "until a group was there, chosen and reached: b"],
        ["0.400", "s", "8.0%", "queue: its adapter was loaded"],
        ["0.100", "s", "2.0%", "queue: for a row and KV blocks"],
        [
            "0.250",
            "s",
            "5.0%",
            "prefill: 84 of 100 prompt tokens (16 in the prefix cache), 2 steps of 100.0 ms on the device, beside 2.0 "
            "others, with 894 more tokens of prompts and drafts",
        ],
        [
            "2.000",
            "s",
            "40.0%",
            "decode: 41 tokens, 40 steps of 40.0 ms on the device, beside 5.0 others, with 60 more tokens of prompts "
            "and drafts, 30 of 40 drafts accepted, preempted 2 times, 0.750 s of all choices without a row",
        ],
        ["0.100", "s", "2.0%", "network and gateway: its tokens, on their way"],
        ["1.400", "s", "28.0%", "gateway: to the client, which reads, and the end of the answer"],
    ]
    assert lines[-1].startswith("  most of it: decode: 41 tokens")


def test_the_words_of_refusals() -> None:
    early = explanation(record("r", outcome="rejected", status=400, code="invalid_json", duration_s=0.25))
    assert early[0] == "request r: rejected (400 invalid_json) after 0.250 s" and "refused before" in early[2]
    limited = explanation(record("r", outcome="rejected", status=429, code="slow_down", ready_s=0.25))
    assert "the limits of its tenant" in limited[-1]
    queued = Course(queue_s=0.75, waited_s={"grammar": 0.25})
    attempt = GroupAttempt(group="a", sent_s=0.0, ended_s=1.0, why="service_unavailable", course=queued)
    prompts = [PromptRecord(prompt_tokens=3, attempts=[attempt]), PromptRecord(prompt_tokens=3)]
    late = explanation(record("r", outcome="rejected", ready_s=0.0, admitted_s=0.0, num_prompts=2, prompts=prompts))
    assert "queue: its grammar was compiled" in late[2] and "queue: for a row" in late[3]
    assert explanation(record("r", ready_s=0.0, admitted_s=0.0, num_prompts=1))[2].endswith("not known")
