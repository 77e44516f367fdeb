"""Grammars of forced calls: random tools, random texts of their grammars, read by the same format's parser."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.events import CallArguments, CallBegin, OutputEvent
from tandem.workers.text.output.formats import SchemaNotExpressible, Tool
from tandem.workers.text.output.stepping import joined

MAX_EXAMPLES = 5
TOKENIZER = LLTokenizer("byte")
SPECIAL = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "granite": ["<|tool_call|>"],
    "openai": ["<|channel|>", "<|constrain|>", "<|message|>"],
    "hermes": ["<tool_call>", "</tool_call>"],
}
CLOSERS = b'"}])\n<>e'
CLOSING_TEXT = b"\n</parameter>\n"

names = st.sampled_from(["a", "b_1", "städte", "with-dash", "two words"])
leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "string", "description": "the city"},
            {"type": "string", "minLength": 1, "maxLength": 4},
            {"type": "string", "pattern": "^[a-f]{2}-\\d$"},
            {"enum": ["north", 'so"uth', "", " x ", "1"]},
            {"type": "string", "enum": ["5", "true", "{}"]},
            {"const": "only"},
            {"type": "integer", "minimum": -3, "maximum": 40},
            {"type": "number", "minimum": 0, "maximum": 2},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"], "maxLength": 3},
            {"type": ["string", "null"]},
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 10, "maximum": 99}]},
            {"$ref": "#/$defs/point"},
        ]
    )
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, inner),
        st.builds(
            lambda one: {
                "type": "object",
                "properties": {"x y": one},
                "required": ["x y"],
                "additionalProperties": False,
            },
            inner,
        ),
    ),
    max_leaves=3,
)
DEFINITIONS = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}}


@st.composite
def tools_of(draw: st.DrawFn) -> list[Tool]:
    tools = []
    for name in draw(st.lists(st.sampled_from(["get", "get_more", "a-b"]), min_size=1, max_size=2, unique=True)):
        properties = draw(st.dictionaries(names, schemas, max_size=3))
        required = [one for one in properties if draw(st.booleans())]
        schema = {"properties": properties, "required": required, "additionalProperties": False}
        tools.append(Tool(name, "", {"type": "object", **schema, "$defs": DEFINITIONS}))
    return tools


def sample(grammar: str, rng: random.Random, special: Sequence[str], budget: int) -> str:
    """Walks allowed tokens at random, and behind `budget` tokens those that close something, if there are."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    pieces: list[bytes] = []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        tokens = [rng.choice(allowed)]
        if len(pieces) > budget:
            closing = [i for i in CLOSERS if i in allowed]
            tokens = [TOKENIZER.eos_token] if TOKENIZER.eos_token in allowed else [rng.choice(closing or allowed)]
            if matcher.validate_tokens(list(CLOSING_TEXT)) == len(CLOSING_TEXT):
                tokens = list(CLOSING_TEXT)
        if tokens[0] == TOKENIZER.eos_token:
            break
        assert matcher.consume_tokens(tokens)
        pieces += [bytes([token]) if token < 256 else special[token - 256].encode() for token in tokens]
        assert len(pieces) < 4000, f"no end in {b''.join(pieces)!r}"
    return b"".join(pieces).decode()


def calls_of(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments), event
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return [(name, json.loads(text)) for name, text in calls]


def check(name: str, tools: Sequence[Tool], special: Mapping[str, int], seed: int, *, parallel: bool) -> str:
    one = TOOL_FORMATS[name]
    grammar = one.grammar(tools, parallel=parallel, special_tokens=special)
    failed, warnings = LLMatcher.validate_grammar_with_warnings(grammar, TOKENIZER)
    assert not failed and not warnings, warnings
    rng = random.Random(seed)
    text = sample(grammar, rng, list(special), rng.choice([40, 120, 300]))
    parser = one.parser(tools)
    cut = rng.choice([1, 3, 1000])
    events = [event for i in range(0, len(text), cut) for event in parser.push(text[i : i + cut])]
    events = joined([*events, *parser.finish()])
    calls = calls_of(events)
    if name not in ("pythonic", "qwen3_coder"):
        assert all(event.text in text for event in events if isinstance(event, CallArguments)), "it is as written"
    assert len(calls) == 1 or (parallel and calls), text
    parameters = {tool.name: tool.parameters for tool in tools}
    for called, arguments in calls:
        Draft202012Validator(parameters[called]).validate(arguments)
    return text


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(deadline=None, phases=[Phase.generate], max_examples=MAX_EXAMPLES, suppress_health_check=list(HealthCheck))
@given(tools=tools_of(), seed=st.integers(0, 2**32))
def test_texts_of_a_grammar_are_its_calls(
    name: str, specials: bool, parallel: bool, tools: list[Tool], seed: int
) -> None:
    special = {text: 256 + i for i, text in enumerate(SPECIAL.get(name, []))} if specials else {}
    check(name, tools, special, seed, parallel=parallel)


TEXTS = st.lists(
    st.sampled_from(
        [
            *("\n", "\n\n", " ", "a", "é", '"', "'", "{", "}", "[1]", "5", "null", "<", "</", "\\", "\t"),
            *(
                "</function>",
                "</tool_call>",
                "<tool_call>",
                "<function=f>",
                "\n</function>\n</tool_call>",
                "<parameter",
            ),
            *("\n<tool_call>\n<function=get>\n", "</parameter", "parameter=x>"),
        ]
    ),
    max_size=6,
).map("".join)
WRITTEN = TEXTS.filter(lambda text: "<parameter=" not in text)
"""Texts that may be written as they are: none has the begin of a parameter."""
ANY = TEXTS | st.sampled_from([0, -7, 0.5, 1e30, True, None, [], {}, [["</parameter>"]], {"<parameter=a>": "\n"}, "1"])
VALUES: list[tuple[dict[str, Any], st.SearchStrategy[Any], bool]] = [
    ({"type": "string"}, WRITTEN, True),
    ({"type": ["string"], "description": "x"}, WRITTEN, True),
    ({"type": "string", "format": "path"}, WRITTEN, True),
    ({"enum": ["", "\n", "a\n</function>\n</tool_call>", "5"]}, st.sampled_from(["", "\n", "5"]), True),
    ({"type": "string", "minLength": 1, "maxLength": 200}, WRITTEN.map("x".__add__), True),
    ({"type": "string", "minLength": 1}, WRITTEN.map("x".__add__), True),
    ({"type": "string", "pattern": "^x"}, TEXTS.map("x".__add__), False),
    ({"$ref": "#/$defs/text"}, TEXTS | st.just("a</parameter>b"), False),
    ({"type": ["string", "null"]}, WRITTEN.filter(lambda text: text.strip() != "null") | st.none(), True),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, TEXTS | st.sampled_from(["7", 7]), False),
    ({"enum": [1, "1", None, "null", [1]]}, st.sampled_from([1, "1", None, "null", [1]]), False),
    ({"type": "array", "items": {"type": "string"}}, st.lists(TEXTS | st.just("</parameter>"), max_size=3), False),
    ({"type": "object"}, st.dictionaries(TEXTS, ANY, max_size=3), False),
    ({"type": "number"}, st.sampled_from([0, -1, 1.5, 1e-7, 123456789012345678901234567890]), False),
    ({}, ANY, False),
]
"""Schemas of an argument, values of it, and whether the grammar has them written as they are."""
CODER_NAMES = ["a", "b c", " led", "trailed ", "x.y-z"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_the_grammar_of_qwen3_coder_accepts_is_read_back(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(VALUES), max_size=len(CODER_NAMES)))
    named = list(zip(CODER_NAMES, chosen, strict=False))
    properties = {name: schema for name, (schema, _, _) in named}
    if data.draw(st.booleans()):
        named.append(("n" * 256, VALUES[-1]))  # required, but no property
    text, meant = "<tool_call>\n<function=get>\n", {}
    for name, (_, values, is_text) in named:
        meant[name] = value = data.draw(values)
        written = value if is_text and value is not None else json.dumps(value, ensure_ascii=False)
        text += f"<parameter={name}>\n{written}\n</parameter>\n"
    text += "</function>\n</tool_call>"
    parameters = {"properties": properties, "required": list(meant), "$defs": {"text": {"type": "string"}}}
    tool = Tool("get", "", {"type": "object", **parameters})
    coder = TOOL_FORMATS["qwen3_coder"]
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(coder.grammar([tool], parallel=False)))
    raw = list(text.encode())
    assert matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting(), text
    for size in (1, 5, len(text)):
        parser = coder.parser([tool])
        events = [event for i in range(0, len(text), size) for event in parser.push(text[i : i + size])]
        assert calls_of(joined([*events, *parser.finish()])) == [("get", meant)], text


def test_names_that_qwen3_coder_cannot_write_are_refused() -> None:
    tool = Tool("get", "", {"properties": {"n" * 257: {}}})
    with pytest.raises(SchemaNotExpressible, match="a name of 257 characters"):
        TOOL_FORMATS["qwen3_coder"].grammar([tool], parallel=False)


FREE = [
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
]


@pytest.mark.parametrize("schema", FREE[:2])
@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"qwen3_coder"}))
def test_arguments_of_any_name_are_forced(name: str, schema: dict[str, Any]) -> None:
    for seed in range(4):
        check(name, [Tool("get", "", schema)], {}, seed, parallel=False)


@pytest.mark.parametrize("schema", [*FREE, {"properties": {"a>b": {}}}, {"properties": {"a": {"$ref": "#"}}}])
def test_a_schema_that_a_format_cannot_force_is_named(schema: dict[str, Any]) -> None:
    with pytest.raises(
        SchemaNotExpressible, match=r"^The schema of tool 'get' cannot be forced in this model's format: "
    ):
        TOOL_FORMATS["qwen3_coder"].grammar([Tool("get", "", schema)], parallel=False)


class AddedTokens:
    """A tokenizer of bytes with the marks of hermes as two more tokens."""

    eos_token_id, bos_token_id = 258, None
    tokens = (*(bytes([i]) for i in range(256)), b"<tool_call>", b"</tool_call>", b"<eos>")

    def __init__(self, special_token_ids: list[int]) -> None:
        self.special_token_ids = [*special_token_ids, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.mark.parametrize("special", [{}, {"<tool_call>": 256, "</tool_call>": 257}])
def test_marks_may_be_tokens_whether_these_are_special_or_not(special: dict[str, int]) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(AddedTokens(list(special.values()))))
    tools = [Tool("get", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})]
    grammar = TOOL_FORMATS["hermes"].grammar(tools, parallel=False, special_tokens=special)
    inside = b'\n{"name": "get", "arguments": {"a": 1}}\n'
    as_tokens = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert as_tokens.consume_tokens([256, *inside, 257]) and as_tokens.is_accepting()
    spelled = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    accepted = spelled.validate_tokens([*b"<tool_call>", *inside])
    assert accepted == (0 if special else len(b"<tool_call>") + len(inside))


def test_many_optional_arguments_are_each_written_once() -> None:
    tool = Tool("f", "", {"properties": {f"a{i}": {} for i in range(400)}, "additionalProperties": False})
    assert len(TOOL_FORMATS["pythonic"].grammar([tool], parallel=False)) < 400 * 250


def test_definitions_are_not_copied_without_bound() -> None:
    definitions = {"d": {"enum": ["x" * 10_000]}}
    parameters = {"$defs": definitions, "properties": {f"a{i}": {} for i in range(200)}, "additionalProperties": False}
    with pytest.raises(SchemaNotExpressible, match="definitions"):
        TOOL_FORMATS["qwen3_coder"].grammar([Tool("f", "", parameters)], parallel=False)
