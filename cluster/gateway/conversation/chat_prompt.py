"""Makes the prompt of a conversation: messages -> template -> token ids without special tokens. Work for the threads of
text_workers.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.conversation.chat_checks import check_conversation, template_tools, template_variables
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.chat_body import ChatBody, Message, TokenizeBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt, check_text_bytes
from tandem.workers.text.tokenizer import check_text_ids


def chat_prompt(services: TextServices, body: ChatBody | TokenizeBody, ignored: IgnoredFields) -> Prompt:
    """Renders and tokenizes a conversation. Notes fields that the template has no use for."""
    if services.chat_template is None:
        raise invalid("messages", "This model has no chat template; serve it with --chat-template.")
    assert body.messages is not None
    check_conversation(body, services.settings, services.chat_template, ignored)
    tools = template_tools(body.tools)
    beside = _json_bytes(tools) + _json_bytes(body.chat_template_kwargs)
    check_text_bytes(services, sum(map(message_bytes, body.messages)) + beside, "messages")
    continues = bool(body.continue_final_message)
    text = services.chat_template.render(
        [template_message(message, i) for i, message in enumerate(body.messages)],
        tools=tools,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=template_variables(body, services.chat_template),
    )
    truncates = isinstance(body, ChatBody) and body.truncate_prompt_tokens is not None
    if isinstance(body, ChatBody) and not truncates:
        services.tokenizer.check_bytes(text, services.max_model_len, "messages")
    token_ids = services.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    if isinstance(body, ChatBody):
        check_text_ids(services.tokenizer, token_ids, services.vocab_size, "messages")
    return Prompt(token_ids, text)


def message_bytes(message: Message) -> int:
    """Bytes of a message's text, of its thinking and of its tool calls."""
    content = message.content
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    texts += [call.function.arguments for call in message.tool_calls or ()]
    texts += [text for text in (message.reasoning, message.reasoning_content) if text is not None]
    return sum(len(text.encode()) for text in texts)


def message_text(message: Message) -> str:
    """A message's content as one text."""
    content = message.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def template_message(message: Message, at: int) -> dict[str, Any]:
    """A message as templates expect it: text content, call arguments as objects, thinking under both of its names."""
    content = message.content
    if content is None and message.role != "assistant":
        raise invalid(f"messages[{at}].content", f"A message of role {message.role} must have content.")
    result: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, at, j)},
            }
            for j, call in enumerate(message.tool_calls)
        ]
    return result


def _arguments(text: str, at: int, call: int) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        name = f"messages[{at}].tool_calls[{call}].function.arguments"
        raise invalid(name, f"{name} must be JSON, not {printable(text)}.") from None


def _json_bytes(value: Sequence[Any] | Mapping[str, Any] | None) -> int:
    return len(msgspec.json.encode(value)) if value else 0
