"""Files of recordings: written whole or not at all, at most KEPT of them in a folder.

    file: magic 16 | length u32, record | ...      (little-endian) record: the header, the state, each call

Nothing here raises for a disk that is full: the group goes on without the file, and a log line says why there is none.
"""

import math
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.configs.errors import TandemError
from tandem.workers.engine.recording.call_records import FORMAT, CallRecord, RecordingHeader

MAGIC = b"tandem recording"
SUFFIX, TEMPORARY = ".recording", ".recording.tmp"
KEPT = 8
"""Recordings in a folder; older ones are removed for a new one."""
ABANDONED_S = 600.0
_LENGTH = struct.Struct("<I")


class RecordingError(TandemError):
    """A recording that cannot be written, read or replayed."""


class Recording(NamedTuple):
    """A file's content."""

    header: RecordingHeader
    state: bytes
    calls: list[CallRecord]


def write_recording(path: Path, header: RecordingHeader, state: bytes, calls: Iterable[bytes]) -> int:
    """Writes a file that only this user can read, and returns its bytes. RecordingError, with no file left, when it
    cannot be written. Removes the oldest of more than KEPT."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        _remove_old(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=2**20) as file:
            file.write(MAGIC)
            for record in (msgspec.msgpack.encode(header), state, *calls):
                file.write(_LENGTH.pack(len(record)))
                file.write(record)
            num_bytes = file.tell()
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise RecordingError(f"the recording {path} cannot be written: {error.strerror or error}") from None
    return num_bytes


def _remove_old(folder: Path) -> None:
    """Removes what a process that died has left half written, and the oldest recordings. Other groups do so too."""
    for left in folder.glob(f"*{TEMPORARY}"):
        if time.time() - (_written_s(left) or math.inf) > ABANDONED_S:
            left.unlink(missing_ok=True)
    written = ((_written_s(path), path) for path in folder.glob(f"*{SUFFIX}"))
    there = sorted((at_s, path) for at_s, path in written if at_s is not None)
    for _, old in there[: max(0, len(there) - KEPT + 1)]:
        old.unlink(missing_ok=True)


def _written_s(path: Path) -> float | None:
    """Returns when a file was written; None if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def read_recording(path: Path) -> Recording:
    """Reads a file. RecordingError if it is none, is cut short, or has another format."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    if data[: len(MAGIC)] != MAGIC:
        raise RecordingError(f"{path} is no recording")
    try:
        records = _records(data[len(MAGIC) :])
        read_header, state = _header(path, next(records)), next(records)
        calls = list(records)
        if read_header.num_calls != len(calls):
            raise RecordingError(f"{path} is damaged: it has {len(calls)} of {read_header.num_calls} calls")
        decoder = msgspec.msgpack.Decoder(CallRecord)
        return Recording(read_header, bytes(state), [decoder.decode(call) for call in calls])
    except StopIteration:
        raise RecordingError(f"{path} is damaged: it ends before its first call") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordingError(f"{path} is damaged: {error}") from None


class _AnyHeader(msgspec.Struct):
    """Fields that headers of all formats have."""

    format: int
    product: str = "?"


def _header(path: Path, record: memoryview) -> RecordingHeader:
    """Reads a header. RecordingError for one of another format, whatever else it has."""
    found = msgspec.msgpack.decode(record, type=_AnyHeader)
    if found.format != FORMAT:
        wrote = f"{path} has format {found.format}, of Tandem {found.product}"
        raise RecordingError(f"{wrote}; this one, {version('tandem-serve')}, reads format {FORMAT}")
    return msgspec.msgpack.decode(record, type=RecordingHeader)


def _records(data: memoryview) -> Iterator[memoryview]:
    place = 0
    while place < len(data):
        if place + _LENGTH.size > len(data):
            raise ValueError("its last record is cut short")
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        if place > len(data):
            raise ValueError("its last record is cut short")
        yield data[place - length : place]
