"""StructuredOutputsParams: the form that a text must have, with vLLM's names. See workers/text/grammars.py."""

from typing import Any

import msgspec


class StructuredOutputsParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The form of each choice's text, for SamplingParams of LLM; exactly one of the first six is given.

    json: a JSON schema, as an object or as JSON text. regex: a regular expression for the whole text. choice: texts, of
    which it is one. grammar: a grammar in llguidance's Lark syntax or in GBNF. json_object: True: any JSON object.
    structural_tag: {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}, as an
    object or as JSON text: free text, in which behind each trigger one of the structures stands.

    disable_any_whitespace: JSON without spaces or line breaks between its parts. whitespace_pattern: a regular
    expression for what may stand between them. Both go with json, json_object and structural_tag.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
