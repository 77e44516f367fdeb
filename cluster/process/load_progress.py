"""The progress line of weight loading on the user's terminal: drawn over itself, gone when all is loaded.

Nothing is written where standard error is no terminal. The cursor rests at the line's begin, so a terminal's ^C lies on
the line and goes with it.
"""

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from tqdm import tqdm

MOST_COLUMNS = 100


class LoadProgress:
    """One line on `screen`, by default standard error. The launcher's Console owns it."""

    def __init__(self, screen: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = sys.stderr if screen is None else screen
        self._clock = clock
        self._begun: tuple[float, int] | None = None
        self._news: tuple[int, int, int] | None = None
        self._shown = ""

    def show(self, loaded_bytes: int, total_bytes: int) -> None:
        """Draws the line if it has changed or a second has passed; clears it once all is loaded. No total: 0, 0."""
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
        """Leaves the line empty."""
        if self._shown:
            self._draw("")
            self._news = None

    def _draw(self, text: str) -> None:
        _write(self._screen, text.ljust(len(self._shown)))
        self._shown = text

    def _text(self, loaded_bytes: int, total_bytes: int, initial: int, elapsed_s: float) -> str:
        """The line. initial: bytes that were loaded before the clock started."""
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
    """Empties the line that another process may have left when it was killed."""
    screen = sys.stderr if screen is None else screen
    if screen.isatty():
        _write(screen, " " * _columns())


def _columns() -> int:
    """Width of the line; the last column would take the cursor to the next line."""
    return min(shutil.get_terminal_size().columns - 1, MOST_COLUMNS)


def _write(screen: TextIO, text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        screen.write(f"\r{text}\r")
        screen.flush()
