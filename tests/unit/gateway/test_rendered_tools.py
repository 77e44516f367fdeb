"""Tools, calls and thinking as a chat body has them, rendered as transformers renders them."""

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.schemas.chat_body import TokenizeBody, read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import read
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.tokenizer import load_tokenizer
from tests.unit.gateway.rig import MODEL, make_text
from tests.unit.text.data import SHARED, needs_data, tokenizer_folder

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Wie <ist> es?", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "clock", "description": "&", "parameters": {**PARAMETERS, "required": []}},
    },
]
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "asked": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "answered": [
        {"role": "user", "content": "How is Köln?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
    "thoughtful": [
        {"role": "user", "content": "How is Köln?"},
        {"role": "assistant", "content": "Wet.", "reasoning_content": "It rains there."},
        {"role": "user", "content": "And now?"},
    ],
}
SOURCES = ("minimind", "qwen2.5-instruct", "granite-3.0-instruct")


def sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client sends them: arguments as text."""
    turns = json.loads(json.dumps(messages))
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return turns  # type: ignore[no-any-return]


@needs_data
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_the_prompt_is_that_of_transformers(source: str, name: str, tools: list[dict[str, Any]] | None) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer_folder("minimind")
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    template = find_chat_template(folder, None, tokenizer)
    if source != "minimind":
        path = SHARED / "chat_templates" / f"{source}.jinja"
        template = ChatTemplate(path.read_text(), tokenizer.special_tokens)
    assert template is not None
    settings = GatewaySettings()
    metrics = GatewayMetrics(CollectorRegistry(), "tandem", MODEL)
    given = {"vocab_size": tokenizer.vocab_size, "max_model_len": 4096}
    text = make_text(settings, metrics, tokenizer, chat_template=template, **given)
    kwargs = {"open_thinking": True} if template.takes("open_thinking") else {}
    messages = CONVERSATIONS[name]
    wanted = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template.source, tokenize=False, add_generation_prompt=True, **kwargs
    )
    ignored = IgnoredFields()
    body = {"messages": sent(messages), "tools": tools, "chat_template_kwargs": kwargs}
    assert chat_prompt(text, read_chat(body, settings, ignored), ignored).text == wanted
    assert chat_prompt(text, read(body, TokenizeBody), ignored).text == wanted
    if tools:
        assert "weather" in wanted, "the template shows them"
    text.workers.close()
