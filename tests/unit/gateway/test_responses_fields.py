"""What the Responses API has beyond a conversation: vLLM's sampling fields, log probabilities, opaque thinking, custom
tools, shortened conversations, input items and counts, and what agents send without need."""

import json
from typing import Any

import openai
import pytest

from tandem.cluster.gateway.responses.response_items import opened, sealed
from tandem.cluster.gateway.responses.response_tools import InputReader, input_of
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.output.reasoning.openai_gptoss import OpenAIGptOss
from tandem.workers.text.output.reasoning.think_tags import Qwen3
from tests.support.fake_backend import logprob_of
from tests.unit.gateway.rig import MODEL, error_of, gateway, served
from tests.unit.gateway.test_held_grammar import allows
from tests.unit.gateway.test_responses import (
    CONTEXT,
    FORMATS,
    PATH,
    SETTINGS,
    THOUGHT,
    WEATHER,
    ask,
    check_events,
    prompt_of,
    sse,
    tooled,
)
from tests.unit.gateway.test_tool_calls import CALL, TEMPLATE, saying

SAMPLING: dict[str, Any] = {
    "seed": 7,
    "stop": ["zz"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 2,
    "top_k": 5,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 2.5},
    "allowed_token_ids": [5, 6],
}
EXEC: dict[str, Any] = {"type": "custom", "name": "exec", "description": "Runs code."}
PATCH = 'print("Grüße 😀")\n'
CODE = f"<call>exec {json.dumps({'input': PATCH})}</call>"
HINTS: dict[str, Any] = {
    "client_metadata": {"x-codex-installation-id": "1"},
    "safety_identifier": "s",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "max_tool_calls": 3,
    "include": ["web_search_call.action.sources"],
    "context_management": [{"type": "compaction"}],
    "store": True,
}


async def test_sampling_fields_reach_the_engine() -> None:
    async with gateway(saying("x")) as rig:
        more: dict[str, Any] = {"priority": 3, "cache_salt": "pepper", "structured_outputs": {"regex": "a+"}}
        answer = await ask(rig, max_output_tokens=9, bad_words=["no"], **SAMPLING, **more)
        assert answer.status_code == 200 and "x-tandem-ignored" not in answer.headers, answer.text
        (request,) = rig.backend.requests
        taken = {name: getattr(request.sampling, name) for name in SAMPLING}
        pairs = {"stop": ("zz",), "stop_token_ids": (3,), "logit_bias": ((5, 2.5),), "allowed_token_ids": (5, 6)}
        assert taken == SAMPLING | pairs
        assert request.priority == 3 and "pepper" in request.cache_salt
        assert request.sampling.grammar is not None and request.sampling.bad_words_token_ids


async def test_special_tokens_are_shown_and_templates_take_variables() -> None:
    async with tooled(saying("a<turn>b".replace("<turn>", ""))) as rig:
        await ask(rig, chat_template_kwargs={"enable_thinking": True}, skip_special_tokens=False)
        assert prompt_of(rig).endswith("<think>")
    async with gateway() as rig:  # it echoes the prompt, which begins with a special token
        shown = (await ask(rig, max_output_tokens=2, skip_special_tokens=False)).json()
        hidden = (await ask(rig, max_output_tokens=2)).json()
        texts = [body["output"][0]["content"][0]["text"] for body in (shown, hidden)]
        assert texts == ["<turn>u", "u"]


async def test_what_cannot_change_the_answer_is_named() -> None:
    async with gateway() as rig:
        answer = await ask(rig, max_output_tokens=1, text={"verbosity": "low"}, reasoning={"summary": "auto"}, **HINTS)
        assert answer.status_code == 200, answer.text
        names = set(answer.headers["x-tandem-ignored"].split(", "))
        assert names == {*HINTS, "text.verbosity", "reasoning.summary"}
        assert answer.json()["store"] is False and answer.json()["max_tool_calls"] == 3


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_logprobs_are_those_of_the_text(tokens_per_step: int) -> None:
    """Each entry belongs to its text: none to the thinking, the marks or the call."""
    text = f"{THOUGHT}Hé!{CALL}"
    begin, size = len(THOUGHT.encode()), len("Hé!".encode())
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER]}
    async with tooled(saying(text, tokens_per_step=tokens_per_step)) as rig:
        whole = (await ask(rig, **asked)).json()
        thought, message, call = whole["output"]
        (part,) = message["content"]
        assert [entry["logprob"] for entry in part["logprobs"]] == [logprob_of(begin + i) for i in range(size)]
        assert bytes(entry["bytes"][0] for entry in part["logprobs"]).decode() == "Hé!"
        assert all(len(entry["top_logprobs"]) <= 2 for entry in part["logprobs"])
        assert whole["top_logprobs"] == 2 and rig.backend.requests[0].sampling.logprobs == 2
        events = sse((await ask(rig, stream=True, **asked)).text)
        check_events(events, events[-1]["response"]["output"])
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        (done,) = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
        assert rig.backend.requests[-1].sampling.logprobs == 2
        assert (thought["type"], call["type"]) == ("reasoning", "function_call")


async def test_plain_text_has_logprobs_to_its_end() -> None:
    async with gateway(saying("abc")) as rig:
        (item,) = (await ask(rig, include=["message.output_text.logprobs"])).json()["output"]
        assert [entry["logprob"] for entry in item["content"][0]["logprobs"]] == [logprob_of(i) for i in range(4)]
        again = await ask(rig, input=[{"role": "user", "content": "x"}, item, {"role": "user", "content": "y"}])
        assert again.status_code == 200 and again.headers["x-tandem-ignored"] == "input[].content[].logprobs"
        (item,) = (await ask(rig)).json()["output"]
        assert item["content"][0]["logprobs"] == []


async def test_opaque_thinking_comes_back_as_thinking() -> None:
    async with tooled(saying(f"{THOUGHT}Yes.")) as rig:
        asked = {"include": ["reasoning.encrypted_content"], "store": False}
        first = (await ask(rig, **asked)).json()
        (thought, message) = first["output"]
        assert opened(thought["encrypted_content"]) == "Hm, a city." == thought["content"][0]["text"]
        streamed = sse((await ask(rig, stream=True, **asked)).text)[-1]["response"]["output"][0]
        assert streamed["encrypted_content"] == thought["encrypted_content"]
        bare = {name: value for name, value in thought.items() if name != "content"}
        for echoed in (bare, thought):
            items = [{"role": "user", "content": "a"}, echoed, message, {"role": "user", "content": "b"}]
            assert (await ask(rig, input=items)).status_code == 200
            assert prompt_of(rig) == "user:aassistant:(Hm, a city.)Yes.user:b"
        foreign = {
            "type": "reasoning",
            "encrypted_content": "gAAAA",
            "summary": [{"type": "summary_text", "text": "S"}],
        }
        answer = await ask(rig, input=[{"role": "user", "content": "a"}, foreign])
        assert answer.headers["x-tandem-ignored"] == "input[].encrypted_content"
        assert prompt_of(rig) == "user:aassistant:(S)"


def test_seals() -> None:
    assert all(opened(sealed(text)) == text for text in ("", "a", "Grüße 😀\n", "x" * 10_000))
    assert opened("gAAAA") is opened(sealed("abc")[:-1]) is opened("tandem.thinking.1.//8=") is None


READ: list[tuple[str, str]] = [
    (json.dumps({"input": PATCH}), PATCH),
    (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
    ('{ "input" : "a\\\\ud83d\\"\\u00e9\\/" }', 'a\\ud83d"é/'),
    ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
    ('{"input": "\\ud83d"}', "\ufffd"),
    ('{"input": ""}', ""),
    ('{"input": "cut', "cut"),
    ('{"input": "a\nb"}', "a\nb"),
    ('{"code": "x"}', '{"code": "x"}'),
    ('{"code": "' + "x" * 600 + '"}', '{"code": "' + "x" * 600 + '"}'),
    ("", ""),
]


def test_the_text_of_a_custom_call_is_read_out_of_its_arguments() -> None:
    """However the arguments are cut."""
    for arguments, text in READ:
        assert input_of(arguments) == text, arguments
        for size in (1, 2, 5):
            reader = InputReader()
            pieces = [reader.push(arguments[i : i + size]) for i in range(0, len(arguments), size)]
            assert "".join(pieces) + reader.finish() == text, (arguments, size)


@pytest.mark.parametrize("tokens_per_step", [1, 100])
async def test_a_custom_tool_takes_free_text(tokens_per_step: int) -> None:
    async with tooled(saying(f"Look: {CODE}", tokens_per_step=tokens_per_step)) as rig:
        whole = (await ask(rig, tools=[EXEC, WEATHER])).json()
        call = whole["output"][1]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "exec", PATCH)
        assert whole["tools"][0] == {**EXEC, "format": None}
        assert '"parameters": {"type": "object", "properties": {"input": {"type": "string"}}' in prompt_of(rig)
        events = sse((await ask(rig, tools=[EXEC], stream=True)).text)
        own = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
        assert "".join(event["delta"] for event in own[:-1]) == own[-1]["input"] == PATCH
        assert events[-1]["response"]["output"][1] | {"id": "", "call_id": ""} == call | {"id": "", "call_id": ""}
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        await ask(rig, input=[{"role": "user", "content": "x"}, call, result], tools=[EXEC])
        assert prompt_of(rig).endswith('user:xassistant:exec{"input": "print(\\"Grüße 😀\\")\\n"}tool:done')


async def test_grammars_of_custom_tools_are_held_or_named() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    async with tooled(saying(CODE)) as rig:
        answer = await ask(rig, tools=[{**EXEC, "format": lark}])
        assert answer.headers["x-tandem-ignored"] == "tools[].format" and "start: /a+/" in prompt_of(rig)
        for choice in ("required", {"type": "custom", "name": "exec"}):
            answer = await ask(rig, tools=[{**EXEC, "format": regex}], tool_choice=choice)
            assert answer.status_code == 200 and "x-tandem-ignored" not in answer.headers
            assert "^(?:a+)$" in (rig.backend.requests[-1].sampling.grammar or "")


LARK = """start: begin hunk+ end
begin: "*** Begin Patch" LF
hunk: "+" /(.*)/ LF
end: "*** End Patch" LF?
%import common.LF
"""
LARK_PATCH = '*** Begin Patch\n+print("Grüße 😀")\n+\\\n*** End Patch'
PATCHING: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
FORCING: list[Any] = [
    {"type": "custom", "name": "apply_patch"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
]


@pytest.mark.parametrize("choice", FORCING, ids=["named", "allowed"])
@pytest.mark.parametrize("tokens_per_step", [1, 100])
async def test_the_text_of_a_forced_custom_tool_is_held_to_a_lark_grammar(choice: Any, tokens_per_step: int) -> None:
    """The model writes the text alone, behind its thinking."""
    asked = {"tools": [PATCHING], "tool_choice": choice, "text": {"format": {"type": "json_object"}}}
    async with tooled(saying(f"{THOUGHT}\n\n{LARK_PATCH}", tokens_per_step=tokens_per_step)) as rig:
        answer = await ask(rig, **asked)
        assert answer.status_code == 200 and "x-tandem-ignored" not in answer.headers, answer.text
        thought, call = answer.json()["output"]
        assert (thought["type"], call["type"], call["status"]) == ("reasoning", "custom_tool_call", "completed")
        assert (call["name"], call["input"]) == ("apply_patch", LARK_PATCH)
        assert "start: begin hunk+ end" in prompt_of(rig), "the model sees its tool"
        grammar = rig.backend.requests[-1].sampling.grammar or ""
        assert allows(grammar, f"{THOUGHT}\n\n{LARK_PATCH}") and not allows(grammar, f"{THOUGHT}x{LARK_PATCH}")
        events = sse((await ask(rig, stream=True, **asked)).text)
        own = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
        assert "".join(event["delta"] for event in own[:-1]) == own[-1]["input"] == LARK_PATCH
        assert events[-1]["response"]["output"][1] | {"id": "", "call_id": ""} == call | {"id": "", "call_id": ""}
        again = [{"role": "user", "content": "x"}, call, {**call, "type": "custom_tool_call_output", "output": "ok"}]
        del again[2]["name"], again[2]["input"]
        assert (await ask(rig, input=again)).status_code == 200


async def test_a_held_text_needs_no_parser_and_may_be_cut_or_empty() -> None:
    asked = {"tools": [PATCHING], "tool_choice": "required"}
    async with gateway(saying("\n*** Begin")) as rig:
        (call,) = (await ask(rig, **asked)).json()["output"]
        assert call["input"] == "\n*** Begin", "without thinking no line break is taken away"
        cut = (await ask(rig, **asked, max_output_tokens=3)).json()
        assert (cut["status"], cut["output"][0]["status"], cut["output"][0]["input"]) == ("incomplete",) * 2 + ("\n**",)
    async with gateway(saying("")) as rig:
        (call,) = (await ask(rig, **asked)).json()["output"]
        assert (call["type"], call["input"]) == ("custom_tool_call", "")


MARKED = "+ prompt = '<|channel|>analysis<|message|>hi<|end|>' </think> <|start|>assistant<|ch"


@pytest.mark.parametrize(
    ("form", "before"),
    [
        (OpenAIGptOss(), ""),
        (OpenAIGptOss(), "<|channel|>analysis<|message|>Hm.<|end|>\n"),
        (OpenAIGptOss(), "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"),
        (Qwen3(), "<think>Hm.</think>\n\n"),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
async def test_marks_in_a_held_text_are_text(form: Any, before: str, tokens_per_step: int) -> None:
    asked = {"tools": [PATCHING], "tool_choice": "required"}
    for text in (MARKED, f"<{MARKED}"):
        backend = saying(before + text, tokens_per_step=tokens_per_step)
        async with gateway(backend, text={"reasoning_format": form}) as rig:
            *thought, call = (await ask(rig, **asked)).json()["output"]
            assert [one["content"][0]["text"] for one in thought] == ["Hm."] * bool(before)
            assert (call["type"], call["status"], call["input"]) == ("custom_tool_call", "completed", text)
            streamed = sse((await ask(rig, stream=True, **asked)).text)
            assert streamed[-1]["response"]["output"][-1]["input"] == text
            deltas = [event for event in streamed if event["type"].endswith(".delta")]
            assert len(deltas) <= 2 or tokens_per_step < 1000, "no event of its own for each character"


async def test_grammars_that_cannot_hold_a_forced_call_are_refused_by_their_place() -> None:
    def of(syntax: str, definition: str) -> dict[str, Any]:
        return {**EXEC, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}

    async with tooled(saying(CODE)) as rig:
        for tool in (of("lark", "start: nothing"), of("lark", "start: ("), of("lark", ""), of("regex", "(")):
            refused = await ask(rig, tools=[WEATHER, tool], tool_choice={"type": "custom", "name": "exec"})
            error = error_of(refused)
            assert (refused.status_code, error["code"]) == (400, "invalid_grammar"), error
            assert error["param"] == "tools[1].format.definition" and error["param"] in error["message"]
            assert "structured_outputs" not in error["message"]
        refused = await ask(rig, tools=[PATCHING, WEATHER], tool_choice="required")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "tools[0].format")
        assert "name it in tool_choice" in error_of(refused)["message"]
        fine = await ask(rig, tools=[PATCHING, EXEC], tool_choice={"type": "custom", "name": "exec"})
        assert fine.headers["x-tandem-ignored"] == "tools[].format", "of a tool that is not called"


async def test_allowed_tools_are_the_ones_that_may_be_called() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    async with tooled(saying(CALL)) as rig:
        answer = await ask(rig, tools=[EXEC, WEATHER], tool_choice=allowed)
        assert answer.status_code == 200 and '"exec"' not in prompt_of(rig)
        assert rig.backend.requests[0].sampling.grammar is not None
        bad = {"type": "function", "name": "bad", "parameters": {"type": "array"}}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bad"}]}
        for tools in ([WEATHER, bad], [{"type": "web_search"}, WEATHER, bad]):
            refused = await ask(rig, tools=tools, tool_choice=allowed)
            place = f"tools[{len(tools) - 1}].parameters"
            assert (refused.status_code, error_of(refused)["param"]) == (400, place), "its number in the body"


def turns(count: int, size: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{i:02}" + "x" * size} for i in range(count)]


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns() -> None:
    async with gateway(saying("ok")) as rig:
        items = [{"role": "system", "content": "Rules."}, *turns(31, 40)]
        assert error_of(await ask(rig, input=items))["code"] == "context_length_exceeded"
        answer = await ask(rig, input=items, truncation="auto", max_output_tokens=100, instructions="I.")
        assert answer.json()["truncation"] == "auto" and answer.status_code == 200, answer.text
        text, size = prompt_of(rig), len(rig.backend.requests[-1].prompt_token_ids)
        assert text.startswith("system:I.system:Rules.user:") and text.endswith(f"user:30{'x' * 40}")
        assert size + 100 <= CONTEXT < size + 100 + 2 * 60, "no more than it takes"
        short = await ask(rig, input=items[:3], truncation="auto")
        assert short.status_code == 200 and prompt_of(rig).count("x" * 40) == 2


async def test_an_agents_loop_loses_its_oldest_calls() -> None:
    async with tooled(saying("ok")) as rig:
        items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        for i in range(12):
            items.append({"type": "function_call", "call_id": f"c{i}", "name": "weather", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"c{i}", "output": f"{i:02}" + "y" * 60})
        answer = await ask(rig, input=items, truncation="auto")
        assert answer.status_code == 200, answer.text
        text = prompt_of(rig)
        assert text.startswith("user:Go.assistant:weather{}tool:") and text.endswith("tool:11" + "y" * 60)
        assert text.count("weather{}") == text.count("tool:") >= 4


async def test_input_tokens_are_counted_and_nothing_runs() -> None:
    async with tooled(saying("x")) as rig:
        body = {"input": "hi", "tools": [WEATHER], "instructions": "Be kind."}
        counted = await rig.client.post(f"{PATH}/input_tokens", json=body)
        assert not rig.backend.requests
        used = (await ask(rig, **body)).json()["usage"]["input_tokens"]
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}
        wrong = await rig.client.post(f"{PATH}/input_tokens", json={"input": 5})
        assert error_of(wrong)["param"] == "input"


CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("I should look."), "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": "x"},
        {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "call_1", "id": None},
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "exec", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "b"},
    ],
    "tools": [
        {**WEATHER, "strict": False},
        {**EXEC, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [WEATHER]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"x-codex-turn-metadata": "{}"}},
}
BRIDGED: dict[str, Any] = {
    "model": MODEL,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "max_output_tokens": 64,
    "include": ["reasoning.encrypted_content"],
    "tools": [{**WEATHER, "strict": None}],
    "metadata": {"user_id": "u"},
    "temperature": 1.0,
    "store": False,
    "extra_body": {"litellm_metadata": {"a": "b"}, "context_management": [{"type": "compaction"}]},
}
"""What LiteLLM makes of a body of /v1/messages for a model that it calls `openai/...`."""


async def test_bodies_of_codex_and_of_litellms_bridge() -> None:
    own: dict[str, Any] = {
        "settings": SETTINGS,
        "template": TEMPLATE,
        "text": {**FORMATS, "max_model_len": 4 * CONTEXT},
    }
    async with gateway(saying(f"{THOUGHT}Look: {CODE}"), **own) as rig, served(rig.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            raw = await client.responses.with_raw_response.create(**CODEX)
            events = [event async for event in raw.parse()]
            final = events[-1].response
            assert [item.type for item in final.output] == ["reasoning", "message", "custom_tool_call"]
            assert final.output[0].encrypted_content == sealed("Hm, a city.")
            assert final.output[2].input == PATCH
            assert raw.headers["x-tandem-ignored"].split(", ") == [
                "client_metadata",
                "text.verbosity",
                "reasoning.summary",
                "input[].phase",
                "tools[].web_search",
                "tools[].namespace",
                "tools[].format",
            ]
            assert "(I should look.)I look.weather{}tool:README.md" in prompt_of(rig)
            bridged = await client.responses.create(**BRIDGED)
            assert bridged.output[0].type == "reasoning" and bridged.metadata == {"user_id": "u"}
            count = await client.responses.input_tokens.count(model=MODEL, input="hi")
            assert count.input_tokens > 0


async def test_hosted_tools_are_named_without_their_dates() -> None:
    async with gateway(saying("ok")) as rig:
        dated = [{"type": f"web_search_2025_0{i}_26"} for i in range(9)]
        answer = await ask(rig, tools=dated)
        assert (answer.status_code, answer.headers["x-tandem-ignored"]) == (200, "tools[].web_search")
        assert (await ask(rig, tools=[{"type": "web_search_2025_08_2٦"}])).status_code == 400, (
            "no client writes a header"
        )


async def test_strict_services_refuse_what_agents_send_without_need() -> None:
    async with gateway(settings=GatewaySettings(strict_fields=True)) as rig:
        answer = await ask(rig, **{name: value for name, value in CODEX.items() if name != "tools"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "unsupported_parameter")
