"""KvJournal: which indexed keys a group has, and what of that has changed since gateways were told.

Keys are marked where their place in a chain is known: where blocks are published or found (BlockManager, KVOffload).
The pool and the tiers only say that something has changed with a key, which is one look into a dict for each block that
comes or goes. What has become of it is looked up when changes are taken, so that a block which is stored and evicted in
between is no change at all. Owned by the engine's thread. Next: workers/engine/thread/kv_teller.py, which sends.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from tandem.workers.messages.kv_events import HEAD_BYTES, KvEvents

MOST_CHANGES: Final = 65_536
"""Changed keys above which gateways get a snapshot in place of the changes."""
PART_KEYS: Final = 1024
"""Keys of one message of a snapshot, which holds the event loop of a gateway for about a millisecond."""


class KeyWatch(Protocol):
    """Hears of blocks that come to a tier or leave one."""

    def changed(self, key: bytes) -> None:
        """Called when a tier has begun or ceased to have the block of this key; also when nothing has changed."""
        ...


class KvPlace(IntEnum):
    """The nearest place of a block's KV."""

    NOWHERE = 0
    DEVICE = 1
    BELOW = 2


class KeyChanges(NamedTuple):
    """Heads of keys by what has become of them, as in KvEvents."""

    stored: list[bytes]
    kept: list[bytes]
    gone: list[bytes]


class KvJournal:
    """The indexed keys of one group. index_blocks: blocks between two of them."""

    def __init__(self, index_blocks: int) -> None:
        self.index_blocks = index_blocks
        self._told: dict[bytes, KvPlace] = {}
        self._touched: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._told)

    @property
    def has_changes(self) -> bool:
        """True if a key may have changed since take_changes()."""
        return bool(self._touched)

    def indexed(self, first: int, end: int) -> range:
        """Returns those of the places [first, end) of a chain whose keys are indexed."""
        every = self.index_blocks
        return range(first + -(first + 1) % every, end, every)

    def mark(self, key: bytes) -> None:
        """Notes the key of an indexed place, whose block some tier has or is about to get."""
        if key not in self._told:
            self._told[key] = KvPlace.NOWHERE
            self._touched.add(key)

    def changed(self, key: bytes) -> None:
        """Implements KeyWatch."""
        if key in self._told:
            self._touched.add(key)

    def take_changes(self, on_device: Callable[[bytes], bool], is_below: Callable[[bytes], bool]) -> KeyChanges | None:
        """Returns what has changed since the last call; None when that is more than MOST_CHANGES keys, and a snapshot
        is to be told."""
        changes = KeyChanges([], [], [])
        lists = {KvPlace.DEVICE: changes.stored, KvPlace.BELOW: changes.kept, KvPlace.NOWHERE: changes.gone}
        told, is_too_much = self._told, len(self._touched) > MOST_CHANGES
        for key in self._touched:
            before = told[key]
            now = KvPlace.DEVICE if on_device(key) else KvPlace.BELOW if is_below(key) else KvPlace.NOWHERE
            if now is not before:
                lists[now].append(key[:HEAD_BYTES])
            if now is KvPlace.NOWHERE:
                del told[key]
            else:
                told[key] = now
        self._touched.clear()
        return None if is_too_much else changes

    def snapshot(self, nonce: str) -> Iterator[KvEvents]:
        """Yields the parts of all that take_changes() has told, numbered from 1; at least one."""
        keys = list(self._told.items())
        for part, start in enumerate(range(0, max(1, len(keys)), PART_KEYS)):
            own = keys[start : start + PART_KEYS]
            yield KvEvents(
                nonce,
                part + 1,
                stored=[key[:HEAD_BYTES] for key, place in own if place is KvPlace.DEVICE],
                kept=[key[:HEAD_BYTES] for key, place in own if place is KvPlace.BELOW],
                is_snapshot=True,
                is_last=start + PART_KEYS >= len(keys),
            )
