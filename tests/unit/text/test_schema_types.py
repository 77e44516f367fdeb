"""Types of schemas that clients send: plain ones, ones that refer to themselves, and what is no schema at all."""

from typing import Any

import pytest

from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.schema_types import plain_text, types_of

TREE = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10 + [{"type": "null"}]}}}
LOOP = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10}}}


@pytest.mark.parametrize(
    ("schema", "root", "types"),
    [
        ({"type": ["string", "null"]}, {}, {"string", "null"}),
        ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, {}, {"integer", "string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, {}, None),
        ({"$ref": "#/$defs/a"}, TREE, {"null"}),
        ({"$ref": "#/$defs/a"}, LOOP, None),
        ({"$ref": "#/$defs/b"}, LOOP, None),
        (True, {}, None),
    ],
)
def test_types_that_are_plain_to_see(schema: Any, root: dict[str, Any], types: set[str] | None) -> None:
    assert types_of(schema, root) == types


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"type": [{}]},
        {"type": None},
        {"enum": 5},
        {"anyOf": 5},
        {"$ref": 5},
        {"type": "string", "enum": 5},
    ],
)
def test_what_is_no_schema_is_read_as_any(schema: dict[str, Any]) -> None:
    """A model may call a tool whose schema nobody has compiled."""
    assert not plain_text(schema)
    parser = TOOL_FORMATS["qwen3_coder"].parser([Tool("f", "", {"properties": {"x": schema}})])
    events = parser.push("<tool_call><function=f><parameter=x>1</parameter></function></tool_call>")
    assert "".join(getattr(event, "text", "") for event in [*events, *parser.finish()]) in ('{"x": 1}', '{"x": "1"}')
