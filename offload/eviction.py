"""Which of the unpinned blocks of a tier goes first: least recently used, or the cheapest to compute again.

Called by host_tier.py with the keys that may go; pinned ones are taken out meanwhile. Knows no slot, no bytes.
"""

import heapq
from collections import OrderedDict
from itertools import count
from typing import Literal, Protocol

Policy = Literal["lru", "cost"]


class EvictionPolicy(Protocol):
    """An order over keys."""

    def add(self, key: bytes, cost: float) -> None:
        """A key that may go from now on, used just now. cost: what computing it again costs, any unit."""
        ...

    def remove(self, key: bytes) -> None:
        """The key may not go for now; it is added again, or forgotten."""
        ...

    def forget(self, key: bytes) -> None:
        """A removed key that will not be added again."""
        ...

    def victim(self) -> bytes | None:
        """Takes out the key that goes first; None when there is none."""
        ...

    def __len__(self) -> int: ...


class LeastRecentlyUsed:
    """The key that was used longest ago."""

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
    """Value = what was evicted last + uses x cost: often used and dear blocks stay, unused ones age.

    GreedyDual-Frequency (Cherkasova 1998) for blocks of one size. Uses are remembered while a key is in the tier.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._values: dict[bytes, tuple[float, int]] = {}
        self._uses: dict[bytes, int] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._ticks = count()

    def add(self, key: bytes, cost: float) -> None:
        self._uses[key] = uses = self._uses.get(key, 0) + 1
        entry = (self._floor + uses * cost, next(self._ticks))
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
                self._floor = value
                del self._values[key]
                del self._uses[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self._values)


def make_policy(name: Policy) -> EvictionPolicy:
    """A fresh order."""
    return LeastRecentlyUsed() if name == "lru" else GreedyDual()
