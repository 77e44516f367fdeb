"""The one reading of messages: what a chat template is shown of a conversation, for the service, batch files and LLM.

Messages come in OpenAI's form, as mappings. Templates are shown text content, call arguments as objects and thinking
under both of its names; the role `developer` is the template's matter (chat_template.py). Fields of a message beside
OpenAI's, which only an LLM is given, stay as they are: a template may read them. RequestRefused names the field at
fault.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.workers.messages.errors import RequestRefused

READ = ("role", "content", "reasoning", "reasoning_content", "tool_calls")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns all messages of a conversation as templates expect them."""
    return [template_message(message, at) for at, message in enumerate(messages)]


def template_message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Returns a message as templates expect it. at: its number in the conversation, for refusals."""
    role = message.get("role")
    if not isinstance(role, str):
        raise _refused(f"messages[{at}].role", f"messages[{at}].role must be a text such as user, not {role!r:.80}.")
    shown: dict[str, Any] = {"role": role, "content": _content(message, role, at)}
    shown |= {name: value for name, value in message.items() if name not in READ and value is not None}
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        shown["reasoning"] = shown["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _refused(f"messages[{at}].tool_calls", f"messages[{at}].tool_calls must be a list of calls.")
        shown["tool_calls"] = [_call(call, f"messages[{at}].tool_calls[{j}]") for j, call in enumerate(calls)]
    return shown


def message_text(content: Any) -> str:
    """Returns a message's content, a text or parts of it in OpenAI's form, as one text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools in OpenAI's form as templates expect them: `strict` is no matter of the model, and each has
    parameters. Tools in another form, which only an LLM is given, stay as they are."""
    return [_tool(tool) for tool in tools]


def _content(message: Mapping[str, Any], role: str, at: int) -> str:
    content, name = message.get("content"), f"messages[{at}].content"
    if content is None and role not in ("assistant", "tool"):
        raise _refused(name, f"A message of role {role} must have content.")
    if not isinstance(content, str | None):
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise _refused(name, f"{name} must be a text or a list of parts, not {content!r:.80}.")
        for i, part in enumerate(content):
            _check_part(part, f"{name}[{i}]")
    return message_text(content)


def _check_part(part: Any, name: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        text = f'Content of type {json.dumps(kind)} is not supported, only "text" is.'
        raise RequestRefused(text, code="unsupported_parameter", param=name)
    if not isinstance(part.get("text"), str):
        raise _refused(f"{name}.text", f"{name}.text must be a text, not {part.get('text')!r:.80}.")


def _call(call: Any, name: str) -> dict[str, Any]:
    """Returns a call of a function with its arguments as an object; OpenAI has them as JSON text. No arguments, however
    they are written, are an empty object: templates look for names in it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refused(f"{name}.function", f"{name}.function must name a function.")
    shown = {"name": function["name"], "arguments": _arguments(function.get("arguments"), f"{name}.function.arguments")}
    own_id = {"id": call["id"]} if call.get("id") is not None else {}
    return {**own_id, "type": "function", "function": shown}


def _arguments(given: Any, name: str) -> Any:
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        found = json.loads(given) if given and not given.isspace() else None
    except (ValueError, RecursionError):
        shown = json.dumps(given[:64] + ("..." if len(given) > 64 else ""))
        raise _refused(name, f"{name} must be JSON, not {shown}.") from None
    return {} if found in (None, "", []) else found


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = function.get("parameters")
    shown = {name: function[name] for name in ("name", "description") if function.get(name) is not None}
    shown["parameters"] = NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": shown}


def _refused(param: str, message: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_value", param=param)
