"""Tools in chat: bodies, refusals, whole and streamed calls."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import Abort
from tandem.workers.text.format_list import TOOL_FORMATS
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.support.invented_format import InventedReasoning, InventedToolFormat
from tests.support.resuming_backend import ResumingBackend
from tests.unit.gateway.rig import EOS, MODEL, TURN, USER, Rig, error_of, events, gateway, served

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
CALL = '<call>weather {"city": "Löw"}</call>'
SETTINGS = GatewaySettings(enable_auto_tool_choice=True)
STRICT = GatewaySettings(enable_auto_tool_choice=True, strict_fields=True)
FORMATS = {"tool_format": InventedToolFormat()}
THINKING = {"reasoning_format": InventedReasoning()}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<turn>{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
    "{% if enable_thinking is defined %}{% if enable_thinking %}<think>{% else %}!{% endif %}{% endif %}"
)


def saying(*texts: str, ends: bool = True, kind: type[FakeBackend] = FakeBackend, **options: Any) -> FakeBackend:
    outputs = [[*text.encode(), EOS] if ends else list(text.encode()) for text in texts]
    return kind(script=fixed_script(*outputs), eos_token_ids=frozenset({EOS}), **options)


def tooled(backend: FakeBackend, settings: GatewaySettings = SETTINGS, **text: Any) -> Any:
    return gateway(backend, settings=settings, template=TEMPLATE, text={**FORMATS, **text})


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = message.get("tool_calls") or []
    assert all(call["type"] == "function" and call["id"].startswith("chatcmpl-tool-") for call in found)
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def gathered(text: str) -> dict[int, dict[str, Any]]:
    """By choice what a stream says: its message as a whole answer has it, and how it ended."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(text):
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            whole = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "finish": None})
            assert whole["finish"] is None, "nothing comes behind the end"
            whole["finish"] = choice["finish_reason"]
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(whole["calls"]) and call["function"]["arguments"] == ""
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    whole["calls"][call["index"]][1] += call["function"]["arguments"]
    return choices


async def test_a_call_in_a_whole_answer() -> None:
    async with tooled(saying(CALL)) as rig:
        answer = (await rig.chat(tools=TOOLS)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert calls_of(choice["message"]) == [("weather", {"city": "Löw"})]
        prompt = bytes(i for i in rig.backend.requests[0].prompt_token_ids if i < 256).decode()
        assert prompt.startswith("[" + json.dumps(WEATHER)) and '"name": "clock", "parameters": {"type"' in prompt


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
async def test_calls_in_a_stream(tokens_per_step: int) -> None:
    text = f"Look: {CALL} and <call>clock {{}}</call>"
    async with tooled(saying(text, "no <call> here", tokens_per_step=tokens_per_step)) as rig:
        response = await rig.chat(tools=TOOLS, n=2, stream=True, stream_options={"include_usage": True})
        first, second = (choice for _, choice in sorted(gathered(response.text).items()))
        assert first["calls"] == [["weather", '{"city": "Löw"}'], ["clock", "{}"]]
        assert (first["content"], first["finish"]) == ("Look:  and ", "tool_calls")
        assert (second["content"], second["finish"], second["calls"]) == ("no <call> here", "stop", [])
        whole = (await rig.chat(tools=TOOLS, n=2)).json()["choices"]
        assert whole[0]["message"]["content"] == first["content"]
        assert [c["function"]["arguments"] for c in whole[0]["message"]["tool_calls"]] == ['{"city": "Löw"}', "{}"]
        assert whole[1]["message"] == {"role": "assistant", "content": "no <call> here", "refusal": None}


async def test_a_call_that_is_cut_off_by_length_is_content() -> None:
    async with tooled(saying(CALL, ends=False)) as rig:
        answer = (await rig.chat(tools=TOOLS, max_tokens=12)).json()["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("length", CALL[:12])


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_forced_call_that_is_cut_before_its_name_leaves_nothing(streamed: bool) -> None:
    """Its marks are no content, as no text was asked for; behind a whole call neither."""
    async with tooled(saying(CALL + CALL, ends=False)) as rig:
        for cut, calls in ((4, []), (len(CALL.encode()) + 4, [("weather", {"city": "Löw"})])):
            asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": cut}
            answer = await rig.chat(**asked, stream=streamed)
            if streamed:
                choice = gathered(answer.text)[0]
                assert (choice["content"], choice["finish"], len(choice["calls"])) == ("", "length", len(calls))
            else:
                choice = answer.json()["choices"][0]
                assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
                assert calls_of(choice["message"]) == calls


async def test_logprobs_ids_and_counts_stay_with_the_tokens() -> None:
    async with tooled(saying(CALL)) as rig:
        response = await rig.chat(
            tools=TOOLS,
            stream=True,
            logprobs=True,
            return_token_ids=True,
            stream_options={"continuous_usage_stats": True},
        )
        chunks = [chunk for chunk in events(response.text) if chunk != "[DONE]" and chunk["choices"]]
        ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
        assert ids == [*CALL.encode(), EOS]
        entries = [e for chunk in chunks for e in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert len(entries) == len(ids)
        assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
        assert all(chunk["usage"]["completion_tokens"] <= len(ids) for chunk in chunks)


async def test_one_call_only() -> None:
    text = f"{CALL}<call>clock {{}}</call> and more"
    for stream in (False, True):
        async with tooled(saying(text)) as rig:
            response = await rig.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
            if stream:
                choice = gathered(response.text)[0]
                assert (choice["calls"], choice["finish"]) == ([["weather", '{"city": "Löw"}']], "tool_calls")
            else:
                choice = response.json()["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                assert calls_of(choice["message"]) == [("weather", {"city": "Löw"})]
                assert response.json()["usage"]["completion_tokens"] == len((CALL + "<call>clock {").encode())
            (abort,) = [one for one in rig.backend.aborts if isinstance(one, Abort)]
            assert abort.keep_positions == len((CALL + "<call>clock {").encode())


async def test_a_stop_string_ends_a_call_as_it_ends_any_text() -> None:
    async with tooled(saying(CALL)) as rig:
        choice = (await rig.chat(tools=TOOLS, stop='"city"')).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": "{}"}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", '"city"')


async def test_a_stream_goes_on_in_the_middle_of_a_call() -> None:
    backend = saying(CALL, kind=ResumingBackend, step_s=0.002)
    assert isinstance(backend, ResumingBackend)

    async def lose() -> None:
        while not backend.streams or next(iter(backend.streams.values())).choices[0].position < 15:
            await asyncio.sleep(0)
        backend.lose_all()

    async with tooled(backend) as rig:
        losing = asyncio.create_task(lose())
        response = await rig.chat(tools=TOOLS, stream=True)
        await losing
        assert len(rig.backend.requests) == 2 and rig.backend.requests[1].resume_token_ids[0]
        choice = gathered(response.text)[0]
        assert (choice["calls"], choice["finish"]) == ([["weather", '{"city": "Löw"}']], "tool_calls")


async def test_thinking_is_apart() -> None:
    text = f"<think>Hm, ä</think>{CALL}"
    async with tooled(saying(text), **THINKING) as rig:
        answer = (await rig.chat(tools=TOOLS)).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "Hm, ä"
        assert calls_of(message) == [("weather", {"city": "Löw"})]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm, ä".encode())}
        response = await rig.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True})
        choice = gathered(response.text)[0]
        assert (choice["reasoning"], choice["calls"]) == ("Hm, ä", [["weather", '{"city": "Löw"}']])
        assert events(response.text)[-2]["usage"] == answer["usage"]
        hidden = (await rig.chat(tools=TOOLS, include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning" not in hidden and hidden["tool_calls"]


async def test_a_prompt_may_begin_the_thinking() -> None:
    async with tooled(saying("Hm</think>yes"), **THINKING) as rig:
        answer = (await rig.chat(chat_template_kwargs={"enable_thinking": True})).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm", "yes")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
        cut = (await rig.chat(reasoning_effort="high", max_tokens=1)).json()
        assert (cut["choices"][0]["message"]["reasoning"], cut["choices"][0]["message"]["content"]) == ("H", None)
        prompts = [bytes(i for i in r.prompt_token_ids if i < 256).decode() for r in rig.backend.requests]
        assert all(prompt.endswith("<think>") for prompt in prompts)
        await rig.chat(reasoning_effort="none")
        assert rig.backend.requests[-1].prompt_token_ids[-1] == ord("!")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("begun", "said"),
    [
        ("<think>Well, ", ("Hm", "yes")),
        ([{"type": "text", "text": "<think>"}], ("Hm", "yes")),
        ("<think>Well</think>", ("", "Hm</think>yes")),
        ("Well, ", ("", "Hm</think>yes")),
    ],
)
async def test_a_message_that_is_continued_may_be_inside_its_thinking(
    begun: Any, said: tuple[str, str], streamed: bool
) -> None:
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": begun}]
    async with tooled(saying("Hm</think>yes"), **THINKING) as rig:
        asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        answer = await rig.client.post("/v1/chat/completions", json={**asked, "stream": streamed})
        if streamed:
            choice = gathered(answer.text)[0]
            assert (choice["reasoning"], choice["content"]) == said
        else:
            message = answer.json()["choices"][0]["message"]
            assert (message.get("reasoning", ""), message["content"]) == said
            counts = answer.json()["usage"]["completion_tokens_details"]
            assert counts == {"reasoning_tokens": len(said[0])}


async def test_special_tokens_are_parsed_and_not_shown() -> None:
    backend = FakeBackend(script=fixed_script([*b"a", TURN, *CALL.encode(), EOS]), eos_token_ids=frozenset({EOS}))
    async with tooled(backend, tool_format=InventedToolFormat(shows_special_tokens=True)) as rig:
        for stream in (False, True):
            response = await rig.chat(tools=TOOLS, stream=stream)
            content = (
                gathered(response.text)[0]["content"] if stream else response.json()["choices"][0]["message"]["content"]
            )
            assert content == "a"
        shown = (await rig.chat(tools=TOOLS, skip_special_tokens=False)).json()["choices"][0]["message"]
        assert shown["content"] == "a<turn>"


TURNS: list[dict[str, Any]] = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


async def test_calls_and_their_answers_are_rendered_and_counted() -> None:
    async with tooled(saying("x")) as rig:
        assert (await rig.chat(messages=TURNS, tools=TOOLS)).status_code == 200
        (request,) = rig.backend.requests
        prompt = bytes(i for i in request.prompt_token_ids if i < 256).decode()
        assert prompt.endswith("user:hiassistant:(hm)clock{}tool:noon")
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = await rig.client.post("/tokenize", json={"messages": TURNS, "tools": TOOLS, **extra})
        assert answer.json()["tokens"] == [*request.prompt_token_ids, ord("!")]


@pytest.mark.parametrize(
    "given", [{}, {"arguments": None}, *({"arguments": one} for one in ("", " ", "null", "[]", {}))]
)
async def test_an_echoed_call_without_arguments_has_none(given: dict[str, Any]) -> None:
    call = {"id": "c1", "type": None, "function": {"name": "clock", **given}}
    turns = [TURNS[0], {**TURNS[1], "tool_calls": [call]}, {**TURNS[2], "content": None}]
    async with tooled(saying("x")) as rig:
        answer = await rig.chat(messages=turns, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        prompt = bytes(i for i in rig.backend.requests[0].prompt_token_ids if i < 256).decode()
        assert prompt.endswith("user:hiassistant:(hm)clock{}tool:")


async def test_arguments_of_an_echoed_call_may_be_an_object_and_count_as_its_text_does() -> None:
    async with tooled(saying("x", "x")) as rig:
        for size, status in ((5, 200), (10**6, 413)):
            arguments = {"city": "ö" * size}
            for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
                call = {"id": "c1", "function": {"name": "weather", "arguments": given}}
                answer = await rig.chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
                assert answer.status_code == status, answer.text
                assert status == 200 or error_of(answer)["code"] == "content_too_large"
        prompts = [bytes(i for i in one.prompt_token_ids if i < 256).decode() for one in rig.backend.requests]
        assert prompts == ['user:hiassistant:weather{"city": "ööööö"}'] * 2


FORCED = {"type": "function", "function": {"name": "clock"}}
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"
NAMED = "tools[0].function"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function", INVALID),
    ({"tools": [{"type": "function", "function": {}}]}, f"{NAMED}.name", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, f"{NAMED}.name", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, f"{NAMED}.name", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, f"{NAMED}.x", UNSUPPORTED),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, f"{NAMED}.strict", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, f"{NAMED}.parameters", INVALID),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        f"{NAMED}.parameters",
        INVALID,
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        f"{NAMED}.parameters.properties",
        INVALID,
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "x"}}}]},
        f"{NAMED}.parameters.required",
        INVALID,
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", INVALID),
    ({"tools": [CLOCK] * 129}, "tools", INVALID),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    ({"tool_choice": FORCED}, "tool_choice", INVALID),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", INVALID),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", INVALID),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type", UNSUPPORTED),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice.function.name",
        INVALID,
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "x"}, "parallel_tool_calls", INVALID),
    ({"reasoning_effort": "huge"}, "reasoning_effort", INVALID),
    ({"include_reasoning": "x"}, "include_reasoning", INVALID),
    ({"include_reasoning": False}, "include_reasoning", UNSUPPORTED),
    ({"thinking_token_budget": 5}, "thinking_token_budget", UNSUPPORTED),
    ({"thinking_token_budget": -1}, "thinking_token_budget", INVALID),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", INVALID),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", UNSUPPORTED),
    ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt", UNSUPPORTED),
    ({"chat_template_kwargs": {"bogus": 1}}, "chat_template_kwargs.bogus", UNSUPPORTED),
    ({"chat_template_kwargs": {"enable_thinking": "x" * 20_000}}, "chat_template_kwargs", INVALID),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning", INVALID),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": TURNS[1]["tool_calls"]}]},
        "messages[0].tool_calls",
        INVALID,
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"}]},
        "messages[0].reasoning",
        INVALID,
    ),
    ({"messages": [*TURNS[:2], {**TURNS[2], "tool_call_id": "c2"}]}, "messages[2].tool_call_id", INVALID),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda v: str(v)[:60])
async def test_fields_of_tools_are_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    async with tooled(saying("x"), STRICT) as rig:
        answer = await rig.chat(**fields)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
        assert not rig.backend.requests


async def test_auto_needs_the_flags_and_names_them() -> None:
    for settings, text in ((GatewaySettings(), FORMATS), (SETTINGS, {"tool_format": None})):
        async with tooled(saying("x"), settings, **text) as rig:
            for fields, param in (({}, "tools"), ({"tool_choice": "auto"}, "tool_choice")):
                error = error_of(await rig.chat(tools=TOOLS, **fields))
                assert (error["code"], error["param"]) == (UNSUPPORTED, param)
                for words in ("--enable-auto-tool-choice", "--tool-call-parser", *TOOL_FORMATS):
                    assert words in error["message"]
            assert (await rig.chat(tools=TOOLS, tool_choice="none")).status_code == 200
            assert (await rig.chat(tools=[], tool_choice="auto")).status_code == 200
    async with tooled(saying("x"), tool_format=None) as rig:
        message = error_of(await rig.chat(tools=TOOLS, tool_choice="required"))["message"]
        assert "--tool-call-parser" in message and all(name in message for name in TOOL_FORMATS)


WITHOUT_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("settings", [GatewaySettings(), SETTINGS, STRICT])
async def test_tools_that_the_template_does_not_show_are_forced_or_ignored(settings: GatewaySettings) -> None:
    """A grammar forces a call of a model that sees no tools; where it may choose, it cannot."""
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    async with gateway(saying(call), settings=settings, template=WITHOUT_TOOLS) as rig:
        for choice in ("required", FORCED):
            forced = await rig.chat(tools=TOOLS, tool_choice=choice)
            assert "x-tandem-ignored" not in forced.headers
            (made,) = forced.json()["choices"][0]["message"]["tool_calls"]
            assert made["function"] == {"name": "clock", "arguments": "{}"}
            assert "tool_call>" in str(rig.backend.requests[-1].sampling.grammar)
        for fields in ({}, {"tool_choice": "auto"}):
            free = await rig.chat(tools=TOOLS, **fields)
            if settings is STRICT:
                assert error_of(free)["param"] == "tools"
            else:
                assert free.headers["x-tandem-ignored"] == "tools"
                assert free.json()["choices"][0]["message"]["content"] == call
        assert "x-tandem-ignored" not in (await rig.chat(tools=TOOLS, tool_choice="none")).headers


async def test_with_tool_choice_none_a_call_is_content() -> None:
    async with tooled(saying(CALL)) as rig:
        choice = (await rig.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def _streamed(rig: Rig) -> Any:
    async with served(rig.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
        asked: Any = {"model": MODEL, "messages": USER, "tools": strict}
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()


async def test_the_openai_client_streams_calls() -> None:
    async with tooled(saying(f"Hi {CALL}<call>clock {{}}</call>")) as rig:
        (choice,) = (await _streamed(rig)).choices
        assert choice.finish_reason == "tool_calls"
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("weather", {"city": "Löw"}), ("clock", {})]
        assert choice.message.content == "Hi "


async def test_a_budget_of_thinking_goes_along_with_its_marks() -> None:
    async with tooled(saying("x"), **THINKING) as rig:
        await rig.chat(thinking_token_budget=7, chat_template_kwargs={"enable_thinking": True})
        await rig.chat()
        first, second = (request.sampling.thinking_budget for request in rig.backend.requests)
        assert second is None and first is not None
        assert (first.tokens, bytes(first.start), bytes(first.end), first.inside) == (7, b"<think>", b"</think>", True)
        error = error_of(await rig.chat(thinking_token_budget=7, use_beam_search=True))
        assert (error["code"], error["param"]) == (UNSUPPORTED, "thinking_token_budget")


async def test_forced_calls_are_held_by_a_grammar() -> None:
    async with tooled(saying(CALL), **THINKING) as rig:
        required = (await rig.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]
        assert required["finish_reason"] == "tool_calls"
        named = (await rig.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})).json()
        assert named["choices"][0]["finish_reason"] == "stop", "as OpenAI has it"
        assert calls_of(named["choices"][0]["message"]) == [("weather", {"city": "Löw"})]
        await rig.chat(tools=TOOLS)
        first, second, third = (request.sampling.grammar for request in rig.backend.requests)
        assert first is not None and "clock" in first and "think" in first
        assert second is not None and "clock" not in second
        assert third is None
        error = error_of(await rig.chat(tools=TOOLS, tool_choice="required", use_beam_search=True))
        assert (error["code"], error["param"]) == (UNSUPPORTED, "tool_choice")


async def test_a_form_begins_behind_the_thinking_and_leaves_calls_possible() -> None:
    async with tooled(saying(CALL), **THINKING) as rig:
        form = {"response_format": {"type": "json_object"}}
        assert (await rig.chat(tools=TOOLS, **form)).json()["choices"][0]["finish_reason"] == "tool_calls"
        await rig.chat(**form)
        await rig.chat(tools=TOOLS, tool_choice="none", **form)
        both, alone, none = (json.loads(r.sampling.grammar or "")["grammars"] for r in rig.backend.requests)
        assert "think? (calls | @body)" in both[0]["lark_grammar"]
        assert alone == none and "think? @body" in alone[0]["lark_grammar"] and "calls" not in alone[0]["lark_grammar"]
