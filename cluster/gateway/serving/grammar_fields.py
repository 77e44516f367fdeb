"""Structured output of a chat or completions body: from response_format, structured_outputs or guided_* to a grammar.

All of them name one grammar; two at once are refused, and so is what the settings' limits exclude. What llguidance
cannot compile is found here where that does not need the vocabulary, else by the group that runs the request.
"""

import json
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.gateway.schemas.generation_body import CommonBody, ResponseFormatField
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.sampling_ranges import StructuredOutputsParams
from tandem.workers.text.grammars import GrammarError, checked_grammar, kind_of

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, and what they are called in structured_outputs."""
FORM_FIELDS = {"json_schema": "json_schema", "structures": "structural_tag", "triggers": "structural_tag"}
"""Fields of response_format, and the type that each belongs to."""
OFF_LOOP_BYTES = 4096
"""Added to the size of a body with a grammar: to check one may take longer than its length says."""


class RequestedForm(NamedTuple):
    """A form that a body asks for. field: the name of its field in the body."""

    field: str
    params: StructuredOutputsParams


def structured_field(body: CommonBody) -> str | None:
    """Returns the name of the field that asks for structured output; None: no field does. RequestRefused for two."""
    asked = _asked(body)
    return None if asked is None else asked.field


def grammar_size(body: CommonBody) -> int:
    """Returns what a grammar adds to the size of a body as work; measuring its text would be such work itself."""
    return 0 if _asked(body) is None else OFF_LOOP_BYTES


def requested_grammar(settings: GatewaySettings, body: CommonBody) -> str | None:
    """Returns the grammar of the texts that the body asks for; None: any text. RequestRefused (invalid_grammar) names
    the field at fault."""
    asked = _asked(body)
    if asked is None:
        return None
    field = asked.field
    try:
        _check_limits(settings, field, asked.params)
        return checked_grammar(asked.params)
    except GrammarError as error:
        if field == "structured_outputs" and error.field is not None:
            field = f"{field}.{error.field}"
        raise _refused(field, str(error)) from None


def _asked(body: CommonBody) -> RequestedForm | None:
    found = [one for one in (_of_response_format(body), _of_structured_outputs(body), *_of_guided(body)) if one]
    if len(found) > 1:
        raise invalid(found[1].field, f"{found[0].field} and {found[1].field} exclude each other.")
    if body.guided_whitespace_pattern is not None:
        if not found or not found[0].field.startswith("guided_"):
            raise invalid("guided_whitespace_pattern", "guided_whitespace_pattern needs guided_json.")
        pattern = body.guided_whitespace_pattern
        return RequestedForm(found[0].field, msgspec.structs.replace(found[0].params, whitespace_pattern=pattern))
    return found[0] if found else None


def _of_response_format(body: CommonBody) -> RequestedForm | None:
    form = body.response_format
    if form is None:
        return None
    for name, kind in FORM_FIELDS.items():
        if getattr(form, name) is not None and form.type != kind:
            raise invalid(f"response_format.{name}", f"response_format.{name} needs type {kind}, not {form.type}.")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return RequestedForm("response_format", StructuredOutputsParams(json_object=True))
    if form.type == "structural_tag":
        return RequestedForm("response_format", StructuredOutputsParams(structural_tag=_tag(form)))
    if form.json_schema is None or form.json_schema.schema is None:
        name = "response_format.json_schema" if form.json_schema is None else "response_format.json_schema.schema"
        raise invalid(name, f"The field {name} is required with type json_schema.")
    return RequestedForm("response_format", StructuredOutputsParams(json=form.json_schema.schema))


def _tag(form: ResponseFormatField) -> dict[str, Any]:
    return {"type": "structural_tag", "structures": form.structures, "triggers": form.triggers}


def _of_structured_outputs(body: CommonBody) -> RequestedForm | None:
    given = body.structured_outputs
    if given is None or given == type(given)():
        return None
    params = StructuredOutputsParams(
        json=given.json,
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        json_object=given.json_object,
        structural_tag=given.structural_tag,
        disable_any_whitespace=bool(given.disable_any_whitespace),
        whitespace_pattern=given.whitespace_pattern,
    )
    try:
        kind_of(params)
    except GrammarError as error:
        field = "structured_outputs" if error.field is None else f"structured_outputs.{error.field}"
        raise invalid(field, f"structured_outputs: {error}.") from None
    return RequestedForm("structured_outputs", params)


def _of_guided(body: CommonBody) -> list[RequestedForm]:
    found = []
    for field, name in GUIDED.items():
        value = getattr(body, field)
        if value is not None:
            plain = tuple(value) if name == "choice" else value
            found.append(RequestedForm(field, msgspec.structs.replace(StructuredOutputsParams(), **{name: plain})))
    return found


def _text(params: StructuredOutputsParams) -> str:
    """Returns what the client sent, as text."""
    value = getattr(params, kind_of(params))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_limits(settings: GatewaySettings, field: str, params: StructuredOutputsParams) -> None:
    kind, most = kind_of(params), settings.max_grammar_bytes
    if kind == "regex" and len(params.regex or "") > settings.max_regex_chars:
        have, limit = len(params.regex or ""), settings.max_regex_chars
        raise _refused(field, f"the regular expression has {have} characters, above the limit of {limit}")
    if kind == "choice" and len(params.choice or ()) > settings.max_grammar_choices:
        have, limit = len(params.choice or ()), settings.max_grammar_choices
        raise _refused(field, f"there are {have} choices, above the limit of {limit}")
    if (size := len(_text(params).encode())) > most:
        what = "schema" if kind == "json" else kind
        raise _refused(field, f"the {what} has {size} bytes, above the limit of {most} (--max-grammar-bytes)")


def _refused(field: str, message: str) -> RequestRefused:
    return RequestRefused(f"{field}: {message}", code="invalid_grammar", param=field)
