"""Translates a body of Anthropic's API to the chat body that says the same, which read_chat() checks."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.cluster.gateway.anthropic.messages_body import (
    CountTokensBody,
    CustomTool,
    InputMessage,
    MessagesBody,
    MessagesToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tandem.cluster.gateway.conversation.chat_checks import SWITCH
from tandem.cluster.gateway.conversation.field_names import FieldNames
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.text.chat_template import ChatTemplate

FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking.display",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id",
}
"""The body's names of chat fields whose names differ."""
PARTS = ((".function.parameters", ".input_schema"), (".function", ""), (".json_schema", ""))
FAILED = "Error: "
"""Stands before the result of a tool that has failed; chat messages have no field for it."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensBody, text: TextServices, ignored: IgnoredFields) -> tuple[ChatBody, FieldNames]:
    """The chat body, and the client's names of its fields. RequestRefused naming the client's field at fault."""
    _check_results(body.messages)
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system)})
        places.append("system")
    for i, message in enumerate(body.messages):
        made = _turns(message, f"messages[{i}]")
        messages += made
        places += [f"messages[{i}]"] * len(made)
    names = FieldNames(FIELDS, "messages", "max_tokens", places, PARTS)
    if (effort := _idle_effort(body)) is not None:
        ignored.note(effort, is_usual=True)
    fields = {"messages": messages, "model": body.model, **_settings(body, text.chat_template)}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": body.metadata.user_id if body.metadata is not None else None,
            "stream": body.stream,
            "stream_options": {"include_usage": True} if body.stream else None,
        }
    with names.in_refusals():
        given = {name: value for name, value in fields.items() if value is not None}
        return read_chat(given, text.settings, ignored.named(names.of)), names


def _settings(body: CountTokensBody, template: ChatTemplate | None) -> dict[str, Any]:
    """Returns what may change the prompt: tools and thinking; and the form of the answer."""
    choice, thinking, output = body.tool_choice, body.thinking, body.output_config
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if choice is not None:
        fields["tool_choice"] = _choice(choice)
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if thinking is not None and thinking.type == "enabled":
        fields["thinking_token_budget"] = thinking.budget_tokens
        if template is not None and any(map(template.takes, ("reasoning_effort", SWITCH))):
            fields["reasoning_effort"] = "medium"
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    if output is not None:
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"name": "answer", "schema": output.format.schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if thinking is not None and thinking.type == "disabled":
        fields["reasoning_effort"] = "none"  # whatever output_config.effort says of the rest of an answer
    return fields


def _idle_effort(body: CountTokensBody) -> str | None:
    """Returns the place of an effort that has nothing to act on, since thinking is disabled."""
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    return "output_config.effort" if is_off and body.output_config is not None and body.output_config.effort else None


def _check_results(messages: Sequence[InputMessage]) -> None:
    """RequestRefused when the turn behind a call has no result of it. Messages of one role in a row are one turn; the
    last turn may be one that calls."""
    waiting: dict[str, str] = {}
    answers = False
    for i, message in enumerate(messages):
        if message.role == "assistant" and answers:
            _check_none_waits(waiting)
            waiting, answers = {}, False
        answers |= message.role == "user"
        for j, block in enumerate(message.content if not isinstance(message.content, str) else ()):
            if isinstance(block, ToolUseBlock):
                waiting[block.id] = f"messages[{i}].content[{j}]"
            elif isinstance(block, ToolResultBlock):
                waiting.pop(block.tool_use_id, None)
    if answers:
        _check_none_waits(waiting)


def _check_none_waits(waiting: Mapping[str, str]) -> None:
    for call, place in waiting.items():
        raise invalid(place, f"{place}: the tool_use block {printable(call)} has no tool_result in the next message.")


def _turns(message: InputMessage, place: str) -> list[dict[str, Any]]:
    """A message as chat messages: of a user's, results of tools are messages of their own, before its text."""
    content = message.content
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    if message.role == "assistant":
        return [_assistant(content, place)]
    results: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for j, block in enumerate(content):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            results.append(_result(block))
        else:
            raise invalid(f"{place}.content[{j}]", f"A message of role {message.role} cannot have such a block.")
    if texts or not results:
        results.append({"role": message.role, "content": _text(texts)})
    return results


def _assistant(content: Sequence[Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block for block in content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    calls = [block for block in content if isinstance(block, ToolUseBlock)]
    if len(texts) + len(thoughts) + len(calls) < len(content):
        raise invalid(f"{place}.content", "A message of role assistant cannot have a block of type tool_result.")
    if any(block.text for block in texts) or not calls:
        message["content"] = _text(texts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": FAILED + text if block.is_error else text}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content if block.text)


def _tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]
