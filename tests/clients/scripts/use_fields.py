"""Fields of vLLM and bodies of front ends, each sent alone: served, named in x-tandem-ignored, or refused by name."""

import json
import platform
import urllib.error
import urllib.request

from calls import OPENAI, USER, call, say

say(package="python", version=platform.python_version())

SEND = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CHAT = {"model": "demo", "messages": USER, "max_tokens": 4}
TEXT = {"model": "demo", "prompt": "Once", "max_tokens": 4}
ASKED = {"model": "demo", "input": "Once", "max_output_tokens": 4}
ROUTES = {"chat/completions": CHAT, "completions": TEXT, "responses": ASKED}
SERVED, IGNORED, REFUSED = "served", "ignored", "refused"
GENERATION = {
    SERVED: {
        "seed": 1, "stop": ["."], "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "logit_bias": {"5": -1}, "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 1,
        "skip_special_tokens": False, "priority": 0, "cache_salt": "a", "bad_words": ["x"],
        "include_stop_str_in_output": True, "structured_outputs": {"choice": ["yes", "no"]},
        "allowed_token_ids": [5, 6],
    },
    IGNORED: {"request_id": "a", "kv_transfer_params": {}, "session_id": "a", "stream_interval": 4, "chat_id": "a"},
    REFUSED: {"vllm_xargs": {"a": 1}, "no_such_field": 1},
}  # fmt: skip
"""Of all three routes, but for what BY_ROUTE says."""
ECHOED = {"role": "assistant", "content": None, "tool_calls": [
    {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
BY_ROUTE = {
    "chat/completions": {
        SERVED: {
            "return_tokens_as_token_ids": True, "return_token_ids": True, "include_reasoning": True,
            "truncate_prompt_tokens": 8, "reasoning": {"effort": "none"}, "usage": {"include": True},
            "chat_template_kwargs": {}, "n": 2,
        },
        IGNORED: {
            "store": True, "length_penalty": 2.0, "features": {"a": False}, "metadata": {"a": "b"},
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "verbosity": "low",
            "spaces_between_special_tokens": False, "include_reasoning": False, "thinking_token_budget": 5,
            "messages": [*USER, ECHOED, {"role": "tool", "tool_call_id": "a", "content": "b"}],
        },
        REFUSED: {
            "chat_template": "x", "documents": [{"text": "a"}], "max_tokens": 0, "logprob_token_ids": [5],
            "return_token_offsets": True, "repetition_detection": {"max_pattern_size": 4},
            "regex": "a+", "separate_reasoning": False, "audio": {"voice": "a"}, "guided_no_such": "a",
        },
    },
    "completions": {
        SERVED: {"echo": True, "logprobs": 2, "return_tokens_as_token_ids": True, "add_special_tokens": False},
        IGNORED: {"store": True, "length_penalty": 2.0, "stream_options": {"include_usage": True}},
        REFUSED: {"suffix": "end", "logprob_token_ids": [5], "max_tokens": -2},
    },
    "responses": {
        SERVED: {
            "include": ["reasoning.encrypted_content"], "truncation": "auto", "top_logprobs": 2, "store": False,
            "chat_template_kwargs": {}, "prompt_cache_key": "a",
        },
        IGNORED: {
            "max_tool_calls": 2, "client_metadata": {"a": "b"}, "text": {"verbosity": "low"},
            "tools": [{"type": "web_search"}],
        },
        REFUSED: {"background": True, "conversation": "a", "tools": [{"type": "code_interpreter"}]},
    },
}  # fmt: skip


def check(route: str, fields: dict, outcome: str) -> None:
    """Sends a body with the fields, and holds its outcome."""
    (name,) = fields
    body = json.dumps({**ROUTES[route], **fields}).encode()
    request = urllib.request.Request(f"{OPENAI}/{route}", body, {"content-type": "application/json"})
    try:
        with SEND.open(request, timeout=60) as answer:
            told, found = answer.headers.get("x-tandem-ignored", ""), SERVED
            answer.read()
            found = IGNORED if told else SERVED
    except urllib.error.HTTPError as error:
        told = error.read().decode()
        found = REFUSED if error.code == 400 else str(error.code)
    assert found == outcome, f"{found}, not {outcome}: {told}"
    assert outcome == SERVED or name in told, f"{name} is not named: {told}"


for route, own in BY_ROUTE.items():
    for outcome in (SERVED, IGNORED, REFUSED):
        for name, value in {**GENERATION[outcome], **own[outcome]}.items():
            with call(f"{route}: {name} {outcome}"):
                check(route, {name: value}, outcome)
