"""ArgumentScanner: reads the arguments of a call as models write them, and passes valid JSON on at once.

JSON is passed on as it is written. Python's literals and what models get wrong become JSON: see the class.
"""

import json
import re
from collections.abc import Iterator
from typing import ClassVar

from tandem.workers.text.output.bare_words import WordScanner, goes_on_behind
from tandem.workers.text.output.call_ends import NO_ENDS, CallEnds, CallScanner
from tandem.workers.text.output.events import OutputEvent
from tandem.workers.text.output.json_stream import ValueText, into, scanned
from tandem.workers.text.output.python_stream import HEX_DIGITS, STRING_STATES
from tandem.workers.text.output.stepping import Emit, Steps, TextSource

_BARE_KEY = re.compile(r"[\w$.-]*")
_LONGEST_BARE = 400
_LONGEST_NAME = 512
_LONGEST_WRITTEN = 2**20
"""Characters of arguments that are written into a string."""
_HIGH_SURROGATE = re.compile(r"(?:\A|[^\\])(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})\Z")
_SPACE = re.compile(r"[ \t\r\n]*")
_BEFORE_KEY = re.compile(r"[ \t\r\n]*([,;][ \t\r\n]*)?")
_KEY = re.compile(
    r'("(?:[^"\\\n]|\\.)*(?:"|(?P<open>\\?\Z))|'
    r"'(?:[^'\\\n]|\\.)*(?:'|(?P<left>\\?\Z))|[A-Za-z_$][\w$.-]*)[ \t\r\n]*((?P<colon>:)|\Z)"
)
"""A key and its colon, or the begin of one up to the end of the text."""
_BEFORE_COMMA = "]})<[`"
"""Characters that stand behind a string that is a value, beside a comma and white space: of JSON, Python, or a mark."""
_AHEAD = 200
"""Characters behind a quote that say whether it ends a string. So many of white space stand behind a value alone."""
_COMMENT = re.compile(r"\s*[,;]?\s*#.*")
_COMPUTES = "_+-*/%.|&^@=!>(#"
"""Characters behind a value that begin what is computed with it; letters and digits do too."""


def _ends_before_value(ahead: str) -> bool | None:
    """Returns whether a quote ends a string of a list, or of an object whose keys have no quotes, where this stands
    behind it; None if that cannot be said yet."""
    rest = ahead.lstrip(" \t\r\n")
    if not rest:
        return None if len(ahead) < _AHEAD else True
    return rest[0] == "," or rest[0] in _BEFORE_COMMA


def _ends_before_key(ahead: str) -> bool | None:
    """Returns whether a quote ends a string of an object, as above: behind it, a comma stands before a key; a comma may
    be forgotten, a comment may follow."""
    found = _BEFORE_KEY.match(ahead)
    assert found is not None
    space, rest, short = found.group(), ahead[found.end() :], len(ahead) < _AHEAD
    has_comma = found.group(1) is not None
    if rest in ("", "/", ".", "..", ")", "]"):
        return None if short else has_comma or not rest
    if rest[0] in ")]" and rest[1] in "\"'":  # a call or an item, of which the text speaks
        return False
    if rest[0] in ("}" if has_comma else _BEFORE_COMMA):
        return True
    if space and rest.startswith(("//", "/*", "...")):
        return True
    key = _KEY.match(rest)
    if key is None or (rest[0] not in "\"'" and not has_comma and "\n" not in space):
        return False
    return True if key.group("colon") else None if short else has_comma


def comments_around_comma(comment: str) -> re.Pattern[str]:
    """Returns a pattern of what stands between two values, with the comma as a group."""
    return re.compile(rf"(?:\s*{comment})*\s*([,;]?)(?:\s*{comment})*")


class ArgumentScanner(WordScanner):
    """Reads JSON and Python's literals. Beside these: a comma before a closing bracket; a word without quotes is a
    string, or a key; a quote inside a string that is not escaped, if more of the string follows; a backslash that
    escapes nothing; a value that is missing is null; a bracket closes those in it that were not closed; what is
    computed with a list, an object or a string is dropped.

    Where it breaks, or the text ends, close() makes what was passed on whole. So a key, or a comma, is held back up to
    the value behind it, and a parenthesis until it is known whether it has a comma in it, as a tuple has.
    """

    comments_ahead: ClassVar[re.Pattern[str]] = comments_around_comma(r"(?:#|//).*\n")
    spaced = (*WordScanner.spaced, "more_items", "more_keys")
    unescaped: ClassVar[str] = "1234567N"
    """Characters that a backslash escapes in Python only; elsewhere they are parts of regular expressions."""

    def __init__(self, ends: CallEnds = NO_ENDS, *, inside_object: bool = False) -> None:
        super().__init__(ends, inside_object=inside_object)
        self._has_bare_keys = False
        self._held: int | None = None
        """The index in `_out` from which it is held back."""
        self._groups: list[tuple[int, int]] = []
        """Parentheses without a comma yet: the number of open brackets, the index in `_out`."""

    def close(self) -> str:
        """Returns JSON text that ends a value that was not read whole."""
        if self._state in ("word", "quoted"):
            self._word_ended()
        elif self._state in STRING_STATES and not self._is_key:
            self._out.append('"')
        elif self._state == "value" and not self._stack:
            self._out.append("null")
        self._forget()
        self._groups.clear()
        self._out += ["]" if opener in self.lists else "}" for opener in reversed(self._stack)]
        self._stack, self.done = [], True
        return self._drain()

    def _drain(self) -> str:
        end = self._groups[0][1] if self._groups else self._held
        if end is None:
            return super()._drain()
        if not end:
            return ""
        ready, self._out = self._out[:end], self._out[end:]
        self._held = None if self._held is None else self._held - end
        self._groups = [(depth, index - end) for depth, index in self._groups]
        return "".join(ready)

    def _hold(self) -> None:
        self._held = len(self._out) if self._held is None else self._held

    def _let_go(self) -> None:
        self._held = None

    def _forget(self) -> None:
        if self._held is not None:
            del self._out[self._held :]
            self._held = None

    def _open(self, char: str, at: int) -> int:
        if char == "(":
            self._groups.append((len(self._stack) + 1, len(self._out)))
        return super()._open(char, at)

    def _close(self, at: int) -> int:
        is_group = self._in_group()
        if is_group:
            _, begin = self._groups.pop()
            is_group = any(self._out[index].strip() for index in range(begin + 1, len(self._out)))
            self._out[begin] = "" if is_group else "["
        at = super()._close(at)
        if is_group:
            self._out.pop()
        return at

    def _in_group(self) -> bool:
        return bool(self._groups) and self._groups[-1][0] == len(self._stack)

    def _in_value(self, text: str, at: int) -> int:
        char = text[at]
        is_end = char == "," or char in self.openers.values()
        if is_end and self._stack:
            return self._missing_value(char, at)
        if is_end or char in "<:;=":
            return self._break(at)
        template = char == "`" and self._ends.mark_at(text, at)
        if template is None and not self.text_ended:
            return at
        self._let_go()
        if char in self.quotes or (char == "`" and not template):
            return self._open_string(char, at, is_key=False)
        return self._open(char, at) if char in self.openers else self._begin_scalar(char, at)

    def _missing_value(self, char: str, at: int) -> int:
        if char == "," or self._stack[-1] not in self.lists:
            self._let_go()
            self._out.append("null")
        self._forget()
        self._state = "comma"
        return at

    def _in_comma(self, text: str, at: int) -> int:
        char = text[at]
        if char == "," or (char in self.quotes and self._stack[-1] not in self.lists):  # the comma may be forgotten
            if self._in_group():
                self._groups.pop()
            self._hold()
            self._pass(",", "more_items" if self._stack[-1] in self.lists else "more_keys")
            return at + (char == ",")
        if char.isalnum() or char in _COMPUTES:
            self._begin_word(drops=True)
            return at
        if all(self.openers[opener] != char for opener in self._stack):
            return self._break(at)
        while self.openers[self._stack[-1]] != char:
            self._close(at)
        return self._close(at)

    def _next(self, text: str, at: int, state: str) -> int:
        if text[at] in self.openers.values():
            self._forget()
            self._state = "comma"
        else:
            self._state = state
        return at

    def _in_key(self, text: str, at: int) -> int:
        if text[at] not in self.quotes and not (text[at].isalnum() or text[at] in "_$"):
            return self._break(at)
        self._hold()
        if text[at] in self.quotes:
            return self._open_string(text[at], at, is_key=True)
        self._left, self._state, self._has_bare_keys = "", "bare_key", True
        return at

    def _in_bare_key(self, text: str, at: int) -> int:
        found = _BARE_KEY.match(text, at, at + _LONGEST_BARE - len(self._left))
        end = found.end() if found is not None else at
        self._left += text[at:end]
        if end < len(text) or len(self._left) == _LONGEST_BARE:
            self._pass(json.dumps(self._left, ensure_ascii=False), "colon")
        return end

    def _in_colon(self, text: str, at: int) -> int:
        """A key without a value is dropped."""
        if text[at] not in ",}":
            return super()._in_colon(text, at)
        is_first = self._out[self._held] != "," if self._held is not None else False
        self._forget()
        self._state = "first_key" if is_first else "comma"
        return at + (is_first and text[at] == ",")

    def _close_string(self, at: int) -> int:
        if self._is_key:
            return super()._close_string(at)
        self._state = "behind_string"
        return at + len(self._quote)

    def _in_behind_string(self, text: str, at: int) -> int:
        """Decides whether a quote ends a string, by what stands behind it, which stays unread."""
        ahead = text[at : at + _AHEAD]
        ends = self._quote_ends(ahead)
        if ends or (ends is None and self.text_ended):
            return at + self._string_ended(ahead)
        if ends is not None:
            self._say(self._quote)
            self._state = "string"
        return at

    def _string_ended(self, ahead: str) -> int:
        """Says that the quote before `ahead` ends a string. Returns how much of that is read."""
        self._out.append('"')
        self._value_ended()
        return 0

    def _quote_ends(self, ahead: str) -> bool | None:
        if self._is_key:
            return super()._quote_ends(ahead)
        in_object = bool(self._stack) and self._stack[-1] not in self.lists and not self._has_bare_keys
        find = _ends_before_key if in_object else _ends_before_value
        ends, is_short = find(ahead), len(ahead) < _AHEAD and not self.text_ended
        if not ends and (found := self.comments_ahead.match(ahead)) is not None and "\n" in found.group():
            ahead = (found.group(1) + " " + ahead[found.end() :]).rjust(len(ahead))
            ends = find(ahead)
        if not ends and is_short and _COMMENT.fullmatch(ahead):
            return None
        return goes_on_behind(ahead, is_all=not is_short) if ends is False else ends

    def end(self) -> str:
        """A value on its own ends with the text."""
        if not self._stack and self._state == "behind_string":
            self._out.append('"')
            self._value_ended()
        return super().end()

    def _in_escape(self, text: str, at: int) -> int:
        char = text[at]
        if char in '"\\/bfnrt':
            self._pass("\\" + char, "string")
            return at + 1
        if char in self.unescaped:
            self._say("\\" + char)
            self._state = "string"
            return at + 1
        return super()._in_escape(text, at)

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            self._say("\\" + self._left)
            self._state = "string"
            return at
        self._left += text[at]
        if len(self._left) > HEX_DIGITS[self._left[0]]:
            code = int(self._left[1:], 16)
            if self._left[0] == "u":
                self._out.append("\\" + self._left)
            elif 0xD800 <= code < 0xE000:
                self._out.append(f"\\u{code:04x}")
            else:
                self._say(chr(code) if code <= 0x10FFFF else "\\" + self._left)
            self._state = "string"
        return at + 1


def argument_value(source: TextSource, emit: Emit, scanner: ArgumentScanner) -> Steps[bool]:
    """Reads a value and emits it as JSON, whole whatever becomes of it, unless the text is cut in it. Returns whether
    it was read whole; the rest is unread."""
    whole = yield from scanned(source, scanner, emit)
    if not scanner.done and not (source.cut and not scanner.broken):
        yield from emit(scanner.close())
    return whole


def written_object(source: TextSource, ends: CallEnds) -> Steps[tuple[bool, str | None]]:
    """Reads arguments that were written into a string. Returns whether there is one, and the object that it means, as
    JSON: {} for an empty string, None for others."""
    string, value, left = _StringScanner(ends, _LONGEST_WRITTEN), ValueText(ArgumentScanner()), ""
    skipped = 1  # the quote before it

    def emit(text: str) -> Iterator[OutputEvent]:
        nonlocal left, skipped
        text = left + text[skipped : -1 if string.done else None]
        skipped = 0
        split = _HIGH_SURROGATE.search(text)  # the other half of the character follows
        end = len(text) if split is None or string.done else split.start(1)
        value.push(json.loads(f'"{text[:end]}"'))
        left = text[end:]
        return iter(())

    if not (yield from scanned(source, string, emit)):
        return False, None
    whole = value.finish()
    return True, "{}" if not value.begin else whole if value.begin == "{" else None


def short_string(source: TextSource, ends: CallEnds, limit: int = _LONGEST_NAME) -> Steps[str | None]:
    """Reads a string of JSON or Python, a name, and returns its text, or None if there is none or it is longer."""
    pieces: list[str] = []
    if not (yield from scanned(source, _StringScanner(ends, limit), into(pieces))):
        return None
    return str(json.loads("".join(pieces)))


class _StringScanner(CallScanner):
    """Reads one string of at most `limit` characters and no other value; no white space before it."""

    def __init__(self, ends: CallEnds, limit: int) -> None:
        super().__init__(ends)
        self._room = limit

    def feed(self, text: str, at: int) -> tuple[int, str]:
        is_last = len(text) - at >= self._room
        self.text_ended = self.text_ended or is_last
        end, out = super().feed(text[at : at + self._room], 0)
        self._room -= end
        self.broken = self.broken or (is_last and not self.done)
        return at + end, out

    def _in_value(self, text: str, at: int) -> int:
        quote = text[at]
        return self._open_string(quote, at, is_key=False) if quote in self.quotes else self._break(at)

    def _quote_ends(self, ahead: str) -> bool | None:
        return ahead.lstrip().startswith(":") or super()._quote_ends(ahead)  # it may be a key
