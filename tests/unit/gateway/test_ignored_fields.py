"""Fields that cannot change an answer: each is accepted, changes nothing and is named; --strict-fields refuses it."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.cluster.gateway.anthropic.messages_hints import COUNT_HINTS
from tandem.cluster.gateway.anthropic.messages_hints import HINTS as MESSAGES_HINTS
from tandem.cluster.gateway.schemas.ignored_fields import Ignorables
from tandem.cluster.gateway.schemas.openai_hints import CHAT_HINTS, GENERATION_HINTS, TEXT_HINTS, TOKENIZE_HINTS
from tandem.configs.schema import GatewaySettings
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import CHAT, COMPLETE, EMBED, MODEL, USER, Rig, events, gateway
from tests.unit.gateway.test_tool_calls import FORMATS, SETTINGS, STRICT, TEMPLATE, saying

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HEADER = "x-tandem-ignored"
FUNCTION = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "clock", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "noon"}]}],
    },
]
TALK: dict[str, Any] = {"messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}]}
BLOCK_TALK: dict[str, Any] = {
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "Be kind."}],
    "tools": [{"name": "clock", "input_schema": FUNCTION["parameters"]}],
}
ROUTES: dict[str, tuple[dict[str, Any], Ignorables]] = {
    CHAT: ({**TALK, "max_tokens": 2, "seed": 1}, CHAT_HINTS),
    COMPLETE: ({"prompt": "x", "max_tokens": 2, "seed": 1}, GENERATION_HINTS),
    EMBED: ({"input": "x"}, TEXT_HINTS),
    "/tokenize": (TALK, TOKENIZE_HINTS),
    "/detokenize": ({"tokens": [104]}, TEXT_HINTS),
    MESSAGES: ({**BLOCK_TALK, "max_tokens": 2}, MESSAGES_HINTS),
    COUNT: (BLOCK_TALK, COUNT_HINTS),
}
VALUES: tuple[Any, ...] = (True, "x", {"a": [1]}, [{"b": None}], 0)


def with_field(body: Any, place: str, name: str, value: Any) -> Any:
    """A body that has a field at every object of a place."""
    if not place:
        return {**body, name: value}
    head, _, rest = place.partition(".")
    key = head.removesuffix("[]")
    if key not in body:
        return body if key != "stream_options" else {**body, "stream": True, key: {name: value}}
    if not head.endswith("[]"):
        return {**body, key: with_field(body[key], rest, name, value)}
    if not isinstance(body[key], list):
        return body
    return {**body, key: [with_field(one, rest, name, value) for one in body[key]]}


def fields_of(path: str) -> Iterator[tuple[str, str, bool]]:
    """The name, the place and whether strict services take it, of each ignored field of a route."""
    for place, entries in ROUTES[path][1].items():
        for name, entry in entries.items():
            yield name, place, entry.is_usual


def rig_of(settings: GatewaySettings = SETTINGS, backend: FakeBackend | None = None) -> Any:
    return gateway(backend or saying("ok"), settings=settings, template=TEMPLATE, text=FORMATS)


def asked(rig: Rig) -> Any:
    """The last request to a group, without what differs between two that are alike."""
    if not rig.backend.requests:
        return None
    request = rig.backend.requests[-1]
    return request.prompt_token_ids, request.sampling.max_tokens, request.sampling.temperature, request.sampling.stop


@pytest.mark.parametrize("path", ROUTES)
async def test_each_is_named_and_changes_nothing(path: str) -> None:
    body, wrong = ROUTES[path][0], []
    async with rig_of() as rig:
        plain = await rig.client.post(path, json=body)
        assert plain.status_code == 200 and HEADER not in plain.headers, plain.text
        usual = asked(rig)
        for i, (name, place, _) in enumerate(fields_of(path)):
            sent = with_field(body, place, name, VALUES[i % len(VALUES)])
            answer = await rig.client.post(path, json=sent)
            said = f"{place}.{name}" if place else name
            if (answer.status_code, answer.headers.get(HEADER), asked(rig)) != (200, said, usual):
                wrong.append((said, answer.status_code, answer.headers.get(HEADER), answer.text[:200]))
            absent = await rig.client.post(path, json=with_field(body, place, name, None))
            if (absent.status_code, absent.headers.get(HEADER)) != (200, None):
                wrong.append((said, "null", absent.text[:200]))
    assert not wrong


@pytest.mark.parametrize("path", ROUTES)
async def test_strict_services_refuse_each_by_name(path: str) -> None:
    body, wrong = ROUTES[path][0], []
    async with rig_of(STRICT) as rig:
        for name, place, is_usual in fields_of(path):
            answer = await rig.client.post(path, json=with_field(body, place, name, {"a": 1}))
            if is_usual:
                fine = answer.status_code == 200 and HEADER in answer.headers
            else:
                fine = answer.status_code == 400 and name in answer.text and HEADER not in answer.headers
            if not fine:
                wrong.append((place, name, answer.status_code, answer.text[:200]))
    assert not wrong


NOTHING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"store": False, "metadata": {}, "service_tier": "auto", "verbosity": "medium", "prompt_cache_key": ""}),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}}),
    (CHAT, {"stream_options": {}, "length_penalty": 1, "spaces_between_special_tokens": True}),
    (MESSAGES, {"service_tier": "auto", "speed": "standard", "context_management": {"edits": []}}),
]


@pytest.mark.parametrize(("path", "fields"), NOTHING)
async def test_values_that_ask_for_nothing_need_no_word(path: str, fields: dict[str, Any]) -> None:
    async with rig_of(STRICT) as rig:
        answer = await rig.client.post(path, json={**ROUTES[path][0], **fields})
        assert answer.status_code == 200 and HEADER not in answer.headers


BY_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "max"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"thinking_token_budget": 9}, "thinking_token_budget"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"tools": TALK["tools"], "tool_choice": "auto"}, "tools"),
    ({"messages": [*USER, {"role": "assistant", "content": "x", "annotations": [{}], "id": "a"}, *USER]},
     "messages[].id, messages[].annotations"),
    ({"messages": [*USER, {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_details": [{}]}, *USER]},
     "messages[].reasoning_details"),
]  # fmt: skip
"""What this model's template, or a service without a reasoning parser, has no use for."""


@pytest.mark.parametrize(("fields", "names"), BY_MODEL, ids=lambda value: str(value)[:40])
async def test_switches_of_what_is_not_there_are_ignored(fields: dict[str, Any], names: str) -> None:
    for settings in (GatewaySettings(), GatewaySettings(strict_fields=True)):
        async with gateway(saying("ok"), settings=settings) as rig:
            answer = await rig.chat(**fields)
            if settings.strict_fields:
                assert answer.status_code == 400 and names.partition(",")[0].rpartition(".")[2] in answer.text
            else:
                assert answer.status_code == 200, answer.text
                assert set(answer.headers[HEADER].split(", ")) == set(names.split(", "))


async def test_null_asks_for_nothing_whatever_its_name() -> None:
    """As clients send it that dump their settings."""
    absent = {"bogus": None, "web_search_options": None, "tools": None, "reasoning": None, "usage": None}
    for settings, status in ((GatewaySettings(), 200), (GatewaySettings(strict_fields=True), 400)):
        async with gateway(saying("ok"), settings=settings) as rig:
            for path, body in ((CHAT, {"messages": USER}), (MESSAGES, {"messages": USER, "max_tokens": 9})):
                answer = await rig.client.post(path, json={**body, **absent})
                assert answer.status_code == status and HEADER not in answer.headers


CHANGING: list[dict[str, Any]] = [
    {"bogus\r\nx-evil": 1},
    {"extra_body": {"top_k": 1}},
    {"logprob_token_ids": [1]},
    {"repetition_detection": {}},
    {"vllm_xargs": {"a": 1}},
    {"regex": "a"},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"chat_template_kwargs": {"persona": "x"}},
    {"messages": [{"role": "assistant", "content": "x", "refusal": "no"}, *USER]},
    {"messages": [{"role": "assistant", "content": "x", "reasoning_details": [{"text": "y"}]}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
    {"tools": [{"type": "function", "function": {**FUNCTION, "examples": []}}], "tool_choice": "none"},
    {"stream": True, "stream_options": {"every": 2}},
    {"max_tokens": -1},
]


@pytest.mark.parametrize("fields", CHANGING, ids=lambda value: str(value)[:40])
async def test_what_might_change_the_answer_is_refused(fields: dict[str, Any]) -> None:
    async with gateway(saying("ok")) as rig:
        answer = await rig.chat(**fields)
        assert answer.status_code == 400 and HEADER not in answer.headers
        assert not rig.backend.requests


async def test_streams_and_the_log_name_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tandem.gateway")
    async with rig_of() as rig:
        answer = await rig.chat(stream=True, store=True, metadata={"secret": "text"}, model=MODEL)
        assert answer.headers[HEADER] == "store, metadata" and events(answer.text)[-1] == "[DONE]"
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert line.endswith("ignored store, metadata") and "secret" not in line
