"""PythonScanner: reads one Python literal as it arrives and passes it on as JSON. JSON's own literals are read too."""

import ast
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import ClassVar

from tandem.workers.text.output.json_stream import JsonScanner

_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'`"}
_WORD = re.compile(r"[\w.+-]*")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_OCTAL = "01234567"
STRING_STATES = ("string", "opened", "escape", "hex", "octal", "character", "raw", "behind_string")
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_encode = json.JSONEncoder(ensure_ascii=False).encode
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER = re.compile(r"[0-9a-fA-FxXoO_.+ -]+")
_LONGEST_WORD = 400
_LONGEST_CHARACTER_NAME = 100


class PythonScanner(JsonScanner):
    """Reads strings, numbers, True, False, None, lists, tuples (as lists), dicts with strings as keys."""

    openers: ClassVar[Mapping[str, str]] = {"{": "}", "[": "]", "(": ")"}
    quotes = "\"'"
    lists = "[("
    _raw = False  # the string began with r'

    def end(self) -> str:
        if not self._stack and self._state == "word":
            self._word_ended()
        return self._drain()

    def _begin_scalar(self, char: str, at: int) -> int:
        if not (char.isalnum() or char in "_+-."):
            return self._break(at)
        self._left, self._state = "", "word"
        return at

    def _in_word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at, at + _LONGEST_WORD - len(self._left) + 1)
        end = found.end() if found is not None else at
        self._left += text[at:end]
        if len(self._left) > _LONGEST_WORD:
            self._out.append(self._left)
            return self._break(end)
        if end < len(text):
            self._word_ended()
        return end

    def _word_ended(self) -> None:
        """A word is held back up to here, as Python writes it in another way than JSON."""
        word = WORDS.get(self._left) or as_number(self._left)
        self._out.append(self._left if word is None else word)
        if word is None:
            self.broken = True
        else:
            self._value_ended()

    def _after_comma(self, state: str) -> None:
        self._state = "more_items" if state == "value" else "more_keys"

    def _in_more_items(self, text: str, at: int) -> int:
        return self._next(text, at, "value")

    def _in_more_keys(self, text: str, at: int) -> int:
        return self._next(text, at, "key")

    def _next(self, text: str, at: int, state: str) -> int:
        """Python allows a comma before the closing bracket, so a comma is passed on behind white space."""
        if text[at].isspace():
            return at + 1
        if text[at] == self.openers[self._stack[-1]]:
            return self._close(at)
        self._pass(", ", state)
        return at

    def _string_until(self, text: str, at: int) -> int:
        """Returns the index up to which the text may be read as a string's; if the value broke, of what is left."""
        return len(text)

    def _open_string(self, char: str, at: int, *, is_key: bool) -> int:
        at = super()._open_string(char, at, is_key=is_key)
        self._raw, self._state = False, "opened"
        return at

    def _in_opened(self, text: str, at: int) -> int:
        """Looks behind the first quote of a string: two more open one that may have quotes in it."""
        quotes = self._quote * 2
        if text.startswith(quotes, at):
            self._quote, self._state = self._quote + quotes, "string"
            return at + 2
        if text[at] != self._quote or at + 1 < len(text) or self.text_ended:
            self._state = "string"
        return at

    def _in_string(self, text: str, at: int) -> int:
        until = self._string_until(text, at)
        if self.broken:
            return until
        quote = self._quote[0]
        found = _PLAIN[quote].match(text, at, until)
        end = found.end() if found is not None else at
        if end > at:
            self._say(text[at:end])
        if end == until:
            return end
        if text[end] == quote:
            return self._at_quote(text, end)
        if text[end] == "\\":
            self._state = "raw" if self._raw else "escape"
        elif self._strict and len(self._quote) == 1:
            return self._break(end)
        else:
            self._say("\n")  # models write line ends inside strings
        return end + 1

    def _at_quote(self, text: str, at: int) -> int:
        if text.startswith(self._quote, at):
            return self._close_string(at)
        if self._quote.startswith(text[at : at + 3]) and not self.text_ended:
            return at
        self._say(text[at])
        return at + 1

    def _in_raw(self, text: str, at: int) -> int:
        """Reads what stands behind a backslash of a raw string, which says both."""
        self._say("\\" + text[at])
        self._state = "string"
        return at + 1

    def _say(self, text: str) -> None:
        self._out.append(_encode(text)[1:-1])

    def _in_escape(self, text: str, at: int) -> int:
        char = text[at]
        self._state = "string"
        if char in HEX_DIGITS:
            self._left, self._state = char, "hex"
        elif char in _OCTAL:
            self._left, self._state = char, "octal"
        elif char == "N":
            self._left, self._state = "", "character"
        elif char in ESCAPES:
            self._say(ESCAPES[char])
        elif char in "\\'\"/`":
            self._say(char)
        elif char == "\r":  # of a line end of two characters
            self._state = "escape"
        elif char != "\n":  # a line end behind a backslash is nothing; Python keeps the backslash before others
            self._say("\\" + char)
        return at + 1

    def _in_octal(self, text: str, at: int) -> int:
        is_digit = text[at] in _OCTAL
        self._left += text[at] if is_digit else ""
        if not is_digit or len(self._left) == 3:
            self._say(chr(int(self._left, 8)))
            self._state = "string"
        return at + is_digit

    def _in_character(self, text: str, at: int) -> int:
        """Reads the name of a character, in braces; what is none is text."""
        if text[at] not in "{}" and (not self._left or len(self._left) == _LONGEST_CHARACTER_NAME):
            self._say("\\N" + self._left)
            self._state = "string"
            return at
        self._left += text[at]
        if text[at] == "}":
            try:
                self._say(unicodedata.lookup(self._left[1:-1]))
            except KeyError:
                self._say("\\N" + self._left)
            self._state = "string"
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._break(at)
        self._left += text[at]
        if len(self._left) > HEX_DIGITS[self._left[0]]:
            code = int(self._left[1:], 16)
            if code > 0x10FFFF:
                return self._break(at)
            if 0xD800 <= code < 0xE000:  # JSON writes characters above U+FFFF as two of these
                self._out.append(f"\\u{code:04x}")
            else:
                self._say(chr(code))
            self._state = "string"
        return at + 1


def as_number(word: str) -> str | None:
    if _JSON_NUMBER.fullmatch(word):
        return word
    if _NUMBER.fullmatch(word) is None:
        return None
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return json.dumps(value)
    return None
