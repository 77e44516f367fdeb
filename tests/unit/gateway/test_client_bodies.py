"""Bodies as agents, front ends and routers send them, imitated: each is served as it comes and says what is ignored."""

import json
from typing import Any

import pytest

from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import CHAT, COMPLETE, USER, error_of, events, gateway
from tests.unit.gateway.test_messages import COUNT, PATH, refusal_of, sse, tooled
from tests.unit.gateway.test_responses import prompt_of
from tests.unit.gateway.test_tool_calls import CALL, saying

HEADER = "x-tandem-ignored"
EPHEMERAL = {"type": "ephemeral"}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 100,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are a CLI.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "abc"},
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "weather",
                    "input": {"city": "Rom"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "sun", "cache_control": EPHEMERAL}],
                    "cache_control": EPHEMERAL,
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "weather",
            "description": "The weather.",
            "input_schema": SCHEMA,
            "eager_input_streaming": True,
            "cache_control": EPHEMERAL,
        }
    ],
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s"})},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CLAUDE_CODE_IGNORED = {
    "system[].cache_control",
    "messages[].content[].cache_control",
    "messages[].content[].content[].cache_control",
    "tools[].eager_input_streaming",
    "tools[].cache_control",
    "context_management",
}
BETAS = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14,effort-2025-11-24"}


def named(answer: Any) -> set[str]:
    return set(filter(None, answer.headers.get(HEADER, "").split(", ")))


@pytest.mark.parametrize("thinking", [None, "adaptive", "disabled", "enabled"])
async def test_claude_code_is_served(thinking: str | None) -> None:
    switch = {"type": thinking, **({"budget_tokens": 60} if thinking == "enabled" else {})}
    body = {**CLAUDE_CODE, "thinking": switch if thinking else None}
    thought = "" if thinking == "disabled" else "hm</think>"
    idle = {"output_config.effort"} if thinking == "disabled" else set()
    async with tooled(saying(f"{thought}I look. {CALL}")) as rig:
        answer = await rig.client.post(f"{PATH}?beta=true", json=body, headers=BETAS)
        assert answer.status_code == 200 and named(answer) == CLAUDE_CODE_IGNORED | idle, answer.text
        assert sse(answer.text)[-2]["delta"]["stop_reason"] == "tool_use"
        prompt = prompt_of(rig)
        for text in ("You are a CLI.\nBe short.", "<system-reminder>x", '(hm)weather{"city": "Rom"}', "tool:sun"):
            assert text in prompt
        counted = {key: body[key] for key in ("model", "system", "messages", "tools", "thinking", "output_config")}
        count = await rig.client.post(f"{COUNT}?beta=true", json=counted, headers=BETAS)
        assert count.json() == {"input_tokens": len(rig.backend.requests[-1].prompt_token_ids)}
        assert named(count) == CLAUDE_CODE_IGNORED - {"context_management"} | idle
        assert prompt.endswith("!" if thinking == "disabled" else "<think>")


async def test_claude_code_is_served_by_a_model_without_thinking_and_tools() -> None:
    """Nothing that only switches is in the way; the tools are not shown, and that is said."""
    enabled = {"type": "enabled", "budget_tokens": 50, "display": "omitted"}
    async with gateway(saying("ok")) as rig:
        answer = await rig.client.post(PATH, json={**CLAUDE_CODE, "stream": False, "thinking": enabled}, headers=BETAS)
        assert answer.status_code == 200, answer.text
        switches = {"tools", "output_config.effort", "thinking.budget_tokens", "thinking.display"}
        assert named(answer) == CLAUDE_CODE_IGNORED | switches
        assert answer.json()["content"] == [{"type": "text", "text": "ok", "citations": None}]


async def test_thinking_that_is_not_to_be_shown_is_left_out() -> None:
    async with tooled(saying("<think>hm</think>ok")) as rig:
        for display, kinds in ((None, ["thinking", "text"]), ("omitted", ["text"])):
            switch = {"type": "adaptive", "display": display}
            answer = await rig.client.post(PATH, json={"messages": USER, "max_tokens": 99, "thinking": switch})
            assert [block["type"] for block in answer.json()["content"]] == kinds


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, "tools[0]"),
        ({"tools": [{"type": "bash_2025012٤", "name": "bash"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
        ({"container": {"id": "c", "skills": []}}, "container"),
        ({"output_config": {"task_budget": {"total": 5}}}, "output_config.task_budget"),
    ],
)
async def test_what_claude_codes_answers_would_need_is_refused_by_name(fields: dict[str, Any], place: str) -> None:
    async with tooled(saying("ok")) as rig:
        answer = await rig.client.post(PATH, json={**CLAUDE_CODE, **fields}, headers=BETAS)
        assert answer.status_code == 400 and place in refusal_of(answer)["message"]


ANTHROPICS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
    {"type": "memory_20250818", "name": "memory", "cache_control": EPHEMERAL},
]


async def test_tools_that_only_anthropics_models_know_are_left_out_and_named() -> None:
    own = {**CLAUDE_CODE["tools"][0], "defer_loading": True}
    kinds = ("bash", "code_execution", "computer", "memory", "text_editor", "tool_search_tool_regex")
    names = {f"tools[].{kind}" for kind in (*kinds, "web_fetch", "web_search")} | {"tools[].defer_loading"}
    async with tooled(saying("ok")) as rig:
        for choice in (None, {"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "weather"}):
            rig.backend.script = saying(CALL if choice and choice["type"] in ("any", "tool") else "ok").script
            body = {**CLAUDE_CODE, "tools": [*ANTHROPICS, own], "tool_choice": choice}
            answer = await rig.client.post(PATH, json=body, headers=BETAS)
            assert answer.status_code == 200 and named(answer) == CLAUDE_CODE_IGNORED | names, answer.text
            plain = await rig.client.post(PATH, json={**body, "tools": CLAUDE_CODE["tools"]}, headers=BETAS)
            assert plain.status_code == 200
            ours, theirs = (request.prompt_token_ids for request in rig.backend.requests[-2:])
            assert ours == theirs, "as if they were not there"
    async with gateway(saying("ok"), settings=GatewaySettings(strict_fields=True)) as rig:
        for tool in ANTHROPICS:
            answer = await rig.client.post(PATH, json={"messages": USER, "max_tokens": 9, "tools": [tool]})
            assert answer.status_code == 400 and f"tools[0]: the type {tool['type']}" in refusal_of(answer)["message"]


SEARCHED: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "https://x", "title": "x", "encrypted_content": "x"}],
        "caller": {"type": "direct"},
    },
    {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "x"}]},
    {"type": "code_execution_tool_result", "tool_use_id": "c", "content": {"type": "code_execution_result"}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "b", "content": {}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "t", "content": {}},
    {"type": "web_fetch_tool_result", "tool_use_id": "w", "content": {}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
]
"""Blocks of an answer of Anthropic's API, which a client echoes to whichever model goes on."""


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_what_anthropics_servers_did_before_is_left_out_and_named(path: str) -> None:
    """As if it were not there, also where an answer had nothing else, ended with it, or calls a tool behind it."""
    limit = {"max_tokens": 9} if path == PATH else {}
    names = {f"messages[].content[].{block['type']}" for block in SEARCHED}
    said = [{"type": "text", "text": "I look."}, {"type": "text", "text": "It is sunny."}]
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sun"}
    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]] = [
        ([said[0], *SEARCHED, said[1]], said, [USER]),
        ([said[0], *SEARCHED], said[:1], []),
        ([*SEARCHED, call], [call], [[{"role": "user", "content": [result]}]]),
        (SEARCHED, [{"type": "text", "text": ""}], [USER]),
    ]
    async with gateway(saying("ok")) as rig:
        for echoed, plain, behind in cases:
            counts = []
            for content in (echoed, plain):
                messages = [*USER, {"role": "assistant", "content": content}, *(behind[0] if behind else [])]
                answer = await rig.client.post(path, json={**limit, "messages": messages})
                assert answer.status_code == 200, answer.text
                assert named(answer) == (names if content is echoed else set())
                counts.append(answer.json().get("input_tokens"))
            assert counts[0] == counts[1]
            if path == PATH:
                ours, theirs = (request.prompt_token_ids for request in rig.backend.requests[-2:])
                assert ours == theirs
        late = [*USER, {"role": "assistant", "content": [*SEARCHED[:2], call]}, *USER]
        refused = await rig.client.post(path, json={**limit, "messages": late})
        assert refused.status_code == 400 and "messages[1].content[2]: the tool_use" in refusal_of(refused)["message"]


async def test_a_choice_among_tools_that_are_left_out_is_refused() -> None:
    async with gateway(saying("ok")) as rig:
        for path, limit in ((PATH, {"max_tokens": 9}), (COUNT, {})):
            for choice in (None, {"type": "auto"}, {"type": "none"}):
                body = {"messages": USER, **limit, "tools": ANTHROPICS, "tool_choice": choice}
                assert (await rig.client.post(path, json=body)).status_code == 200
            for choice, words in (
                ({"type": "any"}, "tool_choice: all tools are Anthropic's"),
                ({"type": "tool", "name": "bash"}, 'tool_choice.name: this model is not shown "bash"'),
                ({"type": "tool", "name": "str_replace_based_edit_tool"}, 'is not shown "str_replace_based_edit_tool"'),
            ):
                refused = await rig.client.post(path, json={**body, "tool_choice": choice})
                assert refused.status_code == 400 and words in refusal_of(refused)["message"]


async def test_refusals_name_a_tool_by_its_number_in_the_body() -> None:
    """Whatever was left out in front of it."""
    search, fetch = ANTHROPICS[:2]
    good, bad = CLAUDE_CODE["tools"][0], {"name": "a b", "input_schema": {}}
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([search, good, fetch, fetch, bad], "tools[4].name"),
        ([search, {"name": "f"}], "tools[1].input_schema"),
        ([good, search, {"type": "mcp_toolset"}], "tools[2]"),
        ([good, bad], "tools[1].name"),
    ]
    async with tooled(saying("ok")) as rig:
        for tools, place in cases:
            refused = await rig.client.post(PATH, json={"messages": USER, "max_tokens": 9, "tools": tools})
            assert refused.status_code == 400 and place in refusal_of(refused)["message"], (place, refused.text)
        hosted = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
        broken = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "("}}
        forced = {"type": "custom", "name": "c"}
        for tools, choice, place in (
            ([*hosted, broken], forced, "tools[2].format.definition"),
            ([*hosted, {"type": "function"}], None, "tools[2].name"),
            ([*hosted, {"type": "local_shell"}], None, "tools[2]"),
        ):
            body = {"input": "hi", "tools": tools, "tool_choice": choice}
            error = error_of(await rig.client.post("/v1/responses", json=body))
            assert error["param"] == place and place in error["message"]


ECHOED_CALL = {
    "index": 0,
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rom"}', "provider_specific_fields": None},
    "provider_specific_fields": {"thought_signature": "x"},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SEEN = ("Be kind.", "hi", '(hm)weather{"city": "Rom"}', "tool:sun")
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind.", "cache_control": EPHEMERAL}]},
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [ECHOED_CALL],
        "function_call": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "reasoning_content": "hm",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}],
        "provider_specific_fields": {"refusal": None},
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
]
CACHED = "messages[].content[].cache_control"
CALLS = {"messages[].tool_calls[].index", "messages[].tool_calls[].provider_specific_fields"}
CLIENTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "LiteLLM": (
        {"messages": CONVERSATION, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}},
        {CACHED, *CALLS, "messages[].provider_specific_fields", "messages[].thinking_blocks"},
    ),
    "Open WebUI": (
        {
            "messages": CONVERSATION[:2],
            "stream": True,
            "chat_id": "c",
            "session_id": "s",
            "id": "m",
            "features": {"web_search": False, "image_generation": False},
            "background_tasks": {"title_generation": True},
            "model_item": {"id": "echo", "owned_by": "openai"},
        },
        {CACHED, "chat_id", "session_id", "id", "features", "background_tasks", "model_item"},
    ),
    "OpenRouter": (
        {
            "messages": CONVERSATION,
            "tools": [TOOL],
            "reasoning": {"effort": "high", "exclude": True},
            "usage": {"include": True},
            "provider": {"order": ["x"]},
            "models": ["echo"],
            "route": "fallback",
            "stream": True,
        },
        {
            CACHED,
            *CALLS,
            "messages[].provider_specific_fields",
            "messages[].thinking_blocks",
            "provider",
            "models",
            "route",
        },
    ),
    "Cline": (
        {
            "messages": CONVERSATION[:2],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
        },
        {CACHED},
    ),
    "Aider": (
        {"messages": CONVERSATION[:2], "temperature": 0, "stream": True, "cache_control": EPHEMERAL, "user": "u"},
        {CACHED, "cache_control"},
    ),
    "OpenAI": (
        {
            "messages": [*USER, {"role": "assistant", "content": "x", "parsed": None, "refusal": None}, *USER],
            "store": True,
            "metadata": {"a": "b"},
            "service_tier": "flex",
            "verbosity": "low",
            "prediction": {"type": "content", "content": "x"},
            "safety_identifier": "u",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "stream_options": {"include_obfuscation": False},
        },
        {
            *("store", "metadata", "service_tier", "verbosity", "prediction", "safety_identifier"),
            "prompt_cache_retention",
        },
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_bodies_of_clients_are_served_as_they_come(client: str) -> None:
    body, ignored = CLIENTS[client]
    async with tooled(saying("fine")) as rig:
        answer = await rig.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert named(answer) == ignored
        if "tools" in body:
            assert all(text in prompt_of(rig) for text in SEEN)


async def test_a_routers_settings_of_thinking_are_openais() -> None:
    async with tooled(saying("<think>hm</think>ok")) as rig:

        async def said(**fields: Any) -> Any:
            answer = await rig.chat(**fields)
            assert answer.status_code == 200 and HEADER not in answer.headers, answer.text
            request = rig.backend.requests[-1]
            budget = request.sampling.thinking_budget
            return prompt_of(rig), budget and budget.tokens, "reasoning" in answer.json()["choices"][0]["message"]

        same: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"effort": "high"}, {"reasoning_effort": "high"}),
            ({"enabled": True}, {"reasoning_effort": "medium"}),
            ({"enabled": False}, {"reasoning_effort": "none"}),
            ({"max_tokens": 9}, {"thinking_token_budget": 9}),
            ({"exclude": True}, {"include_reasoning": False}),
        ]
        for theirs, ours in same:
            assert await said(reasoning=theirs) == await said(**ours), theirs
        for fields, param in (
            ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning"),
            ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"usage": {"exclude": True}}, "usage.exclude"),
        ):
            assert error_of(await rig.chat(**fields))["param"] == param


async def test_a_routers_usage_is_the_last_chunk_of_a_stream() -> None:
    async with gateway(saying("ok")) as rig:
        for fields in ({"usage": {"include": True}}, {"stream_options": {"include_usage": True}}):
            *_, last, done = events((await rig.chat(stream=True, **fields)).text)
            assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        assert "usage" in (await rig.chat(usage={"include": True})).json()


async def test_tokens_may_be_named_by_their_ids() -> None:
    """As trainers ask, since the texts of parts of characters are all alike."""
    async with gateway(saying("é")) as rig:
        for path, body in (
            (CHAT, {"messages": USER, "top_logprobs": 1, "logprobs": True}),
            (COMPLETE, {"prompt": "é", "logprobs": 1, "echo": True}),
        ):
            answer = await rig.client.post(path, json={**body, "return_tokens_as_token_ids": True})
            (choice,) = answer.json()["choices"]
            if path == CHAT:
                entries = choice["logprobs"]["content"]
                assert [entry["token"] for entry in entries] == ["token_id:195", "token_id:169", "token_id:257"]
                assert [entry["bytes"] for entry in entries[:2]] == [[195], [169]]
                assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
            else:
                names = ["token_id:256", "token_id:195", "token_id:169"] * 2
                assert choice["logprobs"]["tokens"] == [*names[:3], *names[1:3], "token_id:257"]
                assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for key in top)
