"""The coordinator's bookkeeping of device memory for LoRA adapters: interchangeable pages of equal size, and slots.

Page and slot ids are the same on every rank. Pages of an evicted adapter are reused once no plan in flight names its
slot, as with blocks (block_pool.py). Called by the adapter cache; moves no bytes.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Allocation(NamedTuple):
    """Device memory of one adapter: the slot by which plans name it, and its pages."""

    slot: int
    pages: list[int]


class AdapterMemory:
    """num_pages pages and as many slots, for even the smallest adapter takes a page; the least free slot goes first, so
    that the ranks' tables stay short."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_pages))
        self._pending: deque[tuple[int, Allocation]] = deque()
        self.done_step = 0

    # ---- queries ----

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free_pages)

    @property
    def num_pending(self) -> int:
        """Pages that plans in flight still name, free after them."""
        return sum(len(allocation.pages) for _, allocation in self._pending)

    # ---- commands ----

    def take(self, num_pages: int) -> Allocation | None:
        """Returns an allocation of that many pages; None when fewer are free."""
        assert num_pages > 0, "an adapter takes a page"
        free = self._free_pages
        if num_pages > len(free):
            return None
        return Allocation(heapq.heappop(self._free_slots), sorted(free.pop() for _ in range(num_pages)))

    def give_back(self, allocation: Allocation, last_step: int) -> None:
        """Frees the pages of an adapter that is evicted; last_step is the newest plan that names the slot."""
        if last_step <= self.done_step:
            self._free(allocation)
        else:
            self._pending.append((last_step, allocation))

    def retire(self, done_step: int) -> bool:
        """Notes that plans up to done_step have returned from every rank; returns whether that has freed anything."""
        self.done_step = done_step
        if not self._pending:
            return False
        due = [allocation for step, allocation in self._pending if step <= done_step]
        self._pending = deque(entry for entry in self._pending if entry[0] > done_step)
        for allocation in due:
            self._free(allocation)
        return bool(due)

    def _free(self, allocation: Allocation) -> None:
        self._free_pages.extend(reversed(allocation.pages))
        heapq.heappush(self._free_slots, allocation.slot)

    # ---- invariants, for tests ----

    def check_invariants(self, allocations: Iterable[Allocation]) -> None:
        """Asserts that free, pending and these allocations, which must be all, add up to every page and slot once."""
        taken = [*allocations, *(allocation for _, allocation in self._pending)]
        pages = sorted([*self._free_pages, *(page for allocation in taken for page in allocation.pages)])
        slots = sorted([*self._free_slots, *(allocation.slot for allocation in taken)])
        assert pages == list(range(self.num_pages)), "free + pending + placed pages != all pages"
        assert slots == list(range(self.num_pages)), "free + pending + placed slots != all slots"
