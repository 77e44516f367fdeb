"""The Responses API: bodies, refusals, whole and streamed answers of text, thinking and calls."""

import json
from typing import Any

import pytest

from tandem.cluster.gateway.responses.response_items import SEAL
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend
from tests.support.invented_format import InventedReasoning, InventedToolFormat
from tests.unit.gateway.rig import CONTEXT, MODEL, Rig, error_of, gateway
from tests.unit.gateway.test_tool_calls import CALL, TEMPLATE, saying

PATH = "/v1/responses"
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
SETTINGS = GatewaySettings(enable_auto_tool_choice=True)
FORMATS = {"tool_format": InventedToolFormat(), "reasoning_format": InventedReasoning()}
THOUGHT = "<think>Hm, a city.</think>"


def tooled(backend: FakeBackend, **more: Any) -> Any:
    return gateway(backend, settings=SETTINGS, template=TEMPLATE, text=FORMATS, **more)


async def ask(rig: Rig, **body: Any) -> Any:
    return await rig.client.post(PATH, json={"input": "hi", **body})


def sse(text: str) -> list[dict[str, Any]]:
    """The events of a stream, after checking that each names its type twice."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt_of(rig: Rig) -> str:
    """The rendered text of the last request."""
    return bytes(i for i in rig.backend.requests[-1].prompt_token_ids if i < 256).decode()


async def test_a_text_is_answered() -> None:
    async with gateway(saying("Grüße", cached_tokens=3)) as rig:
        answer = await ask(rig, instructions="Be kind.", metadata={"a": "b"}, user="u", model=MODEL)
        assert answer.status_code == 200 and answer.headers["x-request-id"]
        body = answer.json()
        assert prompt_of(rig) == "system:Be kind.user:hi"
        assert body["object"] == "response" and body["status"] == "completed" and body["id"].startswith("resp_")
        (item,) = body["output"]
        part = {"type": "output_text", "text": "Grüße", "annotations": [], "logprobs": []}
        assert item | {"id": ""} == {
            "id": "",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
        assert body["usage"] == {
            "input_tokens": len(rig.backend.requests[0].prompt_token_ids),
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 8,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(rig.backend.requests[0].prompt_token_ids) + 8,
        }
        assert (body["metadata"], body["user"], body["instructions"]) == ({"a": "b"}, "u", "Be kind.")
        assert (body["error"], body["incomplete_details"], body["store"]) == (None, None, False)
        assert body["completed_at"] >= body["created_at"] > 0
        assert rig.ledger.opened and rig.ledger.opened[0].id == body["id"]


async def test_items_become_the_turns_of_a_conversation() -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": None}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Löw"}',
            "namespace": None,
        },
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "user", "content": "So?"},
    ]
    async with tooled(saying("ok")) as rig:
        answer = await ask(rig, input=items)
        assert answer.status_code == 200, answer.text
        assert prompt_of(rig) == (
            'system:Rules.user:a\nbassistant:(hm)I look.weather{"city": "L\\u00f6w"}weather{}tool:suntool:rainuser:So?'
        ).replace("L\\u00f6w", "Löw")


async def test_arguments_of_an_echoed_call_may_be_an_object_or_nothing() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather"}
    given = [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}, {"arguments": {"city": "Löw"}}]
    async with tooled(saying("ok")) as rig:
        answer = await ask(rig, input=[{"role": "user", "content": "hi"}, *({**call, **one} for one in given)])
        assert answer.status_code == 200, answer.text
        assert prompt_of(rig) == "user:hiassistant:" + "weather{}" * 4 + 'weather{"city": "Löw"}'


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
async def test_a_stream_says_what_the_whole_answer_says(tokens_per_step: int) -> None:
    text = f"{THOUGHT}\n\nLook: {CALL}{CALL}"
    async with tooled(saying(text, tokens_per_step=tokens_per_step)) as rig:
        whole = (await ask(rig, tools=[WEATHER])).json()
        events = sse((await ask(rig, tools=[WEATHER], stream=True)).text)
        final = events[-1]["response"]
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]

        def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]

        assert without_ids(whole["output"]) == without_ids(final["output"])
        assert whole["usage"] == final["usage"]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm, a city.")
        thought, message, call, second = final["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, a city."}] and thought["summary"] == []
        assert message["content"][0]["text"].strip() == "Look:"
        assert (call["name"], call["arguments"]) == ("weather", '{"city": "Löw"}')
        assert call["call_id"] != second["call_id"] and call["id"] != second["id"]
        check_events(events, final["output"])


def check_events(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Each item is opened, grows and is closed, before the next one; what it said is in the final object."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["output"] == [] for event in events[:2])
    assert events[-1]["type"] == "response.completed"
    rest = events[2:-1]
    for index, item in enumerate(output):
        own = [event for event in rest if event["output_index"] == index]
        assert own == rest[: len(own)], "one item after the other"
        rest = rest[len(own) :]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert own[-2]["type"] == "response.function_call_arguments.done"
            assert deltas == own[-2]["arguments"] == item["arguments"] and own[-2]["name"] == item["name"]
        else:
            (part,) = item["content"]
            empty = {"logprobs": []} if "logprobs" in part else {}
            assert own[1]["type"] == "response.content_part.added" and own[1]["part"] == part | {"text": ""} | empty
            assert own[-2]["type"] == "response.content_part.done" and own[-2]["part"] == part
            assert deltas == own[-3]["text"] == part["text"]
    assert not rest


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_incomplete(stream: bool) -> None:
    async with gateway() as rig:
        answer = await ask(rig, max_output_tokens=3, stream=stream)
        body = sse(answer.text)[-1] if stream else {"type": "response.incomplete", "response": answer.json()}
        assert body["type"] == "response.incomplete"
        response = body["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
        assert response["usage"]["output_tokens"] == 3 and response["completed_at"] is None


async def test_an_answer_of_nothing_has_no_items() -> None:
    async with gateway(saying("")) as rig:
        assert (await ask(rig)).json()["output"] == []
        events = sse((await ask(rig, stream=True)).text)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]


async def test_a_stream_that_fails_says_so_as_its_last_event() -> None:
    async with gateway(saying("some text")) as rig:
        rig.backend.lose_at_position = 3
        events = sse((await ask(rig, stream=True)).text)
        failed = events[-1]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "server_error" and failed["response"]["error"]["message"]
    async with gateway() as rig:
        rig.backend.refuse = QueueFull("full")
        answer = await ask(rig, stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "slow_down")


async def test_settings_reach_the_engine_and_the_object() -> None:
    async with tooled(saying("x")) as rig:
        answer = await ask(
            rig,
            temperature=0.5,
            top_p=0.25,
            max_output_tokens=7,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "weather"},
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto", "context": None},
            text={"format": {"type": "text"}, "verbosity": "medium"},
            input=[{"role": "user", "content": "x"}],
        )
        body = answer.json()
        assert answer.status_code == 200, body
        sampling = rig.backend.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 7)
        assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.25, 7)
        assert body["tools"] == [WEATHER] and body["tool_choice"] == {"type": "function", "name": "weather"}
        assert body["parallel_tool_calls"] is False and body["reasoning"]["effort"] == "low"
        assert prompt_of(rig).endswith("<think>")


NEUTRAL: dict[str, Any] = {
    "background": False,
    "truncation": "disabled",
    "include": [],
    "top_logprobs": 0,
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "context_management": [],
    "store": False,
    "conversation": None,
    "prompt": None,
    "reasoning": None,
    "text": None,
}


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    async with gateway() as rig:
        answer = await ask(rig, max_output_tokens=1, **NEUTRAL)
        assert answer.status_code == 200, answer.text


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, fields]}


def custom(syntax: str, choice: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": "start: /a/"}
    return {"tools": [{"type": "custom", "name": "c", "format": form}], "tool_choice": choice}


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"bogus": 1}, "bogus", UNSUPPORTED),
    ({"bogus": None}, "bogus", UNSUPPORTED),
    ({"messages": []}, "messages", UNSUPPORTED),
    ({"input": None}, "input", INVALID),
    ({"input": []}, "input", INVALID),
    ({"input": 5}, "input", INVALID),
    ({"input": [5]}, "input[0]", INVALID),
    ({"input": [{}]}, "input[0].type", INVALID),
    ({"background": True}, "background", UNSUPPORTED),
    ({"conversation": "c"}, "conversation", UNSUPPORTED),
    ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
    ({"moderation": {"model": "m"}}, "moderation", UNSUPPORTED),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", INVALID),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", UNSUPPORTED),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", INVALID),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", INVALID),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", INVALID),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", INVALID),
    ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id", UNSUPPORTED),
    ({"max_output_tokens": 0}, "max_output_tokens", INVALID),
    ({"max_output_tokens": CONTEXT + 1}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "x" * 600}, "input", "context_length_exceeded"),
    ({"temperature": 3}, "temperature", INVALID),
    ({"top_p": 0}, "top_p", INVALID),
    ({"stream": "yes"}, "stream", INVALID),
    ({"metadata": {"a": 1}}, "metadata[...]", INVALID),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", INVALID),
    ({"model": "nobody"}, "model", "model_not_found"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].web_search", UNSUPPORTED),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "tools[0]", UNSUPPORTED),
    ({"tools": [{"type": "local_shell"}]}, "tools[0]", UNSUPPORTED),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools[0].format.syntax", INVALID),
    (custom("lark", "auto"), "tools[0].format", UNSUPPORTED),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", UNSUPPORTED),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice.tools[0].name",
        INVALID,
    ),
    ({"top_logprobs": 21}, "top_logprobs", INVALID),
    ({"include": ["everything"]}, "include[0]", INVALID),
    ({"include": ["web_search_call.results"]}, "include", UNSUPPORTED),
    ({"max_tool_calls": 3}, "max_tool_calls", UNSUPPORTED),
    ({"service_tier": "flex"}, "service_tier", UNSUPPORTED),
    ({"client_metadata": {"a": "b"}}, "client_metadata", UNSUPPORTED),
    ({"text": {"verbosity": "low"}}, "text.verbosity", UNSUPPORTED),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"truncation": "middle"}, "truncation", INVALID),
    ({"truncation": "auto", "input": "x" * 600}, "input", "context_length_exceeded"),
    ({"seed": "x"}, "seed", INVALID),
    ({"stop": [""]}, "stop", INVALID),
    ({"top_k": -2}, "top_k", INVALID),
    ({"min_p": 2}, "min_p", INVALID),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"logit_bias": {"x": 1}}, "logit_bias", INVALID),
    ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens", INVALID),
    ({"cache_salt": ""}, "cache_salt", INVALID),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_grammar"),
    (
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs",
        INVALID,
    ),
    ({"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs.mood", UNSUPPORTED),
    ({"tools": [{"type": "function"}]}, "tools[0].name", INVALID),
    ({"tools": [{**WEATHER, "name": "a b"}], "tool_choice": "none"}, "tools[0].name", INVALID),
    ({"tools": [WEATHER]}, "tools", UNSUPPORTED),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", UNSUPPORTED),
    ({"tool_choice": "sometimes"}, "tool_choice", INVALID),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    (item(type="item_reference", id="x"), "input[1]", UNSUPPORTED),
    (item(type="computer_call", id="x"), "input[1]", UNSUPPORTED),
    (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[1].content[0]", UNSUPPORTED),
    (item(role="tool", content="x"), "input[1].role", INVALID),
    (item(role="user", content="x", bogus=1), "input[1].bogus", UNSUPPORTED),
    (item(type="function_call", call_id="c", name="f", arguments="{"), "input[1]", INVALID),
    (item(type="function_call", call_id="c", name="f", arguments=[]), "input[1].arguments", INVALID),
    (item(type="reasoning", encrypted_content="x"), "input[1].encrypted_content", UNSUPPORTED),
    (item(type="reasoning", encrypted_content=f"{SEAL}?"), "input[1].encrypted_content", UNSUPPORTED),
    (item(type="reasoning", encrypted_content=5), "input[1].encrypted_content", UNSUPPORTED),
    (item(type="custom_tool_call", call_id="c", name="f"), "input[1].input", INVALID),
]


async def test_it_is_refused_by_name() -> None:
    wrong = []
    async with gateway(settings=GatewaySettings(strict_fields=True)) as rig:
        for body, param, code in REFUSED:
            answer = await ask(rig, **body)
            error, status = error_of(answer), 404 if code == "model_not_found" else 400
            is_worded = "max_completion_tokens" not in error["message"] and "messages[" not in error["message"]
            if (answer.status_code, error["param"], error["code"]) != (status, param, code) or not is_worded:
                wrong.append((body, error))
        assert not rig.backend.requests and not wrong, wrong


async def test_a_service_without_a_store_says_so() -> None:
    async with gateway() as rig:
        for method in ("GET", "DELETE"):
            answer = await rig.client.request(method, f"{PATH}/resp_{'0' * 32}")
            assert (answer.status_code, error_of(answer)["code"]) == (400, UNSUPPORTED)
            assert "--response-store-ttl" in error_of(answer)["message"]
