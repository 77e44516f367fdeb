"""CallEnds: what ends a call of a format. CallScanner: reads what stands in a call, also a text that no quote ends.

Valid JSON has any mark inside its texts. So a mark in a text ends the call only if the next quote cannot end that text,
or if there is none; what follows the mark is held back until that is known.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from tandem.workers.text.output.python_stream import PythonScanner
from tandem.workers.text.output.stepping import Marks

SPACE: Final = r"\s{0,40}"
_SOME_SPACE: Final = re.compile(SPACE)
OBJECT: Final = (SPACE, r"\{", SPACE, "[\"']")
"""The begin of a call's object, as steps."""
_RUN: Final = r"[\s}\])]{0,40}"
"""Closing brackets and white space in front of a mark, which belong to the call if its brackets are closed by them."""
_AHEAD: Final = 200
"""Characters behind a quote that say whether it ends a string."""
_LONGEST_COMMENT: Final = 200
FAR: Final = 16 * 1024
"""Characters behind a mark within which the quote, or the tag, that ends the text is looked for. They are held back,
so all of them may have to be read at once."""
_QUOTE_OR_ESCAPE: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'`"}
_TO_QUOTE: Final = {
    '"': re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL),
    "'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL),
    "`": re.compile(r"[^`\\]*(?:\\.[^`\\]*)*", re.DOTALL),
    '"""': re.compile(r'[^"\\]*(?:(?:\\.|"(?!""|"?\Z))[^"\\]*)*', re.DOTALL),
    "'''": re.compile(r"[^'\\]*(?:(?:\\.|'(?!''|'?\Z))[^'\\]*)*", re.DOTALL),
}
_BEHIND_STRING: Final = re.compile(r"\s*(?:(?P<closer>[,}\])])|(?P<colon>:)|(?P<mark><)|(?P<open>\Z))")


class CallEnds:
    """The ends of a call. ends: its end marks; begins: marks that begin another, and separators: those between two
    calls, each with what follows it, as regular expressions one after the other; closers: what closes the call behind
    its arguments. A separator counts only where they stand in front of it."""

    def __init__(
        self,
        ends: Sequence[str] = (),
        begins: Mapping[str, Sequence[str]] = {},
        separators: Mapping[str, Sequence[str]] = {},
        closers: str = "",
    ) -> None:
        self.closers, self._begins, self._separators = closers, begins, separators
        self._behind = {
            **{mark: re.compile("") for mark in ends},
            **{mark: re.compile(_step_by_step(steps)) for mark, steps in (*begins.items(), *separators.items())},
        }
        self._marks = marks = (*ends, *begins)
        self.inside = {
            **{end: Marks(end, *marks) for end in ("\n", "*/")},
            **{quote: Marks(quote, "\\", *marks) for quote in ("'", '"')},
        }
        """Marks to look for in a comment, or a text of an expression, by what ends it."""
        any_mark = "|".join(map(re.escape, marks)) or "(?!)"
        between = f"|(?<=[}}\\])\\s])[{re.escape(''.join(separators))}]" if separators else ""
        self._found = re.compile(f"({_RUN})({any_mark}{between})")
        begun = "|".join(_begun(mark) for mark in marks if len(mark) > 1) or "(?!)"
        self._tail = re.compile(f"({_RUN})(?:{begun})?\\Z")
        self._longest = max(map(len, marks), default=0) + 40
        self._followed = re.compile(f"\\s*(?:\\Z|{any_mark})")

    def first(self, text: str, at: int, stop: int) -> re.Match[str] | None:
        """Finds the first mark, with the run in front of it."""
        return self._found.search(text, at, stop)

    def tail(self, text: str, at: int) -> re.Match[str]:
        """Finds where the text ends in a run or in the begin of a mark."""
        found = self._tail.search(text, max(at, len(text) - self._longest))
        assert found is not None
        return found

    def mark_at(self, text: str, at: int) -> bool | None:
        """Returns whether a mark stands there; None where the text ends in what may be one."""
        rest = text[at : at + self._longest]
        if rest.startswith(self._marks):
            return True
        return None if any(mark.startswith(rest) for mark in self._marks) else False

    def behind_comment(self, text: str, at: int, closers: str = "", *, is_all: bool) -> int | None:
        """Returns the index behind the comment that begins there, `at` if it is none, None if that cannot be said yet.
        It is none if the call ends first, or behind its line, or if it is longer than 200 characters. closers: what
        closes all that is open; is_all: no more text will come."""
        end = "*/" if text.startswith("/*", at) else "\n"
        found = text.find(end, at + len(end), at + _LONGEST_COMMENT)
        if found < 0:
            return at if is_all or len(text) - at >= _LONGEST_COMMENT else None
        first = self.inside[end].first(text, at + len(end))
        if first is None or first.start() < found:
            return at
        if end == "*/":
            return found + len(end)
        space = _SOME_SPACE.match(text, found)
        assert space is not None
        if closers and self._closes_all(text[at:found], closers, text[space.end() : space.end() + 1]):
            return at
        mark = False if space.end() == len(text) else self.mark_at(text, space.end())
        if is_all:
            return at if mark or space.end() == len(text) else found
        return None if mark is None or space.end() == len(text) else at if mark else found

    def _closes_all(self, line: str, closers: str, follows: str) -> bool:
        """Returns whether a line closes the arguments, and what follows it, or the line too, the call."""
        closed = re.sub(r"[\s,;]", "", line)
        if closed.count("}") <= closed.count("{"):
            return False
        if closed.rstrip("]").endswith(closers + self.closers):
            return True
        return closed.endswith(closers) and follows in self.closers

    def behind(self, mark: str, text: str, at: int, *, whole: bool) -> bool | None:
        """Returns whether what must follow a mark does; None if the text ends before that is known. whole: all brackets
        are closed in front of it."""
        if mark in self._separators and not whole:
            return False
        found = self._behind[mark].match(text, at)
        if found is None:
            return False
        return True if "all" not in found.groupdict() or found.group("all") is not None else None

    def is_sure(self, mark: str, text: str, at: int) -> bool:
        """Returns whether a mark ends the call wherever it stands: another call begins there, or the text ends."""
        if mark in self._begins:
            return self.behind(mark, text, at, whole=False) is True
        return self._followed.match(text, at) is not None


NO_ENDS: Final = CallEnds()


class CallScanner(PythonScanner):
    """Reads a literal in a call. A string that no quote ends breaks it where the call ends."""

    def __init__(self, ends: CallEnds = NO_ENDS, *, inside_object: bool = False, strict: bool = False) -> None:
        super().__init__(inside_object=inside_object, strict=strict)
        self._ends = ends
        self._passed = self._shift = 0
        """Characters of earlier texts; what makes an index in this one a count of all."""
        self._known = self._looked = 0
        """Counts of all characters that are known to belong to a string, and that were looked through for its quote."""
        self._plain = 0
        """The count up to which no quote and no backslash stands in a string, from where it was asked for."""

    def feed(self, text: str, at: int) -> tuple[int, str]:
        self._shift = self._passed - at
        end, out = super().feed(text, at)
        self._passed += end - at
        return end, out

    def _string_until(self, text: str, at: int) -> int:
        if self._known <= at + self._shift:
            until = self._known_text(text, at)
            if until is None:
                return self._break(at + self._own_closers(text, at))
            self._known = until + self._shift
        return self._known - self._shift

    def _known_text(self, text: str, at: int) -> int | None:
        """Returns the index up to which a string goes on for certain, `at` if more text must tell, None if the call
        ends here."""
        stop = self._next_stop(text, at)
        found = self._ends.first(text, at, stop)
        if found is not None:
            return found.start() if found.start() > at else self._at_mark(text, found)
        if stop < len(text):
            return stop + 1
        tail = self._ends.tail(text, at)
        return len(text) if self.text_ended and not self._is_closed(tail.group(1)) else tail.start()

    def _next_stop(self, text: str, at: int) -> int:
        """Returns the index of the next quote or backslash, which ends what can be a mark; that of the end if there is
        none."""
        quote = self._quote[0]
        if not text.startswith((quote, "\\"), start := max(at, self._plain - self._shift)):
            found = _QUOTE_OR_ESCAPE[quote].search(text, start)
            start = len(text) if found is None else found.start()
        self._plain = start + self._shift
        return start

    def _at_mark(self, text: str, found: re.Match[str]) -> int | None:
        at, behind = found.start(), found.end()
        run, mark = found.groups()
        whole, closed = self._closes(run, self._ends.closers), self._is_closed(run)
        follows = self._ends.behind(mark, text, behind, whole=whole)
        if follows is False:
            return behind
        quote = self._next_quote(text, behind)
        if quote is not None and quote >= 0:
            past = quote + len(self._quote)
            proper = self._quote_ends(text[past : past + _AHEAD])
            if proper or (proper is None and self.text_ended):
                return past
            quote = None if proper is None else quote
        if not self.text_ended and (quote is None or follows is None):
            return at
        if not closed and "\n" not in run and not self._ends.is_sure(mark, text, behind):
            return behind
        kept = "" if closed else run.rstrip()
        return at + len(kept) if kept else None

    def _is_closed(self, run: str) -> bool:
        return self._closes(run) or self._closes(run, self._ends.closers)

    def _closes(self, run: str, call: str = "") -> bool:
        """Returns whether a run closes all that is open. call: what closes the call."""
        closers = self._closers() + call
        return bool(closers) and "".join(run.split()).startswith(closers)

    def _own_closers(self, text: str, at: int) -> int:
        """Returns how many characters from there on close what is open."""
        found = re.compile(r"\s*".join(["", *map(re.escape, self._closers())])).match(text, at)
        return 0 if found is None else found.end() - at

    def _closers(self) -> str:
        return "".join(self.openers[opener] for opener in reversed(self._stack))

    def _next_quote(self, text: str, at: int) -> int | None:
        """Returns the index of the next quote that is not escaped, -1 if there is none, None if one may come."""
        start = max(at, self._looked - self._shift)
        found = _TO_QUOTE[self._quote].match(text, start)
        end = start if found is None else found.end()
        self._looked = end + self._shift
        if end - at > FAR:
            return -1
        if text.startswith(self._quote, end):
            return end
        return -1 if self.text_ended else None

    def _quote_ends(self, ahead: str) -> bool | None:
        """Returns whether a quote ends a string where this stands behind it, None if that cannot be said yet."""
        found = _BEHIND_STRING.match(ahead)
        if found is None:
            return False
        if found.group("open") is not None:
            return None if len(ahead) < _AHEAD else True
        if found.group("mark") is not None:
            return not self._stack
        return found.group("colon" if self._is_key else "closer") is not None


def _step_by_step(steps: Sequence[str]) -> str:
    """Returns the pattern of steps, of which a text that ends may lack the last ones; then `all` matches nothing."""
    pattern = "(?P<all>)"
    for step in reversed(steps):
        pattern = f"(?:\\Z|{step}{pattern})"
    return pattern


def _begun(mark: str) -> str:
    """Returns the pattern of the beginnings of a mark."""
    pattern = ""
    for char in reversed(mark[:-1]):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern
