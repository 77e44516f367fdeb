"""Pieces of grammars in llguidance's Lark: marks, schemas, rules of calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_schemas import asserting

SpecialTokens = Mapping[str, int]
"""The tokenizer's special tokens, text to id: only with these are marks single tokens that no text can spell."""

NO_TOKENS: SpecialTokens = {}

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def quoted(text: str) -> str:
    """Returns a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def mark(text: str, special_tokens: SpecialTokens) -> str:
    """Returns a mark: a special token where the tokenizer has it as one, else its text."""
    return f"<[{special_tokens[text]}]>" if text in special_tokens else quoted(text)


def json_value(schema: Any) -> str:
    """Returns an inline schema; its texts are spaced as json.dumps() does, as models are trained to write."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    return "%json " + json.dumps({**asserting(schema), "x-guidance": _WRITTEN}, ensure_ascii=False)


def arguments(tool: Tool) -> str:
    """Returns the inline schema of a call's arguments, which are an object."""
    return json_value(arguments_schema(tool))


def arguments_schema(tool: Tool) -> dict[str, Any]:
    return {**asserting(tool.parameters), "type": "object"}


def named_json(tool: Tool, *, key: str = "arguments", before: str = "", after: str = "") -> str:
    """Returns Lark text of a call as an object with its name and, under `key`, its arguments. before, after: texts
    around the object."""
    head = before + '{"name": ' + quoted(tool.name) + f', "{key}": '
    return f"{quoted(head)} {arguments(tool)} {quoted('}' + after)}"


def calls(
    tools: Sequence[Tool],
    call: Callable[[Tool], str],
    *,
    parallel: bool,
    before: str = "",
    between: str = "",
    after: str = "",
) -> str:
    """Returns a grammar of one call, or of several if `parallel`. call: Lark text of a call of one tool; before,
    between, after: Lark text around the calls."""
    assert tools, "no tool, no call"
    several = f"call ({between} call)*" if parallel else "call"
    rules = [f"start: {before} {several} {after}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    return "\n".join([*rules, *(f"call_{i}: {call(tool)}" for i, tool in enumerate(tools))]) + "\n"
