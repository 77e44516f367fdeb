"""Fields that clients send the OpenAI routes beside what changes an answer, by place in the body: ids, metadata, hints
of how to serve, and what they echo of an earlier answer."""

from typing import Any

from tandem.cluster.gateway.schemas.ignored_fields import Ignorable, Ignorables, IgnoredFields, ignorable
from tandem.cluster.gateway.schemas.reading import neutral_values

HINTS: dict[str, Ignorable] = {
    # OpenAI's service: what it stores, whom it serves first, what it caches, what it may guess
    "store": Ignorable(neutral_values(False)),
    "metadata": Ignorable(neutral_values({}), is_usual=True),
    "safety_identifier": Ignorable(neutral_values(""), is_usual=True),
    "prompt_cache_key": Ignorable(neutral_values(""), is_usual=True, is_kept=True),
    "service_tier": Ignorable(neutral_values("auto", "default")),
    "verbosity": Ignorable(neutral_values("medium")),
    **ignorable("prompt_cache_retention", "prompt_cache_options", "prediction"),
    # other engines' mechanisms: vLLM, SGLang, llama.cpp, LM Studio, Ollama
    **ignorable("request_id", "kv_transfer_params", "stream_interval", "skip_reading_prefix_cache"),
    **ignorable("rid", "cache_prompt", "id_slot", "ttl", "keep_alive"),
    # front ends and routers: Open WebUI, LiteLLM, OpenRouter, agents
    **ignorable("id", "chat_id", "session_id", "features", "background_tasks", "model_item", "client_metadata"),
    **ignorable("litellm_metadata", "cache_control", "provider", "route", "models", "trace"),
}
"""Fields of every body."""

ECHOED = ("id", "provider_specific_fields")
STREAM_OPTIONS: dict[str, Ignorable] = {"include_obfuscation": Ignorable(neutral_values(False))}
GENERATION_HINTS: Ignorables = {"": HINTS, "stream_options": STREAM_OPTIONS}
MESSAGE_HINTS: Ignorables = {
    "messages[]": {
        **ignorable(*ECHOED, "cache_control", "parsed", "status", "created_at", "timestamp", "model", "usage"),
        **ignorable("finish_reason", "stop_reason", "logprobs", "index"),
        "annotations": Ignorable(neutral_values([])),
    },
    "messages[].content[]": ignorable(*ECHOED, "cache_control", "annotations", "citations", "prompt_cache_breakpoint"),
    "messages[].tool_calls[]": ignorable("index", "provider_specific_fields", "extra_content", "cache_control"),
    "messages[].tool_calls[].function": ignorable("parsed_arguments", "provider_specific_fields"),
    "tools[]": ignorable("cache_control", "eager_input_streaming"),
    "tools[].function": ignorable("cache_control", "eager_input_streaming"),
}
"""Hints in conversations. An echoed answer's text, calls and thinking are no hints: the model sees them."""
CHAT_HINTS: Ignorables = {**GENERATION_HINTS, **MESSAGE_HINTS}
TOKENIZE_HINTS: Ignorables = {"": HINTS, **MESSAGE_HINTS}
TEXT_HINTS: Ignorables = {"": HINTS}
"""Hints in bodies without messages and streams."""
THOUGHTS: Ignorables = {"": ignorable("reasoning_details", "thinking_blocks")}
"""Forms in which routers repeat an echoed answer's thinking."""
SPACES: Ignorables = {"": {"spaces_between_special_tokens": Ignorable(neutral_values(True))}}
"""Nothing is between special tokens where none are shown."""


def take_hints(fields: dict[str, Any], table: Ignorables, ignored: IgnoredFields) -> None:
    """Takes the hints of a table out of a body, which is changed, and what is one beside its other fields."""
    ignored.take_from(fields, table)
    if fields.get("skip_special_tokens") is not False:
        ignored.take_from(fields, SPACES)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and (message.get("reasoning") or message.get("reasoning_content")):
            ignored.take_from(message, THOUGHTS, f"messages[{i}]")
