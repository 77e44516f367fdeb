"""Fields that cannot change an answer and are not honoured: ids, metadata, hints, what clients echo of an answer. They
are taken out of a body before it is read, and always named: in the header `x-tandem-ignored` and a debug line
(http/middleware.py). With --strict-fields they are refused as other fields are.

The reader of a body declares them by place (an Ignorables) and calls IgnoredFields.take_from() before read(). What only
the service's model decides, such as an effort that its chat template has no word for, is noted where that is known.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tandem.cluster.gateway.schemas.reading import NEVER, Neutral, not_neutral, unsupported

_INDEX = re.compile(r"\[\d+\]")


class Ignorable(NamedTuple):
    """A field that is ignored. nothing: its values that ask for nothing, which nobody needs to hear of. is_usual: it is
    accepted with --strict-fields too. is_kept: a text there is not ignored, but kept for the router."""

    nothing: Neutral = NEVER
    is_usual: bool = False
    is_kept: bool = False


Ignorables = Mapping[str, Mapping[str, Ignorable]]
"""Names and what is ignored, by place in a body ("", "messages[]", "messages[].tool_calls[].function")."""


def ignorable(*names: str) -> dict[str, Ignorable]:
    """Fields that are ignored whatever their values are."""
    return dict.fromkeys(names, Ignorable())


class IgnoredFields:
    """The ignored fields of one request. names: as the client is told, without indices, in the order of their finding.
    Only fields that our tables or our code know get there, so that no client writes a header. kept: by place, the texts
    of fields that the router heeds."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._name_of: Callable[[str], str] = str
        self.names: dict[str, None] = {}
        self.left_out: list[int] = []
        self.kept: dict[str, str] = {}

    def leave_out(self, at: int, kind: str, name: str) -> None:
        """Notes a tool of the body that is left out, by its number there: refusals name the others by theirs
        (http/error_answers.py). name: of its kind, for the header."""
        self.note(f"tools[{at}].{name}", f"tools[{at}]: the type {kind} is not supported.")
        self.left_out.append(at)

    def without(self, block: Any, kinds: re.Pattern[str], place: str) -> Any:
        """Returns a block of a message; empty text, so that others keep their numbers, in place of one of these kinds,
        which is noted."""
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kinds.fullmatch(kind) is None:
            return block
        self.note(f"{place}.{kind}", f"{place}: the type {kind} is not supported.")
        return {"type": "text", "text": ""}

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
        other.names, other.left_out, other.kept = self.names, self.left_out, self.kept
        return other

    def take_from(self, fields: dict[str, Any], table: Ignorables, at: str = "") -> None:
        """Takes what is ignored out of a body, or of an object `at` a place in it, which is changed, and notes it. null
        is absent. RequestRefused with --strict-fields."""
        if not at and not self._is_strict:
            for name in [name for name, value in fields.items() if value is None]:
                del fields[name]  # of a field that nobody knows too: it asks for nothing
        tree = _Node({}, {}, {})
        for place, entries in table.items():
            tree.at(place).entries.update(entries)
        self._take(fields, tree, at)

    def _take(self, found: dict[str, Any], node: "_Node", at: str) -> None:
        """Walks once over what a client may have sent in great numbers."""
        for name in [name for name in found if name in node.entries]:
            self._drop(found, name, node.entries[name], _path(at, name))
        for step, below in node.objects.items():
            if isinstance(one := found.get(step), dict):
                self._take(one, below, _path(at, step))
        for step, below in node.lists.items():
            many = found.get(step)
            for i, one in enumerate(many if isinstance(many, list) else ()):
                if isinstance(one, dict) and below.has_part_in(one):
                    self._take(one, below, f"{_path(at, step)}[{i}]")

    def _drop(self, found: dict[str, Any], name: str, entry: Ignorable, param: str) -> None:
        value = found.pop(name)
        if entry.is_kept and isinstance(value, str):
            self.kept[param] = value
        elif value is not None and not entry.nothing.accepts(value):
            self.note(param, not_neutral(param, entry.nothing.words), is_usual=entry.is_usual)


class _Node(NamedTuple):
    """A place of a table: what is ignored there, and the places in its objects and in its lists."""

    entries: dict[str, Ignorable]
    objects: dict[str, "_Node"]
    lists: dict[str, "_Node"]

    def at(self, place: str) -> "_Node":
        """The node of a place below, made if need be."""
        node = self
        for step in place.split(".") if place else ():
            below = node.lists if step.endswith("[]") else node.objects
            node = below.setdefault(step.removesuffix("[]"), _Node({}, {}, {}))
        return node

    def has_part_in(self, found: dict[str, Any]) -> bool:
        """True if an object has a field of this place, or a place below."""
        none = self.entries.keys().isdisjoint(found) and self.objects.keys().isdisjoint(found)
        return not (none and self.lists.keys().isdisjoint(found))


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
