"""From a checked body to prompt token ids that fit the model: work for the threads of text_workers.py.

Chat: messages -> template -> ids without special tokens. Completions: text with the tokenizer's own special tokens, or
the ids as given, inside the vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.openai.fields.chat_checks import check_conversation, template_tools, template_variables
from tandem.cluster.gateway.openai.schemas import ChatBody, CommonBody, CompletionBody, Message, TokenizeBody, invalid
from tandem.cluster.gateway.services import TextServices
from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused
from tandem.workers.text.tokenizer import check_text_ids, check_token_ids


class Prompt(NamedTuple):
    """One prompt, ready. `text` is what the client sent as text, None for ids."""

    token_ids: list[int]
    text: str | None


def chat_prompt(services: TextServices, body: ChatBody | TokenizeBody) -> Prompt:
    """Renders and tokenizes a conversation."""
    if services.chat_template is None:
        raise invalid("messages", "This model has no chat template; serve it with --chat-template.")
    assert body.messages is not None
    check_conversation(body, services.settings, services.chat_template)
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


def text_prompt(services: TextServices, body: TokenizeBody) -> Prompt:
    """Tokenizes what /tokenize was sent: a text or a conversation."""
    if body.messages is not None:
        return chat_prompt(services, body)
    text = body.prompt or ""
    check_text_bytes(services, len(text.encode()), "prompt")
    return Prompt(services.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False), text)


def completion_prompts(services: TextServices, body: CompletionBody) -> list[Prompt]:
    """Tokenizes every prompt of a completions body, in order."""
    return tokenized(
        services,
        prompt_items(body.prompt),
        "prompt",
        add_special_tokens=body.add_special_tokens is not False,
        truncates=body.truncate_prompt_tokens is not None,
    )


def tokenized(
    services: TextServices,
    items: Sequence[str | list[int]],
    param: str,
    *,
    add_special_tokens: bool,
    truncates: bool,
) -> list[Prompt]:
    """Tokenizes texts and checks token ids, in order. param: the field's name; truncates: too long a text is cut."""
    texts = [item for item in items if isinstance(item, str)]
    if not truncates:
        for text in texts:
            services.tokenizer.check_bytes(text, services.max_model_len, param)
    check_text_bytes(services, sum(len(text.encode()) for text in texts), param)
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            token_ids = services.tokenizer.encode(item, add_special_tokens=add_special_tokens)
            check_text_ids(services.tokenizer, token_ids, services.vocab_size, param)
            prompts.append(Prompt(token_ids, item))
        else:
            check_token_ids(item, services.vocab_size, param)
            prompts.append(Prompt(item, None))
    return prompts


def check_choices(services: TextServices, body: CompletionBody) -> None:
    """Refuses more prompts times choices than one request may have, before any is tokenized."""
    prompts = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    choices = prompts * (body.best_of or body.n or 1)
    if choices > services.settings.max_messages:
        limit = services.settings.max_messages
        raise invalid("n", f"Prompts times n are {choices} choices, above the limit of {limit}.")


def check_text_bytes(services: TextServices, size: int, param: str) -> None:
    """Refuses more text than one request may have tokenized, with 413."""
    limit = services.settings.text_budget(services.max_model_len)
    if size > limit:
        raise RequestRefused(
            f"The request has {size} bytes of text to tokenize, above the limit of {limit} (--max-text-bytes).",
            code="content_too_large", status=413, param=param,
        )  # fmt: skip


def check_token_count(services: TextServices, count: int, param: str) -> None:
    """Refuses more token ids than the text of one request may have, with 413."""
    limit = services.settings.text_budget(services.max_model_len) // 4
    if count > limit:
        raise RequestRefused(
            f"The request has {count} token ids, above the limit of {limit} (a quarter of --max-text-bytes).",
            code="content_too_large", status=413, param=param,
        )  # fmt: skip


def check_ids_fit(services: TextServices, body: CompletionBody, wanted: int, names: "Asked") -> None:
    """Refuses, as fit() does, token ids that do not fit. Those that are to be cut may be as many as text gives."""
    if isinstance(body.prompt, str):
        return
    prompts = [body.prompt] if isinstance(body.prompt[0], int) else body.prompt
    for count in (len(ids) for ids in prompts if isinstance(ids, list)):
        if body.truncate_prompt_tokens is not None:
            check_token_count(services, count, "prompt")
        elif count > services.max_model_len:
            fit(services, Prompt([0] * count, None), body, wanted, names)


def prompt_items(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """A prompt field as a list of texts or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class Asked(NamedTuple):
    """The names of the two fields that must fit the context together, in this body."""

    prompt: str
    max_tokens: str


def fit(
    services: TextServices, prompt: Prompt, body: CommonBody, wanted: int | None, names: Asked
) -> tuple[Prompt, int]:
    """The prompt, cut as asked, and its max_tokens: `wanted`, or all that fits, within generation_config.json's limits.

    ContextLengthExceeded when both do not fit; it names the prompt where that does not fit by itself.
    """
    limit = services.max_model_len
    needed = 1 if wanted is None else wanted
    keep = body.truncate_prompt_tokens
    if keep is not None:
        most = limit - needed if keep == -1 else keep
        if len(prompt.token_ids) > most > 0:
            prompt = prompt._replace(token_ids=prompt.token_ids[-most:])
    length = len(prompt.token_ids)
    if length == 0:
        raise invalid(names.prompt, "The prompt is empty: it must hold at least one token.")
    room = limit - length
    if room < needed:
        wish = f"{wanted} for the completion ({names.max_tokens})" if wanted is not None else "1 for the completion"
        beside = wanted if wanted is not None and wanted < limit else 1
        advice = f"or ask for at most {room} tokens" if room > 0 else f"to at most {limit - beside} tokens"
        raise ContextLengthExceeded(
            f"This model's context is {limit} tokens; the request needs {length} for the prompt and {wish}. "
            f"Shorten the prompt {advice}.",
            names.max_tokens if room > 0 else names.prompt,
        )
    return prompt, services.tokenizer.defaults.most_tokens(length, wanted, room)


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
