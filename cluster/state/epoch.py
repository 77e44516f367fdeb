"""Epoch: how a reader learns that Redis has lost what it held, or is an older copy of itself. Pure.

Every collection of durable state has one of its own: the fleet, the tenants, each list of adapters, the usage rows.
"""

from enum import Enum
from typing import NamedTuple


class Change(Enum):
    """The fate of the data since an epoch was seen. LOST: all of it was lost, what is there now was written
    since. OLDER: the latest writes are missing, as after a restart from an older snapshot."""

    SAME = "same"
    NEWER = "newer"
    OLDER = "older"
    LOST = "lost"


class Epoch(NamedTuple):
    """One state of a collection. id: random, written with the first of its data; None: there is none. counter: raised
    with every durable write; 0: nothing was ever written, or the collection counts nothing."""

    id: str | None
    counter: int = 0

    @classmethod
    def of(cls, id: object, counter: object = None) -> "Epoch":
        """The epoch from two answers of Redis, each None where there is no such key."""
        return cls(id.decode() if isinstance(id, bytes) else None, int(counter) if isinstance(counter, bytes) else 0)

    def since(self, known: "Epoch | None") -> Change:
        """The change from `known` to this one. A reader that knew no data (None, or without an id) lost none."""
        if known is None or known.id is None:
            return Change.SAME if self == known else Change.NEWER
        if self.id != known.id:
            return Change.LOST
        if self.counter == known.counter:
            return Change.SAME
        return Change.OLDER if self.counter < known.counter else Change.NEWER

    def is_behind(self, known: "Epoch | None") -> bool:
        """Something that was there at `known` is missing now."""
        return self.since(known) in (Change.LOST, Change.OLDER)
