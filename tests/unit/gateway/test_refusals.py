"""Bad requests: each with its status, code and param, in the contract's shape, and the service alive afterwards."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from configs.schema import GatewaySettings
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import EOS, USER, VOCAB, Rig, error_of, events, gateway
from workers.errors import ContextLengthExceeded, GroupLost, QueueFull, RequestRefused

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETE)
ALL = (*BOTH, "/tokenize", "/detokenize")
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETE: {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"

RAW_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"nul", "invalid_json"),
    (b"[]", "invalid_json"),
    (b'"text"', "invalid_json"),
    (b"5", "invalid_json"),
    (b"{'a': 1}", "invalid_json"),
    (b'{"a": 1, "a": 2}', "invalid_json"),
    (b'{"metadata": {"a": 1, "a": 2}}', "invalid_json"),
    (b'{"a": NaN}', "invalid_json"),
    (b'{"a": -Infinity}', "invalid_json"),
    (b'{"a": 1e999}', "invalid_value"),
    (b'{"metadata": [1e400]}', "invalid_value"),
    (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json"),
    (b'{"a": ' + b"[" * 100_000, "invalid_json"),
    (b'{"a":' * 100_000, "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"),
    (b'{"\\udfff": 1}', "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
    (b'\xef\xbb\xbf{"prompt": "x"}', "invalid_json"),
    ('{"prompt": "x"}'.encode("utf-16"), "invalid_json"),
    (b'{"prompt": "a\nb"}', "invalid_json"),
]

COMMON_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"bogus": 1}, "bogus", UNSUPPORTED),
    ({"bogus": None}, "bogus", UNSUPPORTED),
    ({"": 1}, "", UNSUPPORTED),
    ({"model": 5}, "model", INVALID),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"max_tokens": -1}, "max_tokens", INVALID),
    ({"max_tokens": 1.5}, "max_tokens", INVALID),
    ({"max_tokens": "5"}, "max_tokens", INVALID),
    ({"max_tokens": True}, "max_tokens", INVALID),
    ({"max_tokens": 10**30}, "max_tokens", INVALID),
    ({"min_tokens": -1}, "min_tokens", INVALID),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", INVALID),
    ({"temperature": -0.1}, "temperature", INVALID),
    ({"temperature": 2.1}, "temperature", INVALID),
    ({"temperature": "hot"}, "temperature", INVALID),
    ({"top_p": 0}, "top_p", INVALID),
    ({"top_p": 1.1}, "top_p", INVALID),
    ({"top_k": -2}, "top_k", INVALID),
    ({"top_k": 2.5}, "top_k", INVALID),
    ({"min_p": 1.5}, "min_p", INVALID),
    ({"seed": 2**63}, "seed", INVALID),
    ({"seed": "x"}, "seed", INVALID),
    ({"stop": ""}, "stop", INVALID),
    ({"stop": ["a", ""]}, "stop", INVALID),
    ({"stop": ["a"] * 5}, "stop", INVALID),
    ({"stop": "x" * 257}, "stop", INVALID),
    ({"stop": [1]}, "stop[0]", INVALID),
    ({"stop": {"a": 1}}, "stop", INVALID),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", INVALID),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", INVALID),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", INVALID),
    ({"ignore_eos": 1}, "ignore_eos", INVALID),
    ({"n": 0}, "n", INVALID),
    ({"n": 129}, "n", INVALID),
    ({"n": 2, "best_of": 1}, "best_of", INVALID),
    ({"best_of": 129}, "best_of", INVALID),
    ({"best_of": 2, "stream": True}, "best_of", UNSUPPORTED),
    ({"stream": "yes"}, "stream", INVALID),
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"stream": True, "stream_options": {"bogus": True}}, "stream_options.bogus", UNSUPPORTED),
    ({"stream": True, "stream_options": {"include_usage": "y"}}, "stream_options.include_usage", INVALID),
    ({"presence_penalty": 2.5}, "presence_penalty", INVALID),
    ({"frequency_penalty": -2.5}, "frequency_penalty", INVALID),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"logit_bias": {"a": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"-1": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"٣": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]", INVALID),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", INVALID),
    ({"logit_bias": [1]}, "logit_bias", INVALID),
    ({"priority": 2**40}, "priority", INVALID),
    ({"cache_salt": ""}, "cache_salt", INVALID),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", INVALID),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", INVALID),
    ({"user": 5}, "user", INVALID),
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    ({"response_format": "text"}, "response_format", UNSUPPORTED),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", UNSUPPORTED),
    ({"prompt_logprobs": 1}, "prompt_logprobs", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"store": 0}, "store", UNSUPPORTED),
    ({"service_tier": "priority"}, "service_tier", UNSUPPORTED),
    ({"metadata": "x"}, "metadata", UNSUPPORTED),
    ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
    ({"guided_regex": "a*"}, "guided_regex", UNSUPPORTED),
    ({"chat_template": "{{ x }}"}, "chat_template", UNSUPPORTED),
]

CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", INVALID),
    ({"messages": None}, "messages", INVALID),
    ({"messages": "hi"}, "messages", INVALID),
    ({"messages": ["hi"]}, "messages[0]", INVALID),
    ({"messages": [{"content": "x"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "user"}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", UNSUPPORTED),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", INVALID),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0]",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio", UNSUPPORTED),
    ({"messages": USER * 2049}, "messages", INVALID),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages", INVALID),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls",
        INVALID,
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "messages", "context_length_exceeded"),
    ({"max_tokens": 511}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", INVALID),
    ({"logprobs": 5}, "logprobs", INVALID),
    ({"top_logprobs": 2}, "top_logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", UNSUPPORTED),
    ({"tools": [{}], "tool_choice": "auto"}, "tools", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
    ({"tool_choice": {"type": "function"}}, "tool_choice", UNSUPPORTED),
    ({"tools": [{}] * 129, "tool_choice": "none"}, "tools", INVALID),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", INVALID),
    ({"echo": True}, "echo", UNSUPPORTED),
    ({"reasoning_effort": "high"}, "reasoning_effort", UNSUPPORTED),
    ({"prompt": "x"}, "prompt", UNSUPPORTED),
]

COMPLETION_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", INVALID),
    ({"prompt": 5}, "prompt", INVALID),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": [[]]}, "prompt", INVALID),
    ({"prompt": ["a", 1]}, "prompt", INVALID),
    ({"prompt": [1, True]}, "prompt[1]", INVALID),
    ({"prompt": [1.5]}, "prompt[0]", INVALID),
    ({"prompt": [[1], "a"]}, "prompt", INVALID),
    ({"prompt": [VOCAB]}, "prompt", INVALID),
    ({"prompt": [-1]}, "prompt", INVALID),
    ({"prompt": [10**30]}, "prompt", INVALID),
    ({"prompt": [[0], [VOCAB]]}, "prompt", INVALID),
    ({"prompt": "", "add_special_tokens": False}, "prompt", INVALID),
    ({"prompt": ["a"] * 2049}, "prompt", INVALID),
    ({"prompt": ["a"] * 1025, "n": 2}, "n", INVALID),
    ({"prompt": "x" * 1000}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 100_000}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 600}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 512}, "prompt", "context_length_exceeded"),
    ({"logprobs": 21}, "logprobs", INVALID),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"logprobs": 1, "echo": True}, "logprobs", UNSUPPORTED),
    ({"max_completion_tokens": 5}, "max_completion_tokens", UNSUPPORTED),
    ({"messages": USER}, "messages", UNSUPPORTED),
]

OTHER_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/tokenize", {"messages": USER}, "prompt", INVALID),
    ("/tokenize", {"prompt": None}, "prompt", INVALID),
    ("/tokenize", {"prompt": ["a"]}, "prompt", INVALID),
    ("/tokenize", {"bogus": 1}, "bogus", UNSUPPORTED),
    ("/detokenize", {"tokens": None}, "tokens", INVALID),
    ("/detokenize", {"tokens": "1"}, "tokens", INVALID),
    ("/detokenize", {"tokens": [VOCAB]}, "tokens", INVALID),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", INVALID),
    ("/detokenize", {"prompt": "x"}, "prompt", UNSUPPORTED),
]

FIELD_CASES = [
    *((path, *case) for path in BOTH for case in COMMON_FIELDS),
    *((CHAT, *case) for case in CHAT_FIELDS),
    *((COMPLETE, *case) for case in COMPLETION_FIELDS),
    *OTHER_FIELDS,
]

NEUTRAL_FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"store": False},
    {"metadata": {"a": {"b": "c"}}},
    {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y"},
    {"parallel_tool_calls": True},
    {"service_tier": "auto"},
    {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "stop": [], "stop_token_ids": []},
    {"modalities": ["text"]},
    {"functions": [], "function_call": "none", "suffix": "", "structured_outputs": {}},
    {"temperature": 1, "top_p": 1, "top_k": 0, "seed": -5},
    {"stream": False, "n": 1, "best_of": 1, "logprobs": None, "stop": None, "prompt_logprobs": None},
    {"stop": "\u0000", "user": "\u0000"},
]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway that must still answer when the test is done."""
    async with gateway(settings=GatewaySettings(max_body_bytes=1_000_000)) as rig:
        yield rig
        for stream in (False, True):
            alive = await rig.chat(max_tokens=4, stream=stream)
            assert alive.status_code == 200
        assert not rig.backend.streams


@pytest.mark.parametrize("path", ALL)
async def test_bodies_that_are_no_json_objects(rig: Rig, path: str) -> None:
    for body, code in RAW_BODIES:
        answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, code), body[:60]
    assert not rig.backend.requests


@pytest.mark.parametrize(("path", "fields", "param", "code"), FIELD_CASES, ids=lambda v: str(v)[:50])
async def test_fields_are_refused_by_name(path: str, fields: dict[str, Any], param: str, code: str) -> None:
    async with gateway() as rig:
        answer = await rig.client.post(path, json={**MINIMAL[path], **fields})
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
        assert error["type"] == "invalid_request_error"
        assert not rig.backend.requests


ROLES = ("system", "developer", "user", "assistant", "tool")
CALL = {"id": "c", "type": "method", "function": {"name": "f", "arguments": "{}"}}
ENUMERATED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", ROLES),
    ({"messages": [*USER, {"role": 5, "content": "x"}]}, "messages[1].role", ROLES),
    ({"messages": [{"content": "x"}]}, "messages[0].role", ROLES),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]", ("text",)),
    ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type", ("text",)),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", ("text",)),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0].type", ("function",)),
    ({"tool_choice": "required"}, "tool_choice", ("none", "auto")),
    ({"response_format": {"type": "json_object"}}, "response_format", ("type", "text")),
    ({"service_tier": "priority"}, "service_tier", ("auto", "default")),
    ({"reasoning_effort": "high"}, "reasoning_effort", ("none",)),
    ({"verbosity": "high"}, "verbosity", ("medium",)),
]


@pytest.mark.parametrize(("fields", "param", "values"), ENUMERATED, ids=lambda v: str(v)[:50])
async def test_a_field_with_few_values_lists_them(fields: dict[str, Any], param: str, values: tuple[str, ...]) -> None:
    async with gateway() as rig:
        answer = await rig.chat(**fields)
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, param), error
        for value in values:
            assert f'"{value}"' in error["message"]


@pytest.mark.parametrize("path", BOTH)
async def test_neutral_values_are_accepted(rig: Rig, path: str) -> None:
    for fields in NEUTRAL_FIELDS:
        answer = await rig.client.post(path, json={**MINIMAL[path], "max_tokens": 2, **fields})
        assert answer.status_code == 200, (fields, answer.text)


async def test_tools_may_be_shown_when_none_is_to_be_chosen(rig: Rig) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (await rig.chat(tools=tools, tool_choice="none", max_tokens=2)).status_code == 200
    assert (await rig.chat(tools=[], tool_choice="auto", max_tokens=2)).status_code == 200


@pytest.mark.parametrize("path", BOTH)
async def test_unknown_models(rig: Rig, path: str) -> None:
    for name in ("nobody", "", "x" * 1000):
        answer = await rig.client.post(path, json={**MINIMAL[path], "model": name})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "application/vnd.x+json"}, 200),
        ({}, 200),
    ],
)
async def test_content_types(rig: Rig, headers: dict[str, str], status: int) -> None:
    body = json.dumps({**MINIMAL[COMPLETE], "max_tokens": 1}).encode()
    if headers.get("content-encoding") == "gzip":
        body = gzip.compress(body)
    answer = await rig.client.post(COMPLETE, content=body, headers=headers)
    assert answer.status_code == status
    if status != 200:
        error_of(answer)


async def test_bodies_have_a_size_limit(rig: Rig) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 500_000

    for content in (b" " * 1_000_001, chunks()):
        answer = await rig.client.post(COMPLETE, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "content_too_large")


async def test_headers_have_a_size_limit(rig: Rig) -> None:
    answer = await rig.client.get("/livez", headers={"x-much": "x" * 40_000})
    assert answer.status_code == 431
    error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/livez", 405),
        ("PUT", "/tokenize", 405),
    ],
)
async def test_routes_and_methods_that_are_not_there(rig: Rig, method: str, path: str, status: int) -> None:
    answer = await rig.client.request(method, path)
    assert answer.status_code == status
    error_of(answer)
    assert ("allow" in answer.headers) == (status == 405)


async def test_chat_without_a_template() -> None:
    async with gateway(template=None) as rig:
        answer = await rig.chat()
        assert (answer.status_code, error_of(answer)["param"]) == (400, "messages")


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


async def test_request_ids_are_echoed_made_safe_or_made_up(rig: Rig) -> None:
    async def sent(request_id: bytes | None) -> str:
        headers = [(b"x-request-id", request_id)] if request_id is not None else []
        answer = await rig.client.get("/nowhere", headers=headers)
        found: str = answer.headers["x-request-id"]
        return found

    assert await sent(b"mine-1.2:3/4_5") == "mine-1.2:3/4_5"
    assert await sent(b"a b\xffc<script>\t") == "abcscript"
    assert await sent(b"x" * 300) == "x" * 128
    assert len({await sent(None), await sent(None), await sent(b"\xff \t")}) == 3


async def test_eos_first_gives_an_empty_answer() -> None:
    backend = FakeBackend(script=lambda request, choice: [EOS], eos_token_ids=frozenset({EOS}))
    async with gateway(backend) as rig:
        assert (await rig.chat()).json()["choices"][0]["message"]["content"] == ""
        chunks = events((await rig.chat(stream=True)).text)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "stop"]


async def test_a_bug_after_the_first_byte_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: object, choice: int) -> list[int]:
        return [97, "bug", 97]  # type: ignore[list-item]

    async with gateway(FakeBackend(script=script)) as rig:
        *_, error, done = events((await rig.complete(stream=True)).text)
        assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
        assert rig.backend.requests[0].request_id in caplog.text
