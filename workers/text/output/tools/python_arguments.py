"""PythonArguments: reads the argument of a call in Python, strings as ast.literal_eval() reads them."""

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from tandem.workers.text.output.argument_stream import ArgumentScanner, comments_around_comma

_PREFIX: Final = "[rRuUfF]{0,2}"
_BODIES: Final = (
    ("'''", r"(?:[^'\\]|\\.|'(?!''))*"),
    ('"""', r'(?:[^"\\]|\\.|"(?!""))*'),
    ("'", r"(?!'')(?:[^'\\]|\\.)*"),
    ('"', r'(?!"")(?:[^"\\]|\\.)*'),
)
_GAP: Final = r"(?:\s|\\\n|#[^\n]*\n)*"
_STRINGS: Final = "(?:" + _GAP + _PREFIX + "(?:" + "|".join(quote + body + quote for quote, body in _BODIES) + "))"
_OPEN: Final = "(?:" + "|".join(quote + body for quote, body in _BODIES) + r")\\?"
_JOINED: Final = re.compile(
    rf"{_STRINGS}{{1,3}}{_GAP}[,)\]}}+%.]|{_STRINGS}{{3}}{_GAP}{_PREFIX}['\"]"
    rf"|(?P<open>{_STRINGS}{{,3}}{_GAP}(?:#[^\n]*|\\|{_PREFIX}(?:{_OPEN})?)\Z)",
    re.DOTALL,
)
_NEXT: Final = re.compile(rf"{_GAP}({_PREFIX})(['\"])")
_AHEAD: Final = 200


class PythonArguments(ArgumentScanner):
    """Strings one behind the other are one."""

    comments: ClassVar[tuple[str, ...]] = ("#",)
    comments_ahead = comments_around_comma(r"#.*\n")
    unescaped = ""
    _open_at_break: Sequence[str] = ()

    def rest(self, before: str) -> "PythonArguments":
        """Returns what reads the rest of an argument, up to a comma or a bracket behind it, and says nothing. before:
        the word that stands before it."""
        rest = PythonArguments(self._ends)
        rest._begin_word(drops=True)
        rest._left, rest._nested = before, list(self._open_at_break)
        return rest

    def _break(self, at: int) -> int:
        if self._state != "string":  # one that is not closed ends with the call
            self._open_at_break = [self.openers[opener] for opener in self._stack]
        return super()._break(at)

    def _quote_ends(self, ahead: str) -> bool | None:
        ends = super()._quote_ends(ahead)
        return self._joins(ahead) if ends is False and not self._is_key else ends

    def _joins(self, ahead: str) -> bool | None:
        """Returns whether the next string follows, None if that cannot be said yet."""
        found = _JOINED.match(ahead)
        if found is None:
            return False
        if found.group("open") is None:
            return True
        return _NEXT.match(ahead) is not None if len(ahead) == _AHEAD or self.text_ended else None

    def _string_ended(self, ahead: str) -> int:
        follows = _NEXT.match(ahead)
        if follows is None or super()._quote_ends(ahead) is not False:
            return super()._string_ended(ahead)
        self._quote, self._raw, self._state = follows.group(2), "r" in follows.group(1).lower(), "opened"
        return follows.end()
