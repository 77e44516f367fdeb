"""How far the weights are loaded, on the user's terminal: one line, drawn over itself, gone when all is loaded.

Used by the launcher (`Say`), told by serve_app.py. Nothing is written where standard error is no terminal. The cursor
rests at the line's begin, so what others write (a terminal's ^C) lies on it and goes with it.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from tqdm import tqdm

from cluster.coordination.registry import GroupRecord

MOST_COLUMNS = 100


class LoadingLine:
    """show() draws when there is something new to see, and each second; clear() leaves the line empty. `screen`:
    standard error."""

    def __init__(self, screen: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = sys.stderr if screen is None else screen
        self._clock = clock
        self._begun: tuple[float, int] | None = None
        self._news: tuple[int, int, int] | None = None
        self._shown = ""

    def show(self, loaded_bytes: int, total_bytes: int) -> None:
        """Nothing is left to see once all is loaded, and before the total is known."""
        if loaded_bytes >= total_bytes:
            self.clear()
        elif self._screen.isatty():
            begun_s, initial = self._begun = self._begun or (self._clock(), loaded_bytes)
            elapsed_s = self._clock() - begun_s
            news = loaded_bytes, total_bytes, int(elapsed_s)
            if news != self._news:
                self._news = news
                self._draw(self._text(loaded_bytes, total_bytes, initial, elapsed_s))

    def clear(self) -> None:
        if self._shown:
            self._draw("")
            self._news = None

    def _draw(self, text: str) -> None:
        _write(self._screen, text.ljust(len(self._shown)))
        self._shown = text

    def _text(self, loaded_bytes: int, total_bytes: int, initial: int, elapsed_s: float) -> str:
        """initial: bytes that were loaded before the time began."""
        return tqdm.format_meter(
            loaded_bytes,
            total_bytes,
            elapsed_s,
            ncols=_columns(),
            prefix="tandem: loading weights",
            ascii=not (self._screen.encoding or "").lower().startswith("utf"),
            unit="B",
            unit_scale=True,
            initial=initial,
        )


def wipe(screen: TextIO | None = None) -> None:
    """Empties the line that a launcher has left when it was killed, if it left one."""
    screen = sys.stderr if screen is None else screen
    if screen.isatty():
        _write(screen, " " * _columns())


def bytes_of(records: Iterable[GroupRecord], groups: int) -> tuple[int, int]:
    """Loaded and to load, of all groups. Those that have not said yet, of `groups` in all, have as much to load as the
    others: they serve the same model, cut alike."""
    known = [record for record in records if record.total_bytes]
    most = max((record.total_bytes for record in known), default=0)
    missing = max(0, groups - len(known))
    return sum(r.loaded_bytes for r in known), sum(r.total_bytes for r in known) + missing * most


def _columns() -> int:
    """Never the last one, from which a terminal goes to the next line."""
    return min(shutil.get_terminal_size().columns - 1, MOST_COLUMNS)


def _write(screen: TextIO, text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        screen.write(f"\r{text}\r")
        screen.flush()
