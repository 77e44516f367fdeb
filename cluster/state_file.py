"""Files in --state-dir that hold a copy of durable state: of the tenants, and of each base model's adapters.

Called by cluster/tenants/directory.py and cluster/adapters/kept.py, on threads. A file is its owner's only, is replaced
whole, and is ignored with an error line when it cannot be read: it must never keep a service from starting.
"""

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger("tandem.state")
T = TypeVar("T")


def read_state(file: Path, kind: type[T]) -> T | None:
    """What the file holds; None when there is none, or none that can be read."""
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
