"""Reading a body: null and neutral fields are dropped, what is not served is refused by name, types are checked.

A body is a msgspec struct, one definition for parsing and OpenAPI. Those that several APIs take are in this folder,
the others beside their routes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.allowed_values import allowed_values, given_value
from tandem.workers.messages.errors import RequestRefused

ShortText = Annotated[str, Meta(max_length=1024)]
Body = TypeVar("Body", bound=msgspec.Struct)


class Neutral(NamedTuple):
    """The values that a field that is not served may have. `words`: their names; "" when there are none."""

    accepts: Callable[[Any], bool]
    words: str


def neutral_values(*values: Any) -> Neutral:
    """These values only."""
    words = " or ".join(json.dumps(value) for value in values)
    return Neutral(lambda given: any(given == value and type(given) is type(value) for value in values), words)


def neutral_kind(kind: type, words: str) -> Neutral:
    """All values of a type."""
    return Neutral(lambda given: isinstance(given, kind), words)


NEVER = Neutral(lambda given: False, "")
NEUTRAL: Mapping[str, Neutral] = {
    "parallel_tool_calls": neutral_kind(bool, "true or false"),
    "modalities": neutral_values(["text"]),
    "functions": neutral_values([]),
    "function_call": neutral_values("none"),
    "suffix": neutral_values(""),
    "audio": NEVER,
    "reasoning_effort": neutral_values("none"),
    "separate_reasoning": neutral_values(True),
    "stream_reasoning": neutral_values(True),
    "web_search_options": NEVER,
    "chat_template": NEVER,
    "chat_template_kwargs": neutral_values({}),
    "documents": neutral_values([]),
    "logits_processors": neutral_values([]),
    "echo": neutral_values(False),
    "spaces_between_special_tokens": neutral_values(True),
}
"""Fields that are known but not served, and might change the answer: accepted only with a value that asks for nothing.
null is always absent."""
NEUTRAL_IN_MESSAGES: Mapping[str, Neutral] = {
    "refusal": NEVER,
    "audio": NEVER,
    "function_call": NEVER,
}
"""The same for fields of a message: clients send back an answer's whole message, with null for what it has not."""
_PATH = re.compile(r" - at `\$(.*)`$")
_KEY_PATH = re.compile(r" - at `key` in `\$(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read(fields: dict[str, Any], body_type: type[Body], neutral: Mapping[str, Neutral] = NEUTRAL) -> Body:
    """Drops null and neutral fields, refuses unknown and unsupported ones by name, checks types and ranges."""
    known = set(body_type.__struct_fields__)
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            if name not in known and name not in neutral:
                raise unsupported(name, unknown(name))
        elif name in known:
            kept[name] = value
        elif name not in neutral:
            raise unsupported(name, unknown(name))
        elif not neutral[name].accepts(value):
            raise unsupported(name, not_neutral(name, neutral[name].words))
    if neutral is NEUTRAL and isinstance(kept.get("messages"), list):
        kept["messages"] = [_plain_message(i, message) for i, message in enumerate(kept["messages"])]
    try:
        return msgspec.convert(kept, body_type)
    except msgspec.ValidationError as error:
        raise _refused(str(error), body_type, kept) from None


def _plain_message(index: int, message: Any) -> Any:
    """A message without its neutral fields. RequestRefused for one that asks for something."""
    if not isinstance(message, dict) or not (found := NEUTRAL_IN_MESSAGES.keys() & message.keys()):
        return message
    for name in sorted(found):
        if message[name] is not None and not NEUTRAL_IN_MESSAGES[name].accepts(message[name]):
            raise unsupported(f"messages[{index}].{name}", not_neutral(name, NEUTRAL_IN_MESSAGES[name].words))
    return {name: value for name, value in message.items() if name not in found}


def unsupported(param: str, message: str) -> RequestRefused:
    """400 for what exists elsewhere but not here."""
    return RequestRefused(message, code="unsupported_parameter", param=param[:128])


def unknown(name: str) -> str:
    """Says why a field that nobody knows is refused."""
    return f"The field {printable(name)} is unknown, so it might change the answer."


def invalid(param: str | None, message: str) -> RequestRefused:
    """400 for a value out of range or of a wrong kind."""
    return RequestRefused(message, code="invalid_value", param=param)


def not_neutral(name: str, words: str) -> str:
    """Says that a field has a value that is not served. words: of its Neutral."""
    if not words:
        return f"The field {name} is not supported."
    return f"The field {name} is not supported with this value; it may be {words}."


def _refused(problem: str, body_type: type[msgspec.Struct], fields: Mapping[str, Any]) -> RequestRefused:
    """msgspec's message, with the path in the body as `param`; for an enumerated field, its values.
    fields: the body."""
    where = _PATH.search(problem) or _KEY_PATH.search(problem)
    path = where[1].lstrip(".") if where is not None else ""
    text = problem[: where.start()] if where is not None else problem
    if (stranger := _UNKNOWN.match(text)) is not None:
        name = f"{path}.{stranger[1]}" if path else stranger[1]
        return unsupported(name, unknown(name))
    if (missing := _MISSING.match(text)) is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        values = allowed_values(body_type, name)
        return invalid(name, f"The field {name} is required{f': {_one_of(values)}' if values else ''}.")
    given = f", not {value}" if (value := given_value(fields, path)) is not None else ""
    if values := allowed_values(body_type, path):
        return invalid(path[:128], f"{path} must be {_one_of(values)}{given}.")
    return invalid(path[:128] or None, f"{path or 'body'}: {text}{'' if 'got `' in text else given}.")


def _one_of(values: Sequence[Any]) -> str:
    """'"text"', or 'one of "system", "user"'."""
    return f"{'one of ' if len(values) > 1 else ''}{', '.join(json.dumps(value) for value in values)}"


def check_limit(param: str, value: int, most: int) -> None:
    if value > most:
        raise invalid(param, f"{param}: {value} exceeds the limit of {most}.")
