"""Anthropic's Messages API: bodies, refusals in its form, whole and streamed answers of text, thinking and calls."""

import json
from typing import Any

import httpx
import pytest

from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import CONTEXT, MODEL, USER, Rig, gateway
from tests.unit.gateway.test_responses import FORMATS, SETTINGS, THOUGHT, prompt_of
from tests.unit.gateway.test_tool_calls import CALL, TEMPLATE, saying

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def tooled(backend: FakeBackend, **more: Any) -> Any:
    return gateway(backend, settings=SETTINGS, template=TEMPLATE, text=FORMATS, **more)


async def ask(rig: Rig, path: str = PATH, **body: Any) -> httpx.Response:
    limit = {"max_tokens": 100} if path == PATH else {}
    return await rig.client.post(path, json={"messages": USER, **limit, **body})


def refusal_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after checking Anthropic's shape."""
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "message"} and error["message"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return error


def sse(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def test_a_text_is_answered() -> None:
    async with gateway(saying("Grüße", cached_tokens=3)) as rig:
        answer = await ask(rig, system="Be kind.", metadata={"user_id": "u"}, model=MODEL)
        body = answer.json()
        assert answer.status_code == 200 and answer.headers["request-id"] == answer.headers["x-request-id"]
        assert prompt_of(rig) == "system:Be kind.user:hi"
        prompt = len(rig.backend.requests[0].prompt_token_ids)
        assert body.pop("id").startswith("msg_")
        assert body == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Grüße", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - 3,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3,
                "output_tokens": 8,
            },
        }


async def test_blocks_become_the_turns_of_a_conversation() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Löw"}, **cached}
    second = {"type": "tool_use", "id": "t2", "name": "weather", "input": {}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look.", "citations": None},
                call,
                second,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Rules.", **cached}]
    async with tooled(saying("ok")) as rig:
        answer = await ask(rig, messages=messages, system=system, tools=[{**TOOL, **cached}])
        assert answer.status_code == 200, answer.text
        assert prompt_of(rig).endswith(
            "system:Rules.user:a\nb"
            'assistant:(hm)I look.weather{"city": "Löw"}weather{}'
            "tool:suntool:Error: no cityuser:So?"
        )
        counted = await ask(rig, COUNT, messages=messages, system=system, tools=[TOOL])
        assert counted.json() == {"input_tokens": len(rig.backend.requests[0].prompt_token_ids)}


async def test_the_input_of_an_echoed_call_may_be_json_text_or_nothing() -> None:
    call = {"type": "tool_use", "name": "weather"}
    given = [{}, {"input": None}, {"input": ""}, {"input": {}}, {"input": '{"city": "Löw"}'}]
    uses = [{**call, "id": f"t{i}", **one} for i, one in enumerate(given)]
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": None} for one in uses]
    turns = [*USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    async with tooled(saying("ok")) as rig:
        answer = await ask(rig, messages=turns)
        assert answer.status_code == 200, answer.text
        assert prompt_of(rig) == "user:hiassistant:" + "weather{}" * 4 + 'weather{"city": "Löw"}' + "tool:" * 5
        uses[0]["input"] = '{"city'
        refused = await ask(rig, messages=turns)
        assert refused.status_code == 400 and refusal_of(refused)["message"].startswith("messages[1]"), refused.text


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
async def test_a_stream_says_what_the_whole_answer_says(tokens_per_step: int) -> None:
    text = f"{THOUGHT}\n\nLook: {CALL}{CALL}"
    async with tooled(saying(text, tokens_per_step=tokens_per_step, cached_tokens=2)) as rig:
        whole = (await ask(rig, tools=[TOOL], max_tokens=300)).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["content"][0] == {"type": "thinking", "thinking": "Hm, a city.", "signature": ""}
        assert whole["content"][2]["input"] == {"city": "Löw"}
        assert whole["content"][2]["id"] != whole["content"][3]["id"]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        streamed = message_of(sse((await ask(rig, tools=[TOOL], max_tokens=300, stream=True)).text))
        for message in (whole, streamed):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
        assert streamed == whole


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes, as Anthropic's client gathers it."""
    start, ping, *rest, delta, stop = events
    assert [one["type"] for one in (start, ping, delta, stop)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["usage"]["output_tokens"] == 0
    arguments = ""
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            block, kind = message["content"][event["index"]], event["delta"].pop("type")
            ((name, text),) = event["delta"].items()
            assert kind == {"text": "text_delta", "thinking": "thinking_delta"}.get(block["type"], "input_json_delta")
            arguments += text if block["type"] == "tool_use" else ""
            if block["type"] != "tool_use":
                block[name] += text
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = parsed(arguments)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def parsed(arguments: str) -> Any:
    """The arguments of a call; {} where they were cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["XX", "two"]}, "stop_sequence", "two"),
    ],
)
async def test_why_it_ends(body: dict[str, Any], reason: str, sequence: str | None, stream: bool) -> None:
    async with gateway(saying("one two three")) as rig:
        answer = await ask(rig, **body, stream=stream)
        message = message_of(sse(answer.text)) if stream else answer.json()
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        text = {"end_turn": "one two three", "max_tokens": "one", "stop_sequence": "one "}[reason]
        assert message["content"][0]["text"] == text


async def test_a_call_that_is_cut_off_is_no_call_to_run() -> None:
    async with tooled(saying(CALL, ends=False)) as rig:
        message = (await ask(rig, tools=[TOOL], max_tokens=12)).json()
        assert message["stop_reason"] == "max_tokens"


async def test_thinking_and_choices_of_tools_reach_the_model() -> None:
    async with tooled(saying("x")) as rig:
        thinking = {"type": "enabled", "budget_tokens": 20}
        assert (await ask(rig, thinking=thinking)).status_code == 200
        assert prompt_of(rig).endswith("<think>")
        budget = rig.backend.requests[-1].sampling.thinking_budget
        assert budget is not None and budget.tokens == 20
        assert (await ask(rig, thinking={"type": "disabled"})).status_code == 200
        assert prompt_of(rig).endswith("!")
        assert (await ask(rig, thinking={"type": "adaptive"})).status_code == 200
        assert prompt_of(rig).endswith("hi")
        assert (await ask(rig, output_config={"effort": "high"})).status_code == 200
        assert prompt_of(rig).endswith("<think>")
        for choice in ("auto", "none"):
            chosen = {"type": choice, "disable_parallel_tool_use": True} if choice == "auto" else {"type": choice}
            assert (await ask(rig, tools=[TOOL], tool_choice=chosen)).status_code == 200
        sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 5}
        assert (await ask(rig, **sampling)).status_code == 200
        params = rig.backend.requests[-1].sampling
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 5)


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    async with gateway() as rig:
        neutral = {"service_tier": "auto", "speed": "standard", "mcp_servers": [], "container": None, "thinking": None}
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        body = {"messages": USER, "max_tokens": 1, "cache_control": {"type": "ephemeral"}, **neutral}
        answer = await rig.client.post(PATH, json=body, headers=headers)
        assert answer.status_code == 200, answer.text


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


def calling(*turns: Any) -> dict[str, Any]:
    """A conversation in which a call of the id t1 is behind the first question. turns: behind it."""
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": [*USER, {"role": "assistant", "content": [call]}, *said]}


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sun"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bogus": 1}, "bogus"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (blocks({"type": "image", "source": {}}), "messages[0].content[0]"),
    (blocks({"type": "document", "source": {}}), "messages[0].content[0]"),
    (blocks({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0]"),
    (blocks({"type": "web_search_tool_result", "tool_use_id": "s"}), "messages[0].content[0]: the type"),
    (blocks({"type": "server_tool_use", "id": "s"}, role="assistant"), "messages[0].content[0]: the type server_tool"),
    (blocks({"type": "compaction", "content": "x"}, role="assistant"), "messages[0].content[0]: the type"),
    (blocks({"type": "text", "text": "x", "citations": [{}]}), "messages[0].content[0].citations"),
    (blocks({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages[0].content[0]"),
    (blocks({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "messages[0].content"),
    (
        blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}),
        "messages[0].content[0].content[0]",
    ),
    (calling("And?"), 'messages[1].content[0]: the tool_use block "t1" has no tool_result'),
    (calling("And?", "Well", [RESULT]), "messages[1].content[0]: the tool_use"),
    (calling([{**RESULT, "tool_use_id": "t2"}]), "messages[1].content[0]: the tool_use"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "a b"}], "tool_choice": {"type": "none"}}, "tools[0].name"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"speed": "fast"}, "speed"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
async def test_it_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with gateway(settings=GatewaySettings(strict_fields=True)) as rig:
        answer = await ask(rig, **body)
        error = refusal_of(answer)
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert param in error["message"]
        assert not rig.backend.requests


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_call_may_be_answered_late_in_its_turn_or_not_yet(path: str) -> None:
    """Messages of one role in a row are one turn, and the last call waits for its result."""
    async with gateway() as rig:
        asked = calling("One moment", "Still there?")["messages"]
        late = [*asked[:3], {"role": "user", "content": [RESULT]}, {"role": "assistant", "content": "Sun"}, *USER]
        for messages in (late, calling()["messages"]):
            assert (await ask(rig, path, messages=messages)).status_code == 200
        refused = await ask(rig, path, messages=asked)
        assert (refused.status_code, refusal_of(refused)["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("content", ["Once ", [{"type": "text", "text": "Once "}]])
async def test_a_last_message_of_the_assistant_is_continued(content: Any) -> None:
    """As Anthropic has it: the answer is what follows the text, and the count is that of the same prompt."""
    async with gateway(saying("upon")) as rig:
        messages = [*USER, {"role": "assistant", "content": content}]
        answer = (await ask(rig, messages=messages)).json()
        assert [block["text"] for block in answer["content"]] == ["upon"]
        assert prompt_of(rig).endswith("assistant:Once ")
        counted = (await ask(rig, COUNT, messages=messages)).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]


@pytest.mark.parametrize("field", ["max_tokens", "stream", "temperature", "metadata", "service_tier"])
async def test_fields_of_answers_are_none_of_counts(field: str) -> None:
    async with gateway() as rig:
        answer = await ask(rig, COUNT, **{field: 1})
        assert answer.status_code == 400 and field in refusal_of(answer)["message"]


async def test_refusals_before_the_handler_have_anthropics_form() -> None:
    async with gateway(settings=GatewaySettings(api_keys=("sk-x",), max_body_bytes=1000)) as rig:
        right = {"x-api-key": "sk-x"}

        async def sent(path: str = PATH, method: str = "POST", **more: Any) -> tuple[int, str]:
            options = {"json": {"messages": USER, "max_tokens": 1}, "headers": right, **more}
            answer = await rig.client.request(method, path, **options)
            return (answer.status_code, refusal_of(answer)["type"]) if answer.status_code != 200 else (200, "")

        assert await sent() == (200, "")
        assert await sent(headers={"authorization": "Bearer sk-x"}) == (200, "")
        assert await sent(headers={"authorization": "Bearer sk-y", **right}) == (401, "authentication_error")
        assert await sent(headers={}) == (401, "authentication_error")
        assert "`x-api-key: KEY`" in refusal_of(await ask(rig))["message"]
        assert await sent(headers={"x-api-key": "sk-y"}) == (401, "authentication_error")
        assert await sent(f"{PATH}/batches") == (404, "not_found_error")
        assert await sent(method="GET") == (405, "invalid_request_error")
        assert await sent(json={"messages": "x" * 1000}) == (413, "request_too_large")
        assert await sent(json={"messages": USER, "max_tokens": 1, "model": "no"}) == (404, "not_found_error")
        assert await sent(json=None, content=b"{", headers={**right, "content-type": "application/json"}) == (
            400,
            "invalid_request_error",
        )
        assert await sent(headers={**right, "x-long": "x" * 40_000}) == (431, "invalid_request_error")
        rig.backend.refuse = QueueFull("full")
        assert await sent() == (429, "rate_limit_error")
        rig.backend.refuse = RuntimeError("a secret")
        assert await sent() == (500, "api_error")
        rig.context.draining.begin()
        assert await sent() == (503, "overloaded_error")
        other = await rig.client.post("/v1/messagesx", json={}, headers=right)
        assert set(other.json()) == {"error"}, "no route of this API"


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async with gateway(saying("some text")) as rig:
        rig.backend.lose_at_position = 3
        *_, last = sse((await ask(rig, stream=True)).text)
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
