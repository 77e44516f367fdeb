"""WordScanner: reads the values of a call that are no literals, such as names and expressions, and leaves comments out.

Nothing is evaluated: such a value is a text, as it was written.
"""

import re
from typing import ClassVar, Final

from tandem.workers.text.output.call_ends import NO_ENDS, CallEnds, CallScanner
from tandem.workers.text.output.json_stream import MAX_NESTING
from tandem.workers.text.output.python_stream import WORDS, as_number

_RUN: Final = re.compile(r"[^,\[\]{}()<\n\"'#/`]+")
_NO_JSON: Final = dict.fromkeys(("NaN", "Infinity", "+Infinity", "-Infinity", "undefined"), "null")
"""Words that JSON has no spelling for; null, as JSON.stringify() and pydantic write them."""
_LONGEST: Final = 400
"""Characters of a word that may be a number. As many white space end a word."""
_PREFIX: Final = re.compile("[uU]|[fF]?[rR]|[rR]?[fF]")
"""Prefixes of texts; bytes are none, and in formatted texts what stands in braces stays as it is."""
_OPERATORS: Final = "=+-*/%<>!&|^~@:([{,"
"""Characters behind which the line of an expression goes on, and a quote begins a text."""
_BEFORE_QUOTE: Final = re.compile(
    rf"(?:\A|[{re.escape(_OPERATORS)}]\s{{0,40}})(?:[bB][rR]?|[rR][bB]|[rRuUfF]{{1,2}})?\Z"
)
_NEAR: Final = 50
_GOES_ON: Final = re.compile(r",[ \t]{0,40}(?:[\w$][^:=,\n\"'\[\]{}()<`]{0,100}\s{0,40}(?:(?P<end>[,})<`])|\Z)|\Z)")
"""A comma inside a word: what stands behind it, up to the next comma or bracket, has no colon and so no value."""
_COMPARED: Final = " \n=<0123456789"
"""Characters behind a `<` that is no mark."""
_TEXT: Final = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_TRAILER: Final = r"(?:\.\w+|\([^()]*\)|\[[^\[\]]*\])"
_ATOM: Final = rf"(?:{_TEXT}|\w+|\([^()]*\)){_TRAILER}*"
_OPERATOR: Final = r"(?:\s*(?:\*\*|//|[-+*/%|&]|[=!<>]=|[<>])\s*|\s+(?:and|or|in|is|if|else|not in|is not)\s+)"
_COMPUTED: Final = re.compile(
    rf"(?:\.\w+\([^()]*\){_TRAILER}*|(?={_OPERATOR}))(?:{_OPERATOR}{_ATOM}){{,8}}\s*"
    rf"(?:,\s*(?:\w+\s*=[^=]|{_TEXT}\s*:)|,?\s*[)\]}}])"
)
"""Operations with a text, eight at most, up to the next argument or the end of them all."""
_MAY_COMPUTE: Final = re.compile(r"\s*(?:[-+*/%|&<>=!]|\.(?:\w|\Z)|(?:and|or|in|is|if)\s|[a-z]{0,3}\Z)")


def goes_on_behind(ahead: str, *, is_all: bool) -> bool | None:
    """Returns whether a quote ends a text because something is computed with that text, up to the end of the argument;
    None if that cannot be said yet. ahead: what stands behind the quote."""
    if _COMPUTED.match(ahead) is not None:
        return True
    return None if not is_all and _MAY_COMPUTE.match(ahead) is not None else False


class WordScanner(CallScanner):
    """Reads words up to a comma, a closing bracket or a line end, unless these stand in brackets or quotes. A comment
    is white space."""

    comments: ClassVar[tuple[str, ...]] = ("#", "//", "/*")

    def __init__(self, ends: CallEnds = NO_ENDS, *, inside_object: bool = False, strict: bool = False) -> None:
        super().__init__(ends, inside_object=inside_object, strict=strict)
        self._drops = self._says = False
        """Flags of what is read: it is dropped; the begin of it was said, so that it is no number."""
        self._nested: list[str] = []
        """Closing brackets of those that are open in the word."""

    def _space(self, text: str, at: int) -> int:
        while True:
            at = super()._space(text, at)
            end = self._comment_end(text, at)
            self._waiting = end is None
            if end is None or end == at:
                return at
            at = end

    def _comment_end(self, text: str, at: int) -> int | None:
        """Returns the index behind the comment that begins there, `at` if none does, None if more text must tell."""
        if at == len(text) or text[at] not in "#/":
            return at
        if text.startswith(self.comments, at):
            return self._ends.behind_comment(text, at, self._closers(), is_all=self.text_ended)
        is_begun = text[at] == "/" and at + 1 == len(text) and "//" in self.comments
        return None if is_begun and not self.text_ended else at

    def _begin_word(self, *, drops: bool = False) -> None:
        self._left, self._state, self._drops, self._says, self._nested = "", "word", drops, False, []

    def _begin_scalar(self, char: str, at: int) -> int:
        self._begin_word()
        return at

    def _in_word(self, text: str, at: int) -> int:
        found = _RUN.match(text, at)
        if found is not None:
            self._add(found.group())
            return found.end()
        char = text[at]
        if self._waits(text, at):
            return at
        if self._ends_word(text, at):
            self._word_ended()
            return at
        if char in self.quotes and not (self._drops or self._says) and _PREFIX.fullmatch(self._left):
            self._open_string(char, at, is_key=False)
            self._raw = "r" in self._left.lower()
            return at + 1
        if char in self.quotes and _BEFORE_QUOTE.search(self._left, max(len(self._left) - _NEAR, 0)):
            self._quote, self._state = char, "quoted"
        elif char in self.openers and len(self._nested) < MAX_NESTING:
            self._nested.append(self.openers[char])
        elif char in ")]}" and char in self._nested:
            while self._nested.pop() != char:
                pass
        self._add(char)
        return at + 1

    def _waits(self, text: str, at: int) -> bool:
        """Returns whether what stands there cannot be said before more text comes."""
        if text[at] == ",":
            return self._goes_on(text, at) is None
        if self.text_ended:
            return False
        if text[at] in "#/":
            return self._may_comment() and self._comment_end(text, at) is None
        return (text[at] == "<" and at + 1 == len(text)) or self._ends.mark_at(text, at) is None

    def _goes_on(self, text: str, at: int) -> bool | None:
        """Returns whether a word of an object, or an argument, goes on behind a comma, as `1,234` does:
        what follows is no entry. None if that cannot be said yet."""
        if self._nested or self._drops or (self._stack and self._stack[-1] in self.lists):
            return bool(self._nested)
        found = _GOES_ON.match(text, at)
        return False if found is None else None if found.group("end") is None else True

    def _may_comment(self) -> bool:
        return not self._nested and (not self._left or self._left[-1].isspace())

    def _ends_word(self, text: str, at: int) -> bool:
        char = text[at]
        if char in "<`[" and self._ends.mark_at(text, at):
            return True
        if char == "<" and text[at + 1 : at + 2] not in _COMPARED:
            return True
        if char in ")]}":
            return char not in self._nested
        if self._nested:
            return False
        if char in "#/":
            return self._may_comment() and self._comment_end(text, at) != at
        if char == ",":
            return not self._goes_on(text, at)
        return char == "\n" and self._last() not in _OPERATORS

    def _last(self) -> str:
        """Returns the last character that is no white space."""
        return self._left.rstrip()[-1:] or " "

    def _in_quoted(self, text: str, at: int) -> int:
        """Reads a text in an expression, which may have commas and brackets in it."""
        marks = self._ends.inside[self._quote]
        found = marks.first(text, at)
        end = found.start() if found is not None else len(text) if self.text_ended else marks.hold(text, at)
        mark = "" if found is None else found.group()
        if mark == "\\":
            end += 2 if end + 1 < len(text) else 0
        elif mark == self._quote:
            end += 1
            self._state = "word"
        self._add(text[at:end])
        if len(mark) > 1:
            self._word_ended()
        return end

    def _add(self, text: str) -> None:
        self._left += text
        if len(self._left) <= _LONGEST:
            return
        kept = self._left.rstrip()
        if len(self._left) - len(kept) >= _LONGEST and not self._nested and self._state == "word":
            self._word_ended()
            return
        self._say_word(max(len(kept) - 1, 0) if len(self._left) - len(kept) < _LONGEST else len(self._left) - 1)

    def _say_word(self, end: int) -> None:
        said, self._left = self._left[:end], self._left[end:]
        if self._drops:
            return
        if not self._says:
            self._out.append('"')
        self._says = True
        self._say(said)

    def _word_ended(self) -> None:
        word = self._left.strip()
        known = WORDS.get(word) or _NO_JSON.get(word) or as_number(word)
        if self._says or (known is None and not self._drops):
            self._say_word(len(self._left.rstrip()))
            self._out.append('"')
        elif not self._drops:
            self._out.append(str(known))
        if not self._drops:
            self._out.append(self._left[len(self._left.rstrip(" \t\r")) :])
        self._value_ended()
