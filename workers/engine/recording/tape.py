"""Tape: the last bytes of a recording, in memory: a ring of segments, each of which can be replayed by itself.

    segment: state of the engine at its beginning | length, call | length, call | ...

A segment ends when its calls fill a part of the tape, or as many bytes as its own state has if that is more; the oldest
of PARTS then goes, and its memory is used again. All of it is taken, and touched, at the beginning: the first touch of
a page takes longer than a step's record. Written by the engine's thread; take() may be called from any other.
"""

import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

PARTS = 4
"""Segments of a full tape: as large a part of it is lost at once."""
SLACK_BYTES, PAGE_BYTES, PIECE_BYTES = 2**16, 4096, 2**20
LENGTH = struct.Struct("<I")


@dataclass(slots=True, eq=False)
class _Segment:
    """calls: the buffer, of which num_bytes are written."""

    state: bytes
    is_whole: bool
    calls: bytearray
    num_bytes: int = 0


class TapeCopy(NamedTuple):
    """The content of a tape: the state of the engine at the beginning, and each call since, encoded. is_whole: that is
    the engine's own beginning."""

    state: bytes
    calls: list[bytes]
    is_whole: bool


@dataclass(slots=True, eq=False)
class Tape:
    """A tape of max_bytes for calls. The states of its segments come on top of it: a few hundred bytes for each
    unfinished sequence, and some 60 for each KV block (docs/serving/recorder.md)."""

    max_bytes: int
    num_segments: int = 0
    is_off: bool = False
    state_bytes: int = 0  # of the last segment's state
    _segments: deque[_Segment] = field(default_factory=deque)
    _free: list[bytearray] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of the list of segments, not of the last one

    def __post_init__(self) -> None:
        self._free = [_touched(self.max_bytes // PARTS + SLACK_BYTES) for _ in range(PARTS)]

    @property
    def is_due(self) -> bool:
        """True if the next call begins a new segment: begin() is called with the engine's state."""
        if not self._segments:
            return not self.is_off
        last = self._segments[-1]
        return last.num_bytes >= self.max_bytes // PARTS and last.num_bytes >= len(last.state)

    def begin(self, state: bytes) -> None:
        """Begins a segment, in the place of the oldest if there are PARTS."""
        is_whole = not self.num_segments
        with self._lock:
            if not self._free:
                self._free.append(self._segments.popleft().calls)
            buffer = self._free.pop()
            self._segments.append(_Segment(state, is_whole, buffer))
        self.num_segments += 1
        self.state_bytes = len(state)

    def switch_off(self) -> None:
        """Forgets all, and takes nothing more."""
        with self._lock:
            self.is_off = True
            self._segments.clear()
            self._free.clear()

    def append(self, call: bytearray) -> None:
        """Adds a call to the last segment."""
        last = self._segments[-1]
        begin = last.num_bytes + LENGTH.size
        end = begin + len(call)
        if end > len(last.calls):
            last.calls.extend(bytes(end - len(last.calls)))
        LENGTH.pack_into(last.calls, last.num_bytes, len(call))
        last.calls[begin:end] = call
        last.num_bytes = end

    def take(self, most_bytes: int | None = None) -> TapeCopy | None:
        """Returns what it holds now, None before the engine's first call. What it holds stays. most_bytes: of the
        calls, where the last two segments are not more."""
        with self._lock:
            segments = list(self._segments)
            while most_bytes is not None and len(segments) > 2 and _num_bytes(segments) > most_bytes:
                del segments[0]
            parts = [(one, _copied(one)) for one in segments]
        if not parts:
            return None
        first = parts[0][0]
        calls: list[bytes] = []
        while parts:
            calls += calls_of(parts.pop(0)[1])  # each part goes once it is read
        return TapeCopy(first.state, calls, first.is_whole)


def _touched(num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    buffer[::PAGE_BYTES] = b"\1" * len(range(0, num_bytes, PAGE_BYTES))
    return buffer


def _copied(segment: _Segment) -> bytearray:
    """Returns the calls of a segment up to now, in pieces between which the engine's thread may run."""
    copy, end = bytearray(), segment.num_bytes
    while len(copy) < end:
        copy += segment.calls[len(copy) : min(end, len(copy) + PIECE_BYTES)]
    return copy


def _num_bytes(segments: list[_Segment]) -> int:
    return sum(one.num_bytes for one in segments)


def calls_of(part: bytearray) -> list[bytes]:
    """Returns the calls of a segment."""
    calls, place = [], 0
    while place < len(part):
        (length,) = LENGTH.unpack_from(part, place)
        place += LENGTH.size + length
        calls.append(bytes(part[place - length : place]))
    return calls
