"""JsonScanner: reads one JSON value as it arrives, tells where it ends or breaks, and passes it on at once."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar

from tandem.workers.text.output.events import OutputEvent
from tandem.workers.text.output.stepping import Emit, Steps, TextSource

MAX_NESTING = 128
_READ_AT_ONCE = 1024

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "f", "1": "f"},
    "f": {"0": "f", "1": "f", "e": "e"},
    "e": {"0": "x", "1": "x", "+": "s"},
    "s": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
"""Characters that may follow in a number: zero and other digits differ, `1` stands for those, `e` for E, `+` for both
signs."""
_CLASS = {**dict.fromkeys("123456789", "1"), "0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "+"}
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """Reads one JSON value. `done`: it ended; `broken`: the next character cannot be part of it.

    Control characters inside strings, which models write though JSON forbids them, are passed on escaped; if `strict`,
    they break the value.
    """

    openers: ClassVar[Mapping[str, str]] = {"{": "}", "[": "]"}
    quotes = '"'
    lists = "["
    spaced: ClassVar[Collection[str]] = ("value", "first_item", "first_key", "key", "colon", "comma")
    """States in which white space means nothing."""
    _waiting = False  # what stands behind the white space cannot be said before more text comes

    def __init__(self, *, inside_object: bool = False, strict: bool = False) -> None:
        """inside_object: the scanner begins behind the first value of an object."""
        self.done = self.broken = False
        self.text_ended = False  # no more text will come than what is given
        self._strict = strict
        self._stack = ["{"] if inside_object else []
        self._state = "comma" if inside_object else "value"
        self._is_key = False
        self._quote = ""
        self._left = ""
        self._out: list[str] = []

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads `text` from `at` on. Returns the index behind what was read, and JSON text to pass on. What was not
        read is to be given again, with more text behind it."""
        while at < len(text) and not self.done and not self.broken:
            if self._state in self.spaced:
                at = self._space(text, at)
                if at == len(text) or self._waiting:
                    break
            before = at, self._state
            at = getattr(self, "_in_" + self._state)(text, at)
            if (at, self._state) == before:
                break
        return at, self._drain()

    def end(self) -> str:
        """Says that the text ended: a number on its own ends too. Returns JSON text to pass on."""
        if not self._stack and self._state == "number":
            self._in_number(" ", 0)
        return self._drain()

    def _drain(self) -> str:
        out, self._out = self._out, []
        return "".join(out)

    def _space(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        end = found.end() if found is not None else at
        if end > at:
            self._out.append(text[at:end])
        return end

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    def _pass(self, char: str, state: str) -> None:
        self._out.append(char)
        self._state = state

    def _value_ended(self) -> None:
        self.done = not self._stack
        self._state = "comma"

    def _in_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in self.openers:
            return self._open(char, at)
        if char in self.quotes:
            return self._open_string(char, at, is_key=False)
        return self._begin_scalar(char, at)

    def _open(self, char: str, at: int) -> int:
        if len(self._stack) == MAX_NESTING:
            return self._break(at)
        self._stack.append(char)
        self._pass("[" if char in self.lists else "{", "first_item" if char in self.lists else "first_key")
        return at + 1

    def _close(self, at: int) -> int:
        self._out.append("]" if self._stack.pop() in self.lists else "}")
        self._value_ended()
        return at + 1

    def _open_string(self, char: str, at: int, *, is_key: bool) -> int:
        self._is_key, self._quote = is_key, char
        self._pass('"', "string")
        return at + 1

    def _begin_scalar(self, char: str, at: int) -> int:
        if char in _WORDS:
            self._left = _WORDS[char][1:]
            self._pass(char, "word")
        elif char == "-" or char in "0123456789":
            self._left = "-" if char == "-" else _CLASS[char]
            self._pass(char, "number")
        else:
            return self._break(at)
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return self._break(at)
        self._out.append(text[at])
        self._left = self._left[1:]
        if not self._left:
            self._value_ended()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        follows = _NUMBER[self._left].get(_CLASS.get(text[at], ""))
        if follows is not None:
            self._left = follows
            self._out.append(text[at])
            return at + 1
        if self._left in "01fx":
            self._value_ended()
            return at
        return self._break(at)

    def _in_first_item(self, text: str, at: int) -> int:
        if text[at] == self.openers[self._stack[-1]]:
            return self._close(at)
        self._state = "value"
        return at

    def _in_first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        self._state = "key"
        return at

    def _in_key(self, text: str, at: int) -> int:
        return self._open_string(text[at], at, is_key=True) if text[at] in self.quotes else self._break(at)

    def _in_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._break(at)
        self._pass(":", "value")
        return at + 1

    def _in_comma(self, text: str, at: int) -> int:
        opener = self._stack[-1]
        if text[at] == self.openers[opener]:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        self._after_comma("value" if opener in self.lists else "key")
        return at + 1

    def _after_comma(self, state: str) -> None:
        self._pass(",", state)

    def _in_string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        end = found.end() if found is not None else at
        if end > at:
            self._out.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            return self._close_string(end)
        if char == "\\":
            self._pass(char, "escape")
        elif self._strict:
            return self._break(end)
        else:
            self._out.append(json.dumps(char)[1:-1])
        return end + 1

    def _close_string(self, at: int) -> int:
        self._out.append('"')
        if self._is_key:
            self._state = "colon"
        else:
            self._value_ended()
        return at + len(self._quote)

    def _in_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._left = "0000"
            self._pass("u", "hex")
        elif text[at] in '"\\/bfnrt':
            self._pass(text[at], "string")
        else:
            return self._break(at)
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._break(at)
        self._left = self._left[1:]
        self._pass(text[at], "hex" if self._left else "string")
        return at + 1


class ValueText:
    """A value's text as it arrives, read by and by, so that its end does not cost the time of all; white space around
    it means nothing. begin: its first character, in the end."""

    def __init__(self, scanner: JsonScanner) -> None:
        self.begin = ""
        self._scanner = scanner
        self._unread: list[str] = []
        self._length = 0
        self._out: list[str] = []

    def push(self, text: str) -> None:
        self._unread.append(text)
        self._length += len(text)
        if self._length >= _READ_AT_ONCE and not (self._scanner.done or self._scanner.broken):
            self._read()

    def _read(self) -> None:
        text = "".join(self._unread) if self.begin else "".join(self._unread).lstrip()
        self.begin = self.begin or text[:1]
        end, out = self._scanner.feed(text, 0)
        self._out.append(out)
        self._unread, self._length = [text[end:]], 0

    def finish(self) -> str | None:
        """Returns the whole value as JSON, None if the text is not one value."""
        self._scanner.text_ended = True
        self._read()
        if not self._scanner.done and not self._scanner.broken:
            self._out.append(self._scanner.end())
        return "".join(self._out) if self._scanner.done and not self._unread[0].strip() else None

    def mend(self, close: Callable[[], str]) -> str:
        """Returns what was read as JSON. close: returns what is missing."""
        self._scanner.text_ended = True
        self._read()
        return "".join([*self._out, "" if self._scanner.done else close()])


def scanned(source: TextSource, scanner: JsonScanner, emit: Emit, *, as_written: bool = False) -> Steps[bool]:
    """Reads a value and emits it as it arrives: as JSON or as it is written. Returns whether it was read whole."""
    while True:
        scanner.text_ended = source.ended
        end, out = scanner.feed(source.text, source.at)
        is_last = source.ended and not scanner.done and not scanner.broken
        piece = source.take(len(source.text) if is_last else end)
        if is_last:
            out += scanner.end()
        if piece or out:
            yield from emit(piece if as_written else out)
        if scanner.done or scanner.broken or source.ended:
            return scanner.done
        yield None


def into(pieces: list[str]) -> Emit:
    """Returns what emits nothing and adds the text to `pieces`."""

    def emit(text: str) -> Iterator[OutputEvent]:
        pieces.append(text)
        return iter(())

    return emit


def nowhere(text: str) -> Iterator[OutputEvent]:
    """Emits nothing."""
    return iter(())
