"""Makes the prompt of a conversation: messages -> template -> token ids without special tokens. Work for the threads of
text_workers.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.conversation.chat_checks import check_conversation, template_variables
from tandem.cluster.gateway.schemas.chat_body import ChatBody, Message, TokenizeBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt, check_text_bytes
from tandem.workers.text.chat_messages import template_messages, template_tools
from tandem.workers.text.tokenizer import check_text_ids


def chat_prompt(services: TextServices, body: ChatBody | TokenizeBody, ignored: IgnoredFields) -> Prompt:
    """Renders and tokenizes a conversation. Notes fields that the template has no use for."""
    if services.chat_template is None:
        raise invalid("messages", "This model has no chat template; serve it with --chat-template.")
    assert body.messages is not None
    check_conversation(body, services.settings, services.chat_template, ignored)
    tools = template_tools([msgspec.to_builtins(tool) for tool in body.tools or ()])
    beside = _json_bytes(tools) + _json_bytes(body.chat_template_kwargs) + _json_bytes(body.documents)
    check_text_bytes(services, sum(map(message_bytes, body.messages)) + beside, "messages")
    continues = bool(body.continue_final_message)
    text = services.chat_template.render(
        template_messages([msgspec.to_builtins(message) for message in body.messages]),
        tools=tools,
        documents=body.documents,
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
    texts += [_text(call.function.arguments) for call in message.tool_calls or ()]
    texts += [text for text in (message.reasoning, message.reasoning_content) if text is not None]
    return sum(len(text.encode()) for text in texts)


def _text(arguments: str | Mapping[str, Any] | None) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()


def _json_bytes(value: Sequence[Any] | Mapping[str, Any] | None) -> int:
    return len(msgspec.json.encode(value)) if value else 0
