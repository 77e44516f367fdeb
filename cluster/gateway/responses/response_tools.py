"""Tools of the Responses API. A custom tool, which takes free text, is a function with one argument to the model; what
the model writes for that argument is the text.

Tools that OpenAI's service runs itself are not run here, and groups of functions are not read. Those that clients send
with every request are left out and named as ignored, as in vLLM; others, and the choice of one, are refused by name.
"""

import json
import re
from typing import Any, Literal, NamedTuple

import msgspec

from tandem.cluster.gateway.conversation.parser_wraps import INPUT
from tandem.cluster.gateway.responses.response_items import check_kind
from tandem.cluster.gateway.schemas.ignored_fields import Ignorables, IgnoredFields, ignorable
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.sampling_ranges import StructuredOutputsParams
from tandem.workers.text.grammars import GrammarError, checked_grammar

HINTS: Ignorables = {
    "tools[]": ignorable("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "output_schema")
}
SENT_ALWAYS = re.compile(r"(web_search|web_search_preview|image_generation|namespace)(_[0-9]{4}(_[0-9]{2}){2})?")
"""Kinds of tools that agents send unasked: of OpenAI's service, each also with a date behind its name, and groups of
functions, whose calls would name their group."""
_BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
LONGEST_BEGIN = 256
"""Characters within which the argument begins; else the arguments have another form."""
_HEX = "[0-9a-fA-F]"
_PAIRED = rf"u[dD][89abAB]{_HEX}{{2}}(?:\\u{_HEX}{{4}}|(?=[^\\]|\\[^u]))"
_WHOLE = re.compile(rf'(?:[^"\\]+|\\(?:[^u]|u(?![dD][89abAB]){_HEX}{{4}}|{_PAIRED}))*')
"""The part of a JSON string that can be read while it goes on: whole escapes, both halves of a surrogate pair."""


class ResponseTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="function"):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of a custom tool's text. syntax, definition: of a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class TextTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="custom"):
    """A tool that takes free text."""

    name: str
    description: str | None = None
    format: InputFormat | None = None


AnyTool = ResponseTool | TextTool


class FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="function"):
    """The function that the model must call."""

    name: str


class CustomChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="custom"):
    """The custom tool that the model must call."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """The tools that the model may call, or must call one of."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


Choice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools


class HeldText(NamedTuple):
    """The text of a custom tool that must be called. place: of its format, in the body."""

    name: str
    definition: str
    place: str


def take_hosted(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Leaves out tools that are not run here but always sent. RequestRefused for others, and for the choice of one."""
    choice, tools = fields.get("tool_choice"), fields.get("tools")
    if isinstance(choice, dict):
        check_kind(choice, ("function", "custom", "allowed_tools"), "tool_choice")
    if not isinstance(tools, list):
        return
    kept: list[Any] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and (hosted := SENT_ALWAYS.fullmatch(kind)) is not None:
            ignored.leave_out(i, kind, hosted[1])
            continue
        if isinstance(tool, dict):
            check_kind(tool, ("function", "custom"), f"tools[{len(kept)}]")
        kept.append(tool)
    fields["tools"] = kept
    ignored.take_from(fields, HINTS)


def chat_tools(tools: list[AnyTool] | None, choice: Choice | None, ignored: IgnoredFields) -> dict[int, dict[str, Any]]:
    """The tools that `choice` allows as chat completions have them, by their numbers. RequestRefused for one that is
    not there."""
    tools, names = tools or [], {tool.name for tool in tools or ()}
    if isinstance(choice, AllowedTools):
        for i, one in enumerate(choice.tools):
            if one.name not in names:
                raise invalid(f"tool_choice.tools[{i}].name", f"No tool of this request has the name {one.name}.")
        names = {one.name for one in choice.tools}
    forced = _forced(tools, choice)
    return {i: _chat_tool(tool, f"tools[{i}]", ignored, forced) for i, tool in enumerate(tools) if tool.name in names}


def held_text(tools: list[AnyTool] | None, choice: Choice | None) -> HeldText | None:
    """The text of the one tool that must be called, where its grammar is Lark's. That speaks of raw text, not of text
    inside JSON, so the model writes nothing but the text, and no call around it."""
    if len(forced := _forced(tools or [], choice)) == 1:
        for i, tool in enumerate(tools or ()):
            if tool.name in forced and isinstance(tool, TextTool) and (form := tool.format) and form.syntax == "lark":
                return HeldText(tool.name, form.definition or "", f"tools[{i}].format")
    return None


def _forced(tools: list[AnyTool], choice: Choice | None) -> frozenset[str]:
    """The names of the tools of which one must be called."""
    if isinstance(choice, AllowedTools):
        return frozenset(one.name for one in choice.tools if choice.mode == "required")
    if isinstance(choice, FunctionChoice | CustomChoice):
        return frozenset([choice.name])
    return frozenset(tool.name for tool in tools if choice == "required")


def chat_choice(choice: Choice | None) -> Any:
    """The choice as chat completions have it."""
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedTools):
        return choice.mode if choice.tools else "none"
    return {"type": "function", "function": {"name": choice.name}}


def custom_names(tools: list[AnyTool] | None) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.name for tool in tools or () if isinstance(tool, TextTool))


def call_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool, for its text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _chat_tool(tool: AnyTool, place: str, ignored: IgnoredFields, forced: frozenset[str]) -> dict[str, Any]:
    if isinstance(tool, ResponseTool):
        function = msgspec.to_builtins(tool)
        return {"type": function.pop("type"), "function": function}
    text: dict[str, Any] = {"type": "string"}
    shown, form = [tool.description] if tool.description else [], tool.format
    if form is not None and form.type == "grammar":
        _check_grammar(form, f"{place}.format", ignored, forced if tool.name in forced else frozenset())
        shown.append(f"The {INPUT} follows this grammar ({form.syntax}):\n{form.definition}")
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function = {"name": tool.name, "description": "\n\n".join(shown), "parameters": parameters}
    return {"type": "function", "function": function}


def _check_grammar(form: InputFormat, place: str, ignored: IgnoredFields, forced: frozenset[str]) -> None:
    """Notes a grammar that the model only sees. RequestRefused for one that a forced call cannot be held to. forced:
    the tools of which one must be called, if this is one."""
    for name in ("syntax", "definition"):
        if getattr(form, name) is None:
            raise invalid(f"{place}.{name}", f"The field {place}.{name} is required with type grammar.")
    if not forced:
        ignored.note(place, f"{place}: a call that is not forced is not held to a grammar.")
    elif form.syntax == "lark" and len(forced) > 1:
        text = 'the syntax "lark" holds a call only where one tool is forced: name it in tool_choice.'
        raise unsupported(place, f"{place}: {text}")
    elif form.syntax == "regex":
        try:
            checked_grammar(StructuredOutputsParams(regex=form.definition))
        except GrammarError as error:
            where = f"{place}.definition"
            raise RequestRefused(f"{where}: {error}", code="invalid_grammar", param=where) from None


class InputReader:
    """The text of a custom tool's call, out of the JSON that the model writes as the function's arguments."""

    def __init__(self) -> None:
        self._held = ""
        self._is_over = False
        self._has_begun = False
        self._other: list[str] = []

    def push(self, text: str) -> str:
        """More of the arguments; returns more of the text."""
        if self._is_over:
            return ""
        if self._other:
            self._other.append(text)
            return ""
        self._held += text
        if not self._has_begun:
            if (begin := _BEGIN.match(self._held)) is None:
                if len(self._held) > LONGEST_BEGIN:
                    self._other, self._held = [self._held], ""
                return ""
            self._has_begun, self._held = True, self._held[begin.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None, "it matches nothing too"
        self._held = self._held[whole.end() :]
        self._is_over = self._held.startswith('"')
        return _unescaped(whole[0])

    def finish(self) -> str:
        """The rest of the text: all arguments where they have another form than asked for."""
        rest, self._held = "".join([*self._other, self._held]), ""
        return "" if self._has_begun else rest


def input_of(arguments: str) -> str:
    """The text of a custom tool's call, of all its arguments."""
    reader = InputReader()
    return reader.push(arguments) + reader.finish()


def _unescaped(piece: str) -> str:
    """The text of a piece of a JSON string; halves of surrogate pairs become U+FFFD."""
    try:
        text: str = json.loads(f'"{piece}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return piece
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
