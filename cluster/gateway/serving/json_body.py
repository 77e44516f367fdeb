"""Reads the JSON of a body, without the things that JSON parsers let pass.

Refused: duplicate keys, nesting beyond the cap, NaN and infinities (1e999 too), lone surrogates, bytes that are not
UTF-8. Each failure is a RequestRefused; the meaning of a body is read elsewhere. A long body is read piece by piece:
json's scanner reads all of a text before another thread may go on, which is tenths of a second for 8 MiB of numbers.
"""

import json
import math
import re
from typing import Any, Final

from tandem.cluster.gateway.http.body import printable
from tandem.workers.messages.errors import RequestRefused

LONG_BYTES: Final = 64 * 1024
RUN_CHARS: Final = 16 * 1024
"""Characters of a list that are read at once."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = r'"(?>[^"\\]++|\\.)*+"'
_FLAT = rf'(?>[^]["{{}}]++|{_STRING})*+'
_RUN = re.compile(
    r"[-0-9][-+0-9.eE, \t\n\r]*,[ \t\n\r]*+|"
    rf"(?:(?>{_STRING}|[-+.\w]++|\[{_FLAT}\]|\{{{_FLAT}\}})[ \t\n\r]*+,[ \t\n\r]*+)+",
    re.ASCII | re.DOTALL,
)
"""Items of a list, each with the comma behind it, that are no lists or objects of lists or objects."""


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `body`. `invalid_json` when it is not one, `invalid_value` for what strictness refuses."""
    try:
        text = body.decode("utf-8")
        value = _parse(text, body, max_depth) if len(body) < LONG_BYTES else LongText(text, body, max_depth).value()
    except RequestRefused:
        raise
    except UnicodeDecodeError as error:
        raise _invalid(f"The body is not UTF-8 (byte {error.start}).") from None
    except UnicodeEncodeError:
        raise _invalid("The body holds half of a surrogate pair, which is no character.") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except json.JSONDecodeError as error:
        raise _invalid(f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except ValueError:
        raise _invalid("The body holds a number with too many digits.") from None
    if not isinstance(value, dict):
        raise _invalid("The body must be a JSON object.")
    return value


def _parse(text: str, body: bytes, max_depth: int) -> Any:
    value = _STRICT.decode(text)
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(value, max_depth)
    if _SURROGATE_ESCAPE.search(body) is not None:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


class LongText:
    """The text of a long body, read so that other threads can go on all the while: json's scanner sees a bounded run of
    a list at once, or one text. The values and errors are the scanner's; what is no character or nested too deep is
    refused where it stands."""

    def __init__(self, text: str, body: bytes, max_depth: int) -> None:
        self._text = text
        self._max_depth = max_depth
        self._keys: dict[str, str] = {}
        self._has_surrogates = _SURROGATE_ESCAPE.search(body) is not None

    def value(self) -> Any:
        """The value that the whole text is."""
        value, at = self._value(self._skip(0), 0)
        if at != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """Returns a value and where what follows it begins."""
        value: Any
        first = self._text[at : at + 1]
        if first == "[":
            value, at = self._array(self._skip(at + 1), self._below(depth))
        elif first == "{":
            value, at = self._object(self._skip(at + 1), self._below(depth))
        else:
            value, at = self._scalar(at)
        return value, self._skip(at)

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        text = self._text
        values: list[Any] = []
        if text[at : at + 1] == "]":
            return values, at + 1
        has_runs = depth < self._max_depth and not self._has_surrogates
        while True:
            while has_runs and (run := _RUN.match(text, at, at + RUN_CHARS)) is not None:
                try:
                    values += _STRICT.decode(f"[{run[0].rstrip()[:-1]}]")
                except json.JSONDecodeError:
                    has_runs = False  # it is found again, at its place
                else:
                    at = self._skip(run.end())
            value, at = self._value(at, depth)
            values.append(value)
            mark = text[at : at + 1]
            if mark == "]":
                return values, at + 1
            if mark != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = self._skip(at + 1)

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text, pairs = self._text, []
        if text[at : at + 1] == "}":
            return {}, at + 1
        while True:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = self._scalar(at)
            at = self._skip(at)
            if text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            value, at = self._value(self._skip(at + 1), depth)
            pairs.append((self._keys.setdefault(key, key), value))
            mark = text[at : at + 1]
            if mark == "}":
                return _unique(pairs), at + 1
            if mark != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = self._skip(at + 1)

    def _scalar(self, at: int) -> tuple[Any, int]:
        """Reads a string, a number or a constant."""
        value, at = _STRICT.raw_decode(self._text, at)
        if self._has_surrogates and isinstance(value, str):
            value.encode("utf-8")
        return value, at

    def _skip(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        assert space is not None
        return space.end()

    def _below(self, depth: int) -> int:
        if depth == self._max_depth:
            raise _too_deep(self._max_depth)
        return depth + 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _invalid(f"The key {printable(double)} comes twice in one object.")
    return found


def _no_constant(name: str) -> Any:
    raise _invalid(f"{name} is not a JSON number.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise RequestRefused("The body holds a number that is not finite.", code="invalid_value")
    return number


def _check_depth(value: Any, max_depth: int) -> None:
    """Breadth first, so that it ends at the first level beyond the cap."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            below += [child for child in children if isinstance(child, (dict, list))]
        level = below
        if not level:
            return
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> RequestRefused:
    return _invalid(f"The body is nested deeper than {max_depth} levels.")


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_json")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
