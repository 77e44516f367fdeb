"""Files in --state-dir that hold a copy of durable state: of the tenants, and of each base model's adapters.

Called by map_copy.py, on threads. A file is its owner's only, is replaced whole, and is ignored with an error line when
it cannot be read: it must never keep a service from starting.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger("tandem.state")
T = TypeVar("T")
LOCK_WAIT_S = 2.0
LOCK_PERIOD_S = 0.01


def read_state(file: Path, kind: type[T]) -> T | None:
    """Reads what the file holds; None when there is none, or none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.error("%s cannot be read and is ignored: %s", file, error)
        return None


def write_state(file: Path, data: bytes) -> None:
    """Replaces the file at once, or logs why that cannot be done. Several processes may do so at a time."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    except OSError as error:
        log.error("%s cannot be written: %s", file, error)


def merge_state(file: Path, kind: type[T], merged: Callable[[T | None], T]) -> None:
    """Replaces what the file holds by what `merged` makes of it, when that is something else. Of several processes one
    at a time does so: none undoes what another has just written."""
    try:
        with _locked(file.with_name(f"{file.name}.lock")):
            before = read_state(file, kind)
            after = merged(before)
            if after != before:
                write_state(file, msgspec.json.encode(after))
    except OSError as error:
        log.error("%s cannot be locked: %s", file, error)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds the lock meanwhile; after some time goes on without it, since a process that is stopped may keep it for
    ever."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while not _takes(descriptor):
            if time.monotonic() >= deadline_s:
                log.warning("%s is held by another process: going on without it", file)
                break
            time.sleep(LOCK_PERIOD_S)
        yield
    finally:
        os.close(descriptor)


def _takes(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
