"""Fields that cannot change an answer and are not honoured: ids, metadata, hints, what clients echo of an answer. They
are taken out of a body before it is read, and always named: in the header `x-tandem-ignored` and a debug line
(http/middleware.py). With --strict-fields they are refused as other fields are.

The reader of a body declares them by place (an Ignorables) and calls IgnoredFields.take_from() before read(). What only
the service's model decides, such as an effort that its chat template has no word for, is noted where that is known.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.cluster.gateway.schemas.reading import NEVER, Neutral, not_neutral, unsupported

_INDEX = re.compile(r"\[\d+\]")


class Ignorable(NamedTuple):
    """A field that is ignored. nothing: its values that ask for nothing, which nobody needs to hear of. is_usual: it is
    accepted with --strict-fields too."""

    nothing: Neutral = NEVER
    is_usual: bool = False


Ignorables = Mapping[str, Mapping[str, Ignorable]]
"""Names and what is ignored, by place in a body ("", "messages[]", "messages[].tool_calls[].function")."""


def ignorable(*names: str) -> dict[str, Ignorable]:
    """Fields that are ignored whatever their values are."""
    return dict.fromkeys(names, Ignorable())


class IgnoredFields:
    """The ignored fields of one request. names: as the client is told, without indices, in the order of their finding.
    Only fields that our tables or our code know get there, so that no client writes a header."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._name_of: Callable[[str], str] = str
        self.names: dict[str, None] = {}

    def note(self, param: str, message: str | None = None, *, is_usual: bool = False) -> None:
        """Notes a field that is ignored, by its place in the body. With --strict-fields RequestRefused, in these words;
        is_usual: not for this one."""
        if self._is_strict and not is_usual:
            raise unsupported(param, message or f"The field {param} is not supported.")
        self.names[_INDEX.sub("[]", self._name_of(param))] = None

    def named(self, name_of: Callable[[str], str]) -> "IgnoredFields":
        """The same fields, for code that knows them by other names. name_of: makes the client's (FieldNames.of)."""
        other = IgnoredFields(is_strict=self._is_strict)
        other._name_of = name_of
        other.names = self.names
        return other

    def take_from(self, fields: dict[str, Any], table: Ignorables, at: str = "") -> None:
        """Takes what is ignored out of a body, or of an object `at` a place in it, which is changed, and notes it. null
        is absent. RequestRefused with --strict-fields."""
        for place, entries in table.items():
            for found, where in _objects(fields, place, at):
                for name in [name for name in found if name in entries]:
                    value, entry = found.pop(name), entries[name]
                    if value is not None and not entry.nothing.accepts(value):
                        param = f"{where}.{name}" if where else name
                        self.note(param, not_neutral(param, entry.nothing.words), is_usual=entry.is_usual)


def _objects(fields: dict[str, Any], place: str, at: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the objects of a place, and where they are ("messages[]": messages[0], messages[1])."""
    found: list[tuple[Any, str]] = [(fields, at)]
    for step in place.split(".") if place else ():
        name = step.removesuffix("[]")
        below = [(one[name], f"{at}.{name}" if at else name) for one, at in found if name in one]
        if step.endswith("[]"):
            below = [(one, f"{at}[{i}]") for many, at in below if isinstance(many, list) for i, one in enumerate(many)]
        found = [(one, at) for one, at in below if isinstance(one, dict)]
    yield from found
