"""Device memory for LoRA adapters as the coordinator sees it: equal pages, any of which will do, and slots.

Page and slot ids mean the same on every rank. What an adapter gives back is reused once no plan in flight names its
slot, as with blocks (block_pool.py). Called by the adapter pool; moves no bytes.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """Where an adapter lies: what plans call it, and its pages."""

    slot: int
    pages: list[int]


class AdapterMemory:
    """num_pages pages and as many slots, for even the smallest adapter takes a page; the least free slot goes first, so
    that the ranks' tables stay short."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_pages))
        self._pending: deque[tuple[int, Place]] = deque()
        self._done_step = 0

    # ---- queries ----

    @property
    def num_free(self) -> int:
        return len(self._free_pages)

    @property
    def num_pending(self) -> int:
        """Pages that plans in flight still name, free after them."""
        return sum(len(place.pages) for _, place in self._pending)

    # ---- commands ----

    def take(self, num_pages: int) -> Place | None:
        """A place of that many pages; None when fewer are free."""
        assert num_pages > 0, "an adapter takes a page"
        free = self._free_pages
        if num_pages > len(free):
            return None
        return Place(heapq.heappop(self._free_slots), sorted(free.pop() for _ in range(num_pages)))

    def give_back(self, place: Place, last_step: int) -> None:
        """Its adapter goes; last_step is the newest plan that names the slot."""
        if last_step <= self._done_step:
            self._free(place)
        else:
            self._pending.append((last_step, place))

    def retire(self, done_step: int) -> bool:
        """Plans up to done_step have returned from every rank. Whether that has freed anything."""
        self._done_step = done_step
        if not self._pending:
            return False
        due = [place for step, place in self._pending if step <= done_step]
        self._pending = deque(entry for entry in self._pending if entry[0] > done_step)
        for place in due:
            self._free(place)
        return bool(due)

    def _free(self, place: Place) -> None:
        self._free_pages.extend(reversed(place.pages))
        heapq.heappush(self._free_slots, place.slot)

    # ---- laws, for tests ----

    def check_laws(self, places: Iterable[Place]) -> None:
        """Asserts that free, pending and these places, which must be all that are taken, add up to everything once."""
        taken = [*places, *(place for _, place in self._pending)]
        pages = sorted([*self._free_pages, *(page for place in taken for page in place.pages)])
        slots = sorted([*self._free_slots, *(place.slot for place in taken)])
        assert pages == list(range(self.num_pages)), "free + pending + placed pages != all pages"
        assert slots == list(range(self.num_pages)), "free + pending + placed slots != all slots"
