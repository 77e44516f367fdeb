"""What of a JSON schema asserts nothing is accepted, what asserts is enforced or refused by name and place."""

import json
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Network, IPv6Interface
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import UUID4, BaseModel, Field, Json, SecretStr, TypeAdapter

from tandem.workers.messages.sampling_ranges import StructuredOutputsParams
from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.grammars import GrammarError, checked_grammar, json_schema, schema_fault
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_schemas import asserting

TOKENIZER = LLTokenizer("byte")


def allows(schema: Any, value: Any) -> bool:
    """Compiles a schema and reads one value as text."""
    matcher = LLMatcher(TOKENIZER, checked_grammar(StructuredOutputsParams(json=schema)), log_level=0)
    text = json.dumps(value).encode()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    home: Path


PET = {"kind": "dog", "home": "/kennel"}
BY_PYDANTIC: list[tuple[Any, Any, Any]] = [
    (Path, "/tmp/a", 1),
    (SecretStr, "s", 1),
    (bytes, "raw", 1),
    (Json[list[int]], "[1]", 1),
    (IPv4Network, "10.0.0.0/8", 1),
    (IPv6Interface, "::1/64", 1),
    (IPv4Address, "10.0.0.1", "10.0.0"),
    (datetime, "2026-11-27T10:00:00Z", "today"),
    (date, "2026-11-27", "2026-13-27"),
    (time, "10:00:00Z", "10"),
    (timedelta, "P1D", "1 day"),
    (Decimal, "1.5", None),
    (uuid.UUID, "12345678-1234-1234-1234-123456789abc", "1234"),
    (UUID4, "12345678-1234-4234-8234-123456789abc", 4),
    (int | None, None, "1"),
    (Literal["a", 1], 1, 2),
    (Annotated[Cat | Dog, Field(discriminator="kind")], PET, {"kind": "cow"}),
    (dict[str, Path], {"a": "b"}, {"a": 1}),
    (Annotated[str, Field(deprecated=True, examples=["x"], json_schema_extra={"x-order": 1})], "y", 1),
]


@pytest.mark.filterwarnings("ignore:The 'deprecated' attribute")
@pytest.mark.parametrize(("kind", "value", "other"), BY_PYDANTIC)
def test_schemas_that_pydantic_writes(kind: Any, value: Any, other: Any) -> None:
    schema = TypeAdapter(kind).json_schema()
    assert allows(schema, value) and not allows(schema, other)


ACCEPTED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"type": "integer", "format": "int32"}, 1, 1.5),
    ({"type": "integer", "format": "int64", "example": 5}, 1, "1"),
    ({"type": "string", "format": "byte"}, "aGk=", 1),
    ({"type": "number", "format": "float"}, 1.5, "1.5"),
    ({"type": "string", "format": "any name"}, "x", 1),
    ({"properties": {"format": {"type": "string"}}, "type": "object"}, {"format": "path"}, {"format": 1}),
    ({"enum": [{"format": "path"}]}, {"format": "path"}, {}),
    ({"type": "array", "uniqueItems": False}, [1, 1], 1),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [1], [1, 2]),
    ({"type": "array", "contains": True}, [1], []),
    ({"type": "array", "contains": {}, "minContains": 0, "maxContains": 1}, [], [1, 2]),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 0}, [1], 1),
    ({"type": "string", "minLength": 0, "title": "t", "$comment": "c"}, "", 1),
    ({"type": "object", "required": [], "propertyNames": {"type": "string"}}, {}, 1),
    ({"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}}, {"a": 1}, 1),
    ({"type": "object", "unevaluatedProperties": True, "xml": {}, "externalDocs": {}}, {"a": 1}, 1),
    ({"type": "integer", "not": False, "if": {"title": "x"}, "then": True}, 1, "1"),
    ({"type": "string", "nullable": True}, None, 1),
    ({"type": "string", "nullable": False}, "a", None),
    ({"type": "string", "enum": ["a"], "nullable": True}, "a", None),
    ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "string", "format": "x"}}}, None, 1),
    ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "string", "format": "x"}}}}, "y", 1),
]


@pytest.mark.parametrize(("schema", "value", "other"), ACCEPTED)
def test_what_asserts_nothing_is_accepted(schema: dict[str, Any], value: Any, other: Any) -> None:
    assert allows(schema, value) and not allows(schema, other)


REFUSED = [
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"properties": {"a": {"items": {"not": {"const": 1}}}}}, 'at properties.a.items: Unimplemented keys: ["not"]'),
    ({"anyOf": [{"type": "null"}, {"contains": {"type": "string"}}]}, 'at anyOf.1: Unimplemented keys: ["contains"]'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"format": 5}}}}, "at $defs.a.items: Expected string for 'format'"),
    ({"properties": {"a": {"if": {"const": 1}, "then": {"const": 2}}}}, "at properties.a: Unimplemented keys: "),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_is_not_enforced_is_refused_by_name_and_place(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError) as refusal:
        checked_grammar(StructuredOutputsParams(json=schema))
    assert str(refusal.value).startswith(reason) and "|" not in str(refusal.value)
    assert refusal.value.field == "json"


ANYTHING = [
    *(None, True, 0, 1, "", "ab", [], [1], [1, 1], [1, 2], ["x", "x"], [1, "x", 1], [[]]),
    *({}, {"a": 1}, {"a": "s"}, {"b": 1}, {"a": 1, "b": 2}),
]
COMBINED: list[tuple[str, bool]] = [
    ('{"contains": true, "unevaluatedItems": false}', False),
    ('{"allOf": [{"contains": true}], "unevaluatedItems": false}', False),
    ('{"allOf": [{"unevaluatedItems": true}], "unevaluatedItems": false}', False),
    ('{"contains": {"type": "string"}, "minContains": 0, "unevaluatedItems": {"type": "integer"}}', False),
    ('{"if": {"properties": {"a": true}}, "then": true, "unevaluatedProperties": false}', False),
    ('{"contains": true, "unevaluatedItems": true}', True),
    ('{"contains": true, "maxItems": 1, "uniqueItems": true}', True),
    ('{"contains": true, "maxContains": 1, "uniqueItems": true}', True),
    ('{"contains": true, "minContains": 2, "maxItems": 1}', True),
    ('{"contains": true, "minContains": 0, "maxContains": 0}', True),
    ('{"contains": true, "minItems": 2}', True),
    ('{"minContains": 2, "maxContains": 0}', True),
    ('{"allOf": [{"contains": true}, {"maxItems": 1}]}', True),
    ('{"enum": [[], [1], "x"], "contains": true}', True),
    ('{"then": false, "else": false}', True),
    ('{"if": true, "then": true, "else": false}', False),
    ('{"propertyNames": {"type": "integer"}}', False),
    ('{"dependentSchemas": {"a": {"title": "x"}, "b": false}}', False),
    ('{"enum": [{"a": 1}, {}], "dependentRequired": {"a": ["b"]}}', False),
    ('{"enum": [[1, 1], [1]], "uniqueItems": true}', False),
    ('{"not": {"contains": true}}', False),
]


@pytest.mark.parametrize(("text", "is_enforced"), COMBINED)
def test_what_is_taken_out_changes_nothing_beside_other_keywords(text: str, is_enforced: bool) -> None:
    """Beside another keyword, one that asserts nothing alone may say which items that one is about."""
    schema = json.loads(text)
    if is_enforced:
        assert [allows(schema, value) for value in ANYTHING] == list(
            map(Draft202012Validator(schema).is_valid, ANYTHING)
        )
        return
    with pytest.raises(GrammarError, match="Unimplemented keys"):
        checked_grammar(StructuredOutputsParams(json=schema))


def test_references_into_alternatives_go_where_they_went_when_null_is_added() -> None:
    inner = {"type": "array", "items": {"$ref": "#/anyOf/0"}}
    schema = {"anyOf": [{"type": "integer"}, inner], "nullable": True}
    assert allows(schema, None) and allows(schema, [1]) and allows(schema, 1)
    assert not allows(schema, [None]) and not allows(schema, [[1]])


def test_faults_of_other_forms_show_no_grammar_either() -> None:
    structures = [
        {"begin": "<f>", "schema": {}, "end": ""},
        {"begin": "<f>", "schema": {"items": {"not": {}}}, "end": ""},
    ]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    with pytest.raises(GrammarError) as refusal:
        checked_grammar(StructuredOutputsParams(structural_tag=tag))
    assert str(refusal.value) == 'structures[1].schema: at items: Unimplemented keys: ["not"]'
    with pytest.raises(GrammarError, match="regex") as refusal:
        checked_grammar(StructuredOutputsParams(json={"title": "fine"}, whitespace_pattern="("))
    assert "title" not in str(refusal.value)
    with pytest.raises(GrammarError, match=r"^at 13\(\d+\): ") as refusal:
        checked_grammar(
            StructuredOutputsParams(grammar="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(12)))
        )
    assert "|" not in str(refusal.value)


def test_what_is_no_schema_is_left_as_it_is() -> None:
    for schema in (5, None, [], "x", True):
        assert asserting(schema) == schema
    odd = {"format": 5, "contains": 1, "minContains": "a", "dependencies": 5, "propertyNames": 5, "type": 5, "items": 5}
    assert asserting(odd) == odd
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested too deep"):
        json_schema(deep)


MCP = {
    "read_file": {"path": {"type": "string", "format": "path", "description": "Where."}},
    "fetch": {"url": {"type": "string", "format": "uri"}, "raw": {"type": "boolean", "default": False}},
    "query": {"since": {"type": "string", "format": "date-time", "nullable": True}, "tags": {"type": "array",
              "items": {"type": "string"}, "uniqueItems": False}, "limit": {"type": "integer", "format": "int32"}},
}  # fmt: skip
"""Arguments of tools as servers of MCP list them."""


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_tools_of_an_mcp_server_can_be_forced(name: str) -> None:
    tools = [
        Tool(one, "", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties,
                       "required": [next(iter(properties))], "additionalProperties": False, "x-origin": "mcp"})
        for one, properties in MCP.items()
    ]  # fmt: skip
    failed, messages = LLMatcher.validate_grammar_with_warnings(TOOL_FORMATS[name].grammar(tools, parallel=True))
    assert not failed, messages


def test_text_with_a_format_that_asserts_nothing_is_written_as_it_is() -> None:
    tool = Tool("f", "", {"properties": {"p": {"type": "string", "format": "path"}}, "required": ["p"]})
    parser = TOOL_FORMATS["qwen3_coder"].parser([tool])
    events = parser.push('<tool_call><function=f><parameter=p>"a"</parameter></function></tool_call>')
    assert "".join(getattr(one, "text", "") for one in events) == '{"p": "\\"a\\""}'
    assert schema_fault(tool.parameters) == ""
