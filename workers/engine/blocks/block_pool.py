"""Reference counts, free lists and content index of KV block ids on the device.

A block is in exactly one of four states. Invariants: their counts add up to num_blocks; ref(b) = uses of b.

    free --allocate--> referenced --last release--> pending --retire(step)--> free    (never published)
      ^                   ^   |                        |    `--------------> cached  (published: found by its key)
      |                   |   `--- no step names it ---'                        |
      `---- evicted ------+------------------------ acquire (prefix hit) -------'

A block whose last user released it stays `pending` while a plan in flight names it or a copy reads it (hold). A part of
the free and cached blocks is reserved: a count without ids, so that cached ones can be found until somebody needs them.
The block manager and the KV offload call it; it never touches KV bytes. Paged KV with reference counts is vLLM's
PagedAttention (Kwon et al. 2023); eviction is least recently used, unpublished blocks first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from tandem.workers.engine.blocks.kv_journal import KeyWatch


class BlockPool:
    """States of block ids 0..num_blocks-1. Every operation is O(1) for each block. watch: hears of keys that enter the
    index or leave it."""

    def __init__(self, num_blocks: int, watch: KeyWatch | None = None) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self._watch = watch
        self.num_blocks = num_blocks
        self.num_pending = 0
        self.num_reserved = 0
        self.done_step = 0
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._named_until = [0] * num_blocks
        self._pending = [False] * num_blocks
        self._holds: dict[int, int] = {}
        self._pending_by_step: dict[int, list[int]] = {}

    # ---- queries ----

    @property
    def num_allocatable(self) -> int:
        """Blocks that anybody may take or reserve now: free ones, then cached ones by eviction, less the reserved."""
        return len(self._free) + len(self._cached) - self.num_reserved

    @property
    def num_cached(self) -> int:
        """Blocks without a user that a prefix hit can find."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that have a user, or that a plan in flight or a copy still needs."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that copies to another tier read now."""
        return len(self._holds)

    def lookup(self, key: bytes) -> int | None:
        """Returns the block that holds this content, with or without users; None if there is none."""
        return self._index.get(key)

    def block_of(self, key: bytes) -> int:
        """Returns the block that lookup() finds."""
        return self._index[key]

    def num_users(self, block_id: int) -> int:
        """Returns how many references the block has."""
        return self._refs[block_id]

    def is_idle(self, block_id: int) -> bool:
        """Returns whether the block is free or cached: to acquire it lowers num_allocatable, which must allow it."""
        return self._refs[block_id] == 0 and not self._pending[block_id]

    def is_exclusive(self, block_id: int) -> bool:
        """Returns whether the block's user may write it: it has one user, no key and no copy that reads it."""
        return self._refs[block_id] == 1 and self._keys[block_id] is None and block_id not in self._holds

    # ---- commands ----

    def reserve(self, count: int) -> bool:
        """Keeps `count` more blocks for allocate(reserved=...), until unreserve(); returns False if fewer are left."""
        if count > self.num_allocatable:
            return False
        self.num_reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Gives up `count` reserved blocks."""
        self.num_reserved -= count

    def allocate(self, count: int, reserved: int = 0) -> list[int] | None:
        """Returns `count` blocks with one reference each, or None. Evicts cached blocks when no free one is left.

        reserved: how many of them were reserved before; these are always there.
        """
        free = self._free
        if count - reserved > len(free) + len(self._cached) - self.num_reserved:
            return None
        self.num_reserved -= reserved
        taken = [free.pop() if free else self._evict() for _ in range(count)]
        refs = self._refs
        for block_id in taken:
            refs[block_id] = 1
        return taken

    def acquire(self, block_id: int) -> None:
        """Adds a reference to a block that is referenced, or that has a key and is pending or cached."""
        if self._refs[block_id] == 0:
            assert self._keys[block_id] is not None, f"block {block_id} holds nothing that could be shared"
            if self._pending[block_id]:
                self._pending[block_id] = False
                self.num_pending -= 1
            else:
                del self._cached[block_id]
        self._refs[block_id] += 1

    def release(self, block_ids: Iterable[int], step_id: int) -> None:
        """Removes a reference from each block; plans up to step_id name it. Idle ones are evicted in this order."""
        refs, named = self._refs, self._named_until
        for block_id in block_ids:
            left = refs[block_id] - 1
            assert left >= 0, f"block {block_id} released more often than used"
            refs[block_id] = left
            if step_id > named[block_id]:
                named[block_id] = step_id
            if left == 0:
                self._retain_or_idle(block_id)

    def publish(self, block_id: int, key: bytes) -> None:
        """Enters a full, computed block into the index. Of two blocks with equal content the first stays in it."""
        assert self._refs[block_id] > 0, f"block {block_id} published without a user"
        if self._keys[block_id] is None and key not in self._index:
            self._keys[block_id] = key
            self._index[key] = block_id
            if self._watch is not None:
                self._watch.changed(key)

    def forget(self, block_id: int) -> None:
        """Removes a block from the index, because its content may be wrong; its users keep it."""
        key = self._keys[block_id]
        if key is not None:
            self._drop_key(block_id, key)
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def forget_unused(self) -> bool:
        """Removes all blocks without users from the index; returns whether it is empty now."""
        for key, block_id in list(self._index.items()):
            if self._refs[block_id] == 0:
                self._drop_key(block_id, key)
        self._free += self._cached
        self._cached.clear()
        return not self._index

    def hold(self, block_ids: Iterable[int]) -> None:
        """Protects blocks that a copy will read from writes and reuse until unhold(). They have users now."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0 or self._pending[block_id], f"block {block_id} held without a user"
            self._holds[block_id] = self._holds.get(block_id, 0) + 1

    def unhold(self, block_ids: Iterable[int]) -> None:
        """Ends the protection by hold(). Blocks that become idle are evicted in the given order."""
        for block_id in block_ids:
            left = self._holds[block_id] - 1
            if left:
                self._holds[block_id] = left
                continue
            del self._holds[block_id]
            if self._pending[block_id] and self._named_until[block_id] <= self.done_step:
                self._end_pending(block_id)

    def retire(self, step_id: int) -> None:
        """Notes that plan step_id has returned from every rank, in order; blocks that only it named become idle."""
        self.done_step = step_id
        for block_id in self._pending_by_step.pop(step_id, ()):
            if self._pending[block_id] and self._named_until[block_id] <= step_id and block_id not in self._holds:
                self._end_pending(block_id)

    # ---- inside ----

    def _retain_or_idle(self, block_id: int) -> None:
        until = self._named_until[block_id]
        if until <= self.done_step and block_id not in self._holds:
            self._make_idle(block_id)
            return
        self._pending[block_id] = True
        self.num_pending += 1
        if until > self.done_step:
            self._pending_by_step.setdefault(until, []).append(block_id)

    def _end_pending(self, block_id: int) -> None:
        self._pending[block_id] = False
        self.num_pending -= 1
        self._make_idle(block_id)

    def _make_idle(self, block_id: int) -> None:
        if self._keys[block_id] is None:
            self._free.append(block_id)
        else:
            self._cached[block_id] = None

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        key = self._keys[block_id]
        assert key is not None
        self._drop_key(block_id, key)
        return block_id

    def _drop_key(self, block_id: int, key: bytes) -> None:
        del self._index[key]
        self._keys[block_id] = None
        if self._watch is not None:
            self._watch.changed(key)

    # ---- invariants, for tests ----

    def check_invariants(self, uses: dict[int, int], holds: dict[int, int] | None = None) -> None:
        """Asserts the module's invariants, given the true number of uses and of copies of each block. O(num_blocks)."""
        assert self._holds == (holds or {}), "holds(b) is not its number of copies"
        free, cached = set(self._free), set(self._cached)
        pending = {block_id for block_id, waits in enumerate(self._pending) if waits}
        refs = {block_id: count for block_id, count in enumerate(self._refs) if count}
        keyed = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert refs == uses, "ref(b) is not its number of uses"
        total = len(free) + len(cached) + len(pending) + len(refs)
        assert total == self.num_blocks == len(free | cached | pending | refs.keys()), (
            "free + referenced + cached != total"
        )
        assert self.num_pending == len(pending)
        assert 0 <= self.num_reserved <= len(free) + len(cached), "more blocks are reserved than are idle"
        assert all(step_id > self.done_step for step_id in self._pending_by_step), "blocks wait for a step that is over"
        named_until = max(map(self._named_until.__getitem__, free | cached), default=self.done_step)
        assert named_until <= self.done_step, "a block is idle while a step names it"
        assert not self._holds.keys() & (free | cached), "a block is idle while a copy reads it"
        assert keyed == self._index, "the index is not where the keys are"
        assert len(keyed) == sum(key is not None for key in self._keys), "two blocks have one key"
        assert free.isdisjoint(keyed.values()) and cached <= set(keyed.values())
