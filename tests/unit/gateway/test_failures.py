"""What goes wrong behind the gateway: a status before the first byte, the last event after it."""

import asyncio
from typing import Any

import pytest

from tandem.workers.messages.errors import ContextLengthExceeded, GroupLost, QueueFull, RequestRefused
from tandem.workers.messages.step import NOTHING_LEFT
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import EOS, error_of, events, gateway

REFUSALS = [
    (QueueFull("the queue is full"), 429, "slow_down"),
    (RequestRefused("over quota", code="rate_limit_exceeded", status=429), 429, "rate_limit_exceeded"),
    (RequestRefused("no money", code="insufficient_quota", status=429), 429, "insufficient_quota"),
    (RequestRefused("no group", code="service_unavailable", status=503), 503, "service_unavailable"),
    (RequestRefused("twice", code="request_poisoned", status=500), 500, "request_poisoned"),
    (GroupLost("gone"), 503, "service_unavailable"),
    (ValueError("a bug"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), REFUSALS, ids=lambda v: str(v)[:20])
async def test_what_the_backend_refuses_has_its_real_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    async with gateway(FakeBackend(refuse=error)) as rig:
        answer = await rig.chat(stream=stream)
        body = error_of(answer)
        assert (answer.status_code, body["code"]) == (status, code)
        assert "a bug" not in body["message"]
        assert answer.headers["content-type"] == "application/json"
        if code == "insufficient_quota":
            assert answer.headers["x-should-retry"] == "false"
        elif status in (429, 503):
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        says_when = f". Try again in {answer.headers.get('retry-after')} s." in body["message"]
        assert says_when == (status == 429 and code != "insufficient_quota")
        await rig.settle()
        (row,) = rig.ledger.rows
        assert row.terminal == ("error" if status == 500 or isinstance(error, GroupLost) else "rejected")
        assert row.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("chat", "param"), [(True, "messages"), (False, "prompt")])
async def test_the_engines_word_for_a_prompt_is_the_clients(chat: bool, param: str, stream: bool) -> None:
    async with gateway(backend := FakeBackend(manual=True)) as rig:
        asking = asyncio.create_task(rig.chat(stream=stream) if chat else rig.complete(stream=stream))
        await backend.submitted.wait()
        (accepted,) = backend.streams.values()
        accepted.put(ContextLengthExceeded("its KV cache holds 4", "prompt"))
        answer = await asking
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_group_before_the_first_token_is_a_status(stream: bool) -> None:
    async with gateway(FakeBackend(lose_at_position=0)) as rig:
        answer = await rig.complete(stream=stream)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize(
    ("backend", "code"),
    [
        (FakeBackend(lose_at_position=3), "service_unavailable"),
        (FakeBackend(fail_at_position=3), "internal_error"),
    ],
    ids=["group lost", "row failed"],
)
async def test_errors_after_the_first_byte_are_the_last_event(backend: FakeBackend, code: str) -> None:
    async with gateway(backend) as rig:
        answer = await rig.complete(stream=True, max_tokens=10)
        assert answer.status_code == 200
        *chunks, error, done = events(answer.text)
        assert len(chunks) >= 2
        assert error["error"]["code"] == code
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert done == "[DONE]"
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "error"
        assert rig.ledger.rows[0].usage.completion_tokens >= 3


@pytest.mark.parametrize(
    ("fields", "param"), [({"allowed_token_ids": [97]}, "allowed_token_ids"), ({"bad_words": ["a"]}, None)]
)
async def test_a_request_that_forbids_every_token_is_the_clients_error(
    fields: dict[str, Any], param: str | None
) -> None:
    async with gateway(FakeBackend(fail_at_position=0, fail_with=NOTHING_LEFT)) as rig:
        for stream in (False, True):
            answer = await rig.complete(stream=stream, **fields)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")
            assert (error_of(answer)["param"], error_of(answer)["message"]) == (param, NOTHING_LEFT)
        await rig.settle()
        assert [(row.terminal, row.usage.completion_tokens) for row in rig.ledger.rows] == [("rejected", 0)] * 2


async def test_a_stream_that_comes_to_forbid_every_token_ends_with_the_clients_error() -> None:
    async with gateway(FakeBackend(fail_at_position=3, fail_with=NOTHING_LEFT)) as rig:
        *chunks, error, done = events((await rig.complete(stream=True, max_tokens=10, bad_words=["a"])).text)
        assert len(chunks) >= 2 and done == "[DONE]"
        assert (error["error"]["code"], error["error"]["type"]) == ("invalid_value", "invalid_request_error")
        await rig.settle()
        assert rig.ledger.rows[0].terminal == "error"


async def test_eos_first_gives_an_empty_answer() -> None:
    backend = FakeBackend(script=lambda request, choice: [EOS], eos_token_ids=frozenset({EOS}))
    async with gateway(backend) as rig:
        assert (await rig.chat()).json()["choices"][0]["message"]["content"] == ""
        chunks = events((await rig.chat(stream=True)).text)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "stop"]


async def test_a_bug_after_the_first_byte_is_logged_and_sent(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: object, choice: int) -> list[int]:
        return [97, "bug", 97]  # type: ignore[list-item]

    async with gateway(FakeBackend(script=script)) as rig:
        *_, error, done = events((await rig.complete(stream=True)).text)
        assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
        assert rig.backend.requests[0].public_id in caplog.text
