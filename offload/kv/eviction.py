"""Eviction order of a tier's unpinned blocks: least recently used (LRU), or the cheapest to compute again.

host_tier.py adds the keys that may be evicted and removes them while they are pinned.
"""

import heapq
from collections import OrderedDict
from typing import Literal, Protocol

Policy = Literal["lru", "cost"]


class EvictionPolicy(Protocol):
    """An order over evictable keys."""

    def add(self, key: bytes, cost: float) -> None:
        """Makes a key evictable and counts a use. cost: of computing the block again, in any unit."""
        ...

    def remove(self, key: bytes) -> None:
        """Takes a key out while it is pinned; add or forget follows."""
        ...

    def forget(self, key: bytes) -> None:
        """Drops what is remembered of a removed key that will not be added again."""
        ...

    def victim(self) -> bytes | None:
        """Takes out and returns the key to evict next; None when there is none."""
        ...

    def __len__(self) -> int: ...


class LeastRecentlyUsed:
    """Evicts the key that was used longest ago."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes, cost: float) -> None:
        del cost
        self._keys[key] = None
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def forget(self, key: bytes) -> None:
        del key

    def victim(self) -> bytes | None:
        return self._keys.popitem(last=False)[0] if self._keys else None

    def __len__(self) -> int:
        return len(self._keys)


class GreedyDual:
    """Evicts the key of the least value, where value = value of the last evicted key + uses x cost.

    Blocks that are often used or costly stay, and unused ones age. GreedyDual-Frequency (Cherkasova 1998) for blocks of
    one size. Uses are remembered while a key is in the tier.
    """

    def __init__(self) -> None:
        self._inflation = 0.0
        self._values: dict[bytes, tuple[float, int]] = {}
        self._uses: dict[bytes, int] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._tick = 0

    def add(self, key: bytes, cost: float) -> None:
        self._uses[key] = uses = self._uses.get(key, 0) + 1
        self._tick += 1
        entry = (self._inflation + uses * cost, self._tick)
        self._values[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > 4 * len(self._values) + 64:
            self._heap = [(*value, key) for key, value in self._values.items()]
            heapq.heapify(self._heap)

    def remove(self, key: bytes) -> None:
        del self._values[key]

    def forget(self, key: bytes) -> None:
        del self._uses[key]

    def victim(self) -> bytes | None:
        while self._heap:
            value, tick, key = heapq.heappop(self._heap)
            if self._values.get(key) == (value, tick):
                self._inflation = value
                del self._values[key]
                del self._uses[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self._values)


def make_policy(name: Policy) -> EvictionPolicy:
    """Returns a new, empty policy."""
    return LeastRecentlyUsed() if name == "lru" else GreedyDual()
