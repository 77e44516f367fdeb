"""The Responses API and Anthropic's with bodies and answers made up by hypothesis: never a 5xx, every refusal in the
API's own shape, a stream says what the whole answer says, the gateway alive afterwards."""

import json
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway import test_messages, test_responses
from tests.unit.gateway.rig import USER, Rig, error_of
from tests.unit.gateway.test_fuzz import RELAXED, VALUES
from tests.unit.gateway.test_messages import COUNT, TOOL, message_of, refusal_of, tooled
from tests.unit.gateway.test_responses import WEATHER
from tests.unit.gateway.test_tool_calls import CALL, saying

RESPONSES, MESSAGES = test_responses.PATH, test_messages.PATH
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi", "max_output_tokens": 3},
    MESSAGES: {"messages": USER, "max_tokens": 3},
    COUNT: {"messages": USER},
}
NAMES = [
    *("input", "instructions", "reasoning", "text", "tools", "tool_choice", "metadata", "previous_response_id"),
    *("messages", "system", "thinking", "output_config", "stop_sequences", "stream", "include", "bogus"),
]
KINDS = [
    *("message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "reasoning_text"),
    *("text", "thinking", "tool_use", "tool_result", "image", "function", "custom", "enabled", "auto", "tool"),
]
KEYS = [
    *("role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "status", "parameters"),
    *("input", "input_schema", "tool_use_id", "is_error", "cache_control", "budget_tokens", "format", "schema"),
]
INNER = st.one_of(st.sampled_from(["user", "assistant", "system", "{}", "c1", "weather"]), VALUES)
OBJECTS = st.recursive(
    st.builds(
        lambda kind, fields: {"type": kind, **fields},
        st.sampled_from(KINDS),
        st.dictionaries(st.sampled_from(KEYS), INNER, max_size=5),
    ),
    lambda inner: st.builds(
        lambda role, parts, fields: {"role": role, "content": parts, **fields},
        st.sampled_from(["user", "assistant", "developer", "tool"]),
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=1),
    ),
    max_leaves=4,
)
MUTATIONS = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(VALUES, OBJECTS, st.lists(OBJECTS, max_size=4)), max_size=3
)
PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", CALL, "<call>weather {", "<call>", " ", "\n\n", "Löw 😀", '"}', "x"]),
    max_size=8,
).map("".join)


def check(answer: httpx.Response, path: str) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error_of(answer) if path == RESPONSES else refusal_of(answer)


@RELAXED
@given(st.sampled_from(sorted(BODIES)), st.lists(MUTATIONS, min_size=1, max_size=6))
async def test_mutated_bodies_never_hurt(path: str, mutations: list[dict[str, Any]]) -> None:
    async with tooled(saying("ok")) as rig:
        for mutation in mutations:
            body = json.dumps({**BODIES[path], **mutation}).encode()
            check(await rig.client.post(path, content=body, headers={"content-type": "application/json"}), path)
        assert (await rig.client.post(path, json=BODIES[path])).status_code == 200


@RELAXED
@given(st.sampled_from(sorted(BODIES)), st.lists(st.binary(max_size=200), min_size=1, max_size=8))
async def test_random_bytes_never_hurt(path: str, bodies: list[bytes]) -> None:
    async with tooled(saying("ok")) as rig:
        for body in bodies:
            answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            check(answer, path)


@RELAXED
@given(PIECES, st.integers(1, 9), st.integers(1, 120))
async def test_a_stream_says_what_the_whole_answer_says(text: str, tokens_per_step: int, limit: int) -> None:
    async with tooled(saying(text, tokens_per_step=tokens_per_step)) as rig:
        assert await messages(rig, limit, stream=True) == await messages(rig, limit, stream=False)
        assert await responses(rig, limit, stream=True) == await responses(rig, limit, stream=False)


async def messages(rig: Rig, limit: int, *, stream: bool) -> dict[str, Any]:
    """The answer, without ids. In a stream arguments that were cut off are what they are; a whole answer has none."""
    body = {"messages": USER, "max_tokens": limit, "tools": [TOOL], "stream": stream}
    answer = await rig.client.post(MESSAGES, json=body)
    message = message_of(test_messages.sse(answer.text)) if stream else answer.json()
    del message["id"]
    for block in message["content"]:
        block.pop("id", None)
    return message


async def responses(rig: Rig, limit: int, *, stream: bool) -> dict[str, Any]:
    body = {"input": "hi", "max_output_tokens": limit, "tools": [WEATHER], "stream": stream}
    answer = await rig.client.post(RESPONSES, json=body)
    if not stream:
        response = answer.json()
    else:
        *events, last = test_responses.sse(answer.text)
        response = last["response"]
        test_responses.check_events([*events, {**last, "type": "response.completed"}], response["output"])
    times = {name: response[name] for name in ("output", "usage", "status", "incomplete_details")}
    for item in times["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return times
