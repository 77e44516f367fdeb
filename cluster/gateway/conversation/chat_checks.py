"""Checks of tools, messages and template arguments of a conversation together, and their form for a chat template.
Their types are checked before (schemas/)."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.chat_body import ChatBody, Message, TokenizeBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.schemas.tool_fields import FunctionTool
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.output.formats import Tool

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
NO_ARGUMENTS: Mapping[str, Any] = {**NO_PARAMETERS, "additionalProperties": False}
SWITCH = "enable_thinking"
"""The name of the switch for thinking in templates that have no levels."""


THINKING_SWITCHES = frozenset({SWITCH, "thinking", "thinking_mode", "reasoning_effort", "thinking_budget"})
"""Variables of templates that think. A template without them has nothing to switch."""


def check_conversation(
    body: ChatBody | TokenizeBody, settings: GatewaySettings, template: ChatTemplate, ignored: IgnoredFields
) -> None:
    """Notes what this template has no place for and what switches nothing in it. RequestRefused naming the field at
    fault."""
    _check_tools(body.tools or (), settings)
    _check_messages(body.messages or ())
    given = body.chat_template_kwargs or {}
    if len(msgspec.json.encode(given)) > settings.max_template_kwargs_bytes:
        limit = settings.max_template_kwargs_bytes
        raise invalid("chat_template_kwargs", f"chat_template_kwargs takes more than the limit of {limit} bytes.")
    for name in given:
        if not template.takes(name):
            param = f"chat_template_kwargs.{name}"
            text = f"The chat template of this model has no variable {printable(name)} that a request may set."
            if name not in THINKING_SWITCHES:
                raise unsupported(param, text)
            ignored.note(param, text)
    effort = body.reasoning_effort
    if effort not in (None, "none") and not (template.takes("reasoning_effort") or template.takes(SWITCH)):
        ignored.note(
            "reasoning_effort",
            f'reasoning_effort: the chat template of this model knows none, so it may only be "none", not "{effort}".',
        )
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    if body.tools and choice in (None, "auto") and not shows_tools(template):
        ignored.note("tools", "The chat template of this model shows no tools to it; tool_choice may be none.")


def shows_tools(template: ChatTemplate | None) -> bool:
    """True if the model sees the tools of a request; without a template nothing is known."""
    return template is None or "tools" in template.for_tools.variables


def template_variables(body: ChatBody | TokenizeBody, template: ChatTemplate) -> dict[str, Any]:
    """The variables of the template that the body sets. A template with a switch in place of levels of effort thinks at
    all but "none"."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if template.takes("reasoning_effort"):
        variables.setdefault("reasoning_effort", effort)
    elif template.takes(SWITCH):
        variables.setdefault(SWITCH, effort != "none")
    return variables


def template_tools(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]]:
    """Tools as templates expect them. `strict` is no matter of the model."""
    shown = []
    for tool in tools or ():
        function = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        shown.append({"type": "function", "function": {**function, "parameters": _parameters(tool)}})
    return shown


def known_tools(tools: Sequence[FunctionTool] | None) -> list[Tool]:
    """Tools as parsers and grammars take them."""
    functions = [one.function for one in tools or ()]
    return [
        Tool(one.name, one.description or "", NO_ARGUMENTS if one.parameters is None else one.parameters)
        for one in functions
    ]


def _parameters(tool: FunctionTool) -> Mapping[str, Any]:
    return NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _check_tools(tools: Sequence[FunctionTool], settings: GatewaySettings) -> None:
    """Names are distinct, and parameters are a JSON schema of an object, as far as its outermost keys say."""
    if len(tools) > settings.max_tools:
        raise invalid("tools", f"tools: {len(tools)} exceeds the limit of {settings.max_tools}.")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where, name = f"tools[{i}].function", tool.function.name
        if name in names:
            raise invalid(f"{where}.name", f"Two tools have the name {name}.")
        names.add(name)
        schema = _parameters(tool)
        if schema.get("type", "object") != "object":
            raise invalid(f"{where}.parameters", f'The parameters of {name} must be a JSON schema of type "object".')
        if not isinstance(schema.get("properties", {}), dict):
            raise invalid(f"{where}.parameters.properties", f"The properties of {name} must be an object.")
        required = schema.get("required", [])
        if not (isinstance(required, list) and all(isinstance(one, str) for one in required)):
            raise invalid(f"{where}.parameters.required", f"What {name} requires must be a list of names.")


def _check_messages(messages: Sequence[Message]) -> None:
    """Only assistants call tools and think, and the answer of a tool belongs to an earlier call, if there is one."""
    calls: set[str] = set()
    for i, message in enumerate(messages):
        if message.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(message, name):
                    raise invalid(f"messages[{i}].{name}", f"A message of role {message.role} cannot have {name}.")
        elif None not in (thought := {message.reasoning, message.reasoning_content}) and len(thought) > 1:
            raise invalid(f"messages[{i}].reasoning", "reasoning and reasoning_content are one; they differ.")
        calls.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and calls and message.tool_call_id is not None and message.tool_call_id not in calls:
            raise invalid(f"messages[{i}].tool_call_id", f"No earlier message calls {printable(message.tool_call_id)}.")
