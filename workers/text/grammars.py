"""Grammars for llguidance, as text: from JSON schemas, regular expressions, choices, Lark, GBNF and structural tags.

Used by the gateway and LLM; the rank that samples compiles the text (workers/structured/). Torch-free. A grammar is
either Lark text or JSON text with several of them, {"grammars": [{"lark_grammar": ...}, {"name": ..., "json_schema":
...}]}, of which the first is the whole and refers to the others as @name.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer, StructTag, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tandem.workers.messages.request import SamplingParams
from tandem.workers.messages.sampling_ranges import StructuredOutputsParams
from tandem.workers.text.output.json_schemas import asserting, fault

ONE_OF: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of StructuredOutputsParams of which exactly one is given."""
WHITESPACE: Final = r"[ ]|\n[ \t]{0,40}"
"""Text that may stand between the parts of JSON, if nothing else is asked for: a space, or a line break and
indentation. Any amount of it would let a model that has lost its way write white space for ever."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
MOST_ERROR_CHARS = 500
MOST_SHOWN = 5
NO_TOKEN: Final = "NoExtension"
"""The begin of llguidance's error where no token can follow."""
_EXCERPT: Final = re.compile(r"\n *\d+ \|")
_IN_SCHEMA: Final = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema)")


class GrammarError(ValueError):
    """Refusal of a grammar. The message is for who sent it; field: the field of StructuredOutputsParams at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def grammar_of(params: StructuredOutputsParams) -> str:
    """Returns the grammar that is asked for. GrammarError names the field at fault; check() finds the rest."""
    kind = kind_of(params)
    value = getattr(params, kind)
    whitespace = _whitespace(params, kind)
    try:
        if kind == "json":
            return json_schema(value, whitespace)
        if kind == "json_object":
            return json_schema(ANY_OBJECT, whitespace)
        if kind == "structural_tag":
            return structural_tag(value, whitespace)
        return {"regex": regex, "choice": choice, "grammar": lark}[kind](value)
    except GrammarError as error:
        error.field = error.field or kind
        raise


def checked_grammar(params: StructuredOutputsParams) -> str:
    """Returns the grammar that is asked for, once check() has found nothing wrong. GrammarError names the field."""
    grammar = grammar_of(params)
    try:
        check(grammar)
    except GrammarError as error:
        kind = kind_of(params)
        raise GrammarError(_fault_of(params, kind) or str(error), kind) from error
    return grammar


def with_grammar(params: SamplingParams) -> SamplingParams:
    """Returns checked parameters with the grammar of structured_outputs. ValueError names what is wrong with it."""
    form = params.structured_outputs
    if form is None:
        return params
    try:
        grammar = checked_grammar(form)
    except GrammarError as error:
        name = "structured_outputs" if error.field is None else f"structured_outputs.{error.field}"
        raise ValueError(f"{name}: {error}") from error
    return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)


def _fault_of(params: StructuredOutputsParams, kind: str) -> str:
    """Returns why a schema that is asked for cannot be compiled, and where; "" if no schema is at fault."""
    if kind == "json":
        return schema_fault(params.json)
    if kind == "structural_tag":
        for place, structure in enumerate(_parsed(params.structural_tag)["structures"]):
            if found := schema_fault(structure.get("schema", {})):
                return f"structures[{place}].schema: {found}"
    return ""


def kind_of(params: StructuredOutputsParams) -> str:
    """Returns the one field of ONE_OF that is given. GrammarError if there is none, or names the first two."""
    given = [name for name in ONE_OF if (value := getattr(params, name)) is not None and value is not False]
    if not given:
        raise GrammarError(f"one of {', '.join(ONE_OF)} must be given")
    if len(given) > 1:
        raise GrammarError(f"{given[0]} and {given[1]} exclude each other", given[1])
    return given[0]


def json_schema(schema: Any, whitespace: Mapping[str, Any] = {"whitespace_pattern": WHITESPACE}) -> str:
    """Returns the grammar of JSON texts that a schema (an object, true, or JSON text of these) allows."""
    return json.dumps({"grammars": [{"json_schema": _schema(schema, whitespace)}]}, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Returns the grammar of texts that a regular expression matches as a whole, with or without ^ and $. \\d and
    \\w are ASCII."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    body = pattern.removesuffix("$")
    if body != pattern and (len(body) - len(body.rstrip("\\"))) % 2 == 0:  # \$ is a dollar sign
        pattern = body
    return f"start: /{regex_to_lark(pattern, 'dw')}/"


def choice(texts: Any) -> str:
    """Returns the grammar of exactly these texts."""
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise GrammarError("choice must be a list of texts, none of them empty")
    return "start: " + " | ".join(map(_literal, dict.fromkeys(texts)))


def lark(text: str) -> str:
    """Returns a grammar that is given in llguidance's Lark syntax, or in GBNF."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises what it likes
        raise GrammarError(f"it is neither Lark nor GBNF: {str(error)[:MOST_ERROR_CHARS]}") from error


def structural_tag(tag: Any, whitespace: Mapping[str, Any] = {"whitespace_pattern": WHITESPACE}) -> str:
    """Returns the grammar of free text in which behind each trigger one of the structures stands: `begin`, which starts
    with the trigger, JSON of a schema, `end`."""
    tag = _parsed(tag)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise GrammarError('it must be an object with "type": "structural_tag"')
    if unknown := sorted(tag.keys() - {"type", "structures", "triggers"}):
        raise GrammarError(f"its key {unknown[0]!r:.80} is not supported, only structures and triggers are")
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
        raise GrammarError("its triggers must be a list of texts, none of them empty")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("its structures must be a list that is not empty")
    tags = [_tag(structure, place, triggers, whitespace) for place, structure in enumerate(structures)]
    return str(StructTag.to_grammar(tags, assume_special=False))


def after(prefix_lark: str, grammar: str) -> str:
    """Returns the grammar of what `prefix_lark` says, in which @body stands for `grammar`.

    So after('start: think @body\\nthink: ...', g) is a thought and then what g allows. GrammarError if the prefix does
    not name @body, or g is made of grammars of which one has that name already.
    """
    if "@body" not in prefix_lark:
        raise GrammarError("the Lark rules ahead of a grammar must refer to it as @body")
    first, *others = _parts(grammar)
    if any(part.get("name") == "body" for part in (first, *others)):
        raise GrammarError("a grammar stands behind other rules already")
    parts = [{"lark_grammar": prefix_lark}, {**first, "name": "body"}, *others]
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def check(grammar: str) -> None:
    """Raises GrammarError with the reason for most grammars that cannot be compiled. Some 10 ms at most but for very
    large ones; limits that depend on the vocabulary show only on the rank."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise GrammarError(reason_of("; ".join(messages)))


def schema_fault(schema: Any) -> str:
    """Returns why a JSON schema cannot be compiled, with the place of the fault in it; "" if it can be."""
    parsed = _schema(schema, {})
    found = fault({key: value for key, value in parsed.items() if key != "x-guidance"}, _why_not)
    if found is None:
        return ""
    place, reason = found
    return f"at {place}: {reason}" if place else reason


def _why_not(schema: Any) -> str | None:
    try:
        check(json_schema(schema))
    except GrammarError as error:
        return str(error)
    return None


def why_no_token_begins(grammar: str) -> str:
    """Returns the reason for which no token of a vocabulary begins a text of a grammar."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.get_error().startswith(NO_TOKEN):
        return reason_of(NO_TOKEN)
    first = [i for i in range(min(256, 8 * len(mask))) if mask[i // 8] >> i % 8 & 1]
    shown = ", ".join(repr(chr(i)) if i < 128 else f"byte {i:#x}" for i in first[:MOST_SHOWN])
    more = ", ..." if len(first) > MOST_SHOWN else ""
    return "no token of the model's vocabulary can begin it" + (
        f": its texts begin with {shown}{more}" if first else ""
    )


def reason_of(message: str) -> str:
    """Returns llguidance's message without the excerpt of the grammar, which may be one that no client has written."""
    message = message.strip()
    if message.startswith(NO_TOKEN):
        return "it allows no text"
    message = _EXCERPT.split(message.removesuffix("<non-verbose/>"), maxsplit=1)[0]
    return _IN_SCHEMA.sub("", message).strip()[:MOST_ERROR_CHARS]


def _literal(text: str) -> str:
    """A text in Lark: a string, or a regular expression where that has no spelling for a character."""
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False)
    return "/" + "".join(f"\\x{{{ord(char):x}}}" for char in text) + "/"


def _whitespace(params: StructuredOutputsParams, kind: str) -> dict[str, Any]:
    """llguidance's options for what stands between the parts of JSON."""
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(params, name) and kind not in ("json", "json_object", "structural_tag"):
            raise GrammarError(f"{name} is for JSON, it does not go with {kind}", name)
    if params.disable_any_whitespace:
        if params.whitespace_pattern is not None:
            raise GrammarError("disable_any_whitespace and whitespace_pattern exclude each other", "whitespace_pattern")
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return {"whitespace_pattern": WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern}


def _schema(schema: Any, whitespace: Mapping[str, Any]) -> dict[str, Any]:
    schema = _parsed(schema)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    if "x-guidance" in schema:
        raise GrammarError("the schema's key x-guidance is not supported; see whitespace_pattern")
    try:
        return {**asserting(schema), "x-guidance": dict(whitespace)}
    except RecursionError as error:
        raise GrammarError("the schema is nested too deep") from error


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error


def _tag(structure: Any, place: int, triggers: list[str], whitespace: Mapping[str, Any]) -> StructTag:
    if not isinstance(structure, dict) or structure.keys() - {"begin", "schema", "end"}:
        raise GrammarError(f"structures[{place}] must be an object with begin, schema and end")
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"begin and end of structures[{place}] must be texts")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise GrammarError(f"begin of structures[{place}] starts with none of the triggers")
    return StructTag(trigger=trigger, begin=begin, grammar=_schema(structure.get("schema", {}), whitespace), end=end)


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The grammars of a text, the whole first."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return [{key: value for key, value in part.items() if value is not None} for part in parts]
