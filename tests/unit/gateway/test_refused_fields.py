"""Fields of a body: refused by name, with code and param in the contract's shape, or neutral."""

from typing import Any

import pytest

from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import BOTH, CHAT, COMPLETE, CONTEXT, MINIMAL, USER, VOCAB, Rig, error_of, gateway

INVALID, UNSUPPORTED, GRAMMAR = "invalid_value", "unsupported_parameter", "invalid_grammar"

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
    ({"stop": ["a"] * 33}, "stop", INVALID),
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
    ({"stream_options": {"include_usage": True}}, "stream_options", UNSUPPORTED),
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
    ({"allowed_token_ids": []}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", INVALID),
    ({"allowed_token_ids": "5"}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [2**31]}, "allowed_token_ids[0]", INVALID),
    ({"bad_words": "x"}, "bad_words", INVALID),
    ({"bad_words": ["x", ""]}, "bad_words[1]", INVALID),
    ({"bad_words": [5]}, "bad_words[0]", INVALID),
    ({"bad_words": ["x" * 257]}, "bad_words[0]", INVALID),
    ({"bad_words": ["x"] * 257}, "bad_words", INVALID),
    ({"priority": 2**40}, "priority", INVALID),
    ({"cache_salt": ""}, "cache_salt", INVALID),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", INVALID),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", INVALID),
    ({"user": 5}, "user", INVALID),
    ({"response_format": "text"}, "response_format", INVALID),
    ({"response_format": {"type": "yaml"}}, "response_format.type", INVALID),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", INVALID),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", INVALID),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", INVALID),
    ({"response_format": {"type": "text", "triggers": []}}, "response_format.triggers", INVALID),
    ({"response_format": {"type": "text", "mood": 1}}, "response_format.mood", UNSUPPORTED),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", INVALID),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format", UNSUPPORTED),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", INVALID),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs.disable_fallback", UNSUPPORTED),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", GRAMMAR),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", GRAMMAR),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs", GRAMMAR),
    ({"structured_outputs": {"regex": "a" * 4097}}, "structured_outputs", GRAMMAR),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        GRAMMAR,
    ),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", GRAMMAR),
    ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", GRAMMAR),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", GRAMMAR),
    ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", GRAMMAR),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", INVALID),
    ({"guided_json": {}, "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", INVALID),
    ({"prompt_logprobs": -1}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": 21}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"store": 0}, "store", UNSUPPORTED),
    ({"service_tier": "priority"}, "service_tier", UNSUPPORTED),
    ({"use_beam_search": True, "stream": True}, "stream", UNSUPPORTED),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p", UNSUPPORTED),
    ({"use_beam_search": 1}, "use_beam_search", INVALID),
    ({"length_penalty": 2}, "length_penalty", UNSUPPORTED),
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
    ({"messages": [*USER, {"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[1].refusal", UNSUPPORTED),
    ({"messages": [{"role": "user", "content": "x", "mood": None}]}, "messages[0].mood", UNSUPPORTED),
    ({"messages": USER * 2049}, "messages", INVALID),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages", INVALID),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        INVALID,
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}, "messages", "context_length_exceeded"),
    ({"max_tokens": 511}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 5, "max_completion_tokens": 511}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", INVALID),
    ({"logprobs": 5}, "logprobs", INVALID),
    ({"top_logprobs": 2}, "top_logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", UNSUPPORTED),
    ({"tools": [{}], "tool_choice": "auto"}, "tools[0].type", INVALID),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", INVALID),
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
    ({"prompt": [1] * 600, "max_tokens": 600}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 512, "max_tokens": 1}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 500}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 512}, "max_tokens", "context_length_exceeded"),
    ({"logprobs": 21}, "logprobs", INVALID),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"logprobs": 1, "echo": True, "stream": True}, "logprobs", UNSUPPORTED),
    ({"logprobs": 1, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs", INVALID),
    ({"logprobs": 1, "echo": True, "use_beam_search": True}, "logprobs", UNSUPPORTED),
    ({"max_tokens": 0, "echo": True, "use_beam_search": True}, "max_tokens", UNSUPPORTED),
    ({"max_tokens": 0, "echo": False}, "max_tokens", INVALID),
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

STRICT = GatewaySettings(strict_fields=True)
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
    {"bad_words": [], "allowed_token_ids": None},
    {"modalities": ["text"]},
    {"functions": [], "function_call": "none", "suffix": "", "structured_outputs": {}},
    {"temperature": 1, "top_p": 1, "top_k": 0, "seed": -5},
    {"stream": False, "n": 1, "best_of": 1, "logprobs": None, "stop": None, "prompt_logprobs": None},
    {"stop": "\u0000", "user": "\u0000"},
]


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
async def test_strict_fields_are_refused_by_name(path: str) -> None:
    wrong, cases = [], [case for case in FIELD_CASES if case[0] == path]
    async with gateway(settings=STRICT) as rig:
        for _, fields, param, code in cases:
            answer = await rig.client.post(path, json={**MINIMAL[path], **fields})
            error = error_of(answer)
            said = (answer.status_code, error["code"], error["param"], error["type"])
            if said != (400, code, param, "invalid_request_error") or rig.backend.requests:
                wrong.append((str(fields)[:200], error))
                rig.backend.requests.clear()
    assert len(cases) >= 4 and not wrong


async def test_an_answers_whole_message_may_be_sent_back(rig: Rig) -> None:
    """As clients do that dump their message objects."""
    absent = dict.fromkeys(
        ["refusal", "audio", "function_call", "tool_calls", "reasoning", "reasoning_content", "name"]
    )
    turn = {"role": "assistant", "content": "x", "annotations": [], **absent}
    for path, more in (("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})):
        answer = await rig.client.post(path, json={"messages": [*USER, turn, *USER], **more})
        assert answer.status_code == 200, answer.text


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
    ({"tool_choice": "some"}, "tool_choice", ("none", "auto", "required")),
    (
        {"response_format": {"type": "yaml"}},
        "response_format.type",
        ("text", "json_object", "json_schema", "structural_tag"),
    ),
    ({"service_tier": "priority"}, "service_tier", ("auto", "default")),
    ({"reasoning_effort": "high"}, "reasoning_effort", ("none",)),
    ({"reasoning_effort": "huge"}, "reasoning_effort", ("none", "low", "high")),
    ({"verbosity": "high"}, "verbosity", ("medium",)),
]


GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n: Expected `int` >= 1, not 0."),
    ({"top_p": 0}, "top_p: Expected `float` > 0.0, not 0."),
    ({"max_tokens": "5"}, "max_tokens: Expected `int | null`, got `str`."),
    ({"messages": []}, "messages: Expected `array` of length >= 1, not []."),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]: Expected `int` >= 0, not -1."),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]: Expected `float` <= 100.0."),
    ({"response_format": {"type": "x" * 99}}, f'"text", not "{"x" * 79}.'),
    ({"messages": [{"role": "critic", "content": "x"}]}, '"user", not "critic".'),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, '{1,64}$\', not "a b".'),
]


@pytest.mark.parametrize(("fields", "words"), GIVEN, ids=lambda v: str(v)[:50])
async def test_a_refusal_ends_with_the_value_that_was_given(fields: dict[str, Any], words: str) -> None:
    async with gateway() as rig:
        assert error_of(await rig.chat(**fields))["message"].endswith(words)


@pytest.mark.parametrize(("fields", "param", "values"), ENUMERATED, ids=lambda v: str(v)[:50])
async def test_a_field_with_few_values_lists_them(fields: dict[str, Any], param: str, values: tuple[str, ...]) -> None:
    async with gateway(settings=STRICT) as rig:
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


TOO_LONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [1] * 500, "max_tokens": 13}, "Shorten the prompt or ask for at most 12 tokens."),
    ({"prompt": [1] * 600, "max_tokens": 12}, "Shorten the prompt to at most 500 tokens."),
    ({"prompt": [1] * 600, "max_tokens": 600}, "Shorten the prompt to at most 511 tokens."),
]


@pytest.mark.parametrize(("fields", "words"), TOO_LONG, ids=lambda v: str(v)[-40:])
async def test_what_is_too_long_says_what_would_fit(fields: dict[str, Any], words: str) -> None:
    async with gateway() as rig:
        message = error_of(await rig.complete(**fields))["message"]
        assert message.startswith(f"This model's context is {CONTEXT} tokens; ") and message.endswith(words)
