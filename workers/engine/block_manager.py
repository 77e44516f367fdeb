"""Block tables of sequences over one pool: prefix hits, growth, fork, copy-on-write, commit, release.

A table lists the blocks of a sequence's leading tokens: token t is slot t % block_size of block_ids[t // block_size].
Only admitted sequences hold blocks; a waiting one holds none, so no set of waiting sequences can lock the pool.
Called by the scheduler and by whoever applies results; moves no bytes (copies are returned for the StepPlan).
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from offload.block_key import block_key, root_key
from workers.engine.block_pool import BlockPool

NEVER = sys.maxsize


class BlockCopy(NamedTuple):
    """One copy-on-write: entry `place` of the table was `source` and is now `destination`; contents must be copied."""

    place: int
    source: int
    destination: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks. `keys` are the chained keys of its leading full blocks, computed when first needed.

    capacity: tokens that block_ids can hold. next_commit: computed tokens at which another block can be published.
    num_committed: leading blocks already published. may_share: some block that will be written may have another user.
    """

    root: bytes
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    capacity: int = 0
    num_committed: int = 0
    next_commit: int = NEVER
    may_share: bool = False


class BlockManager:
    """All tables share one BlockPool; every operation either happens whole or changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_revision: str,
        kv_dtype: str,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._model_revision = model_revision
        self._kv_dtype = kv_dtype
        self._caching = enable_prefix_caching

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
        """An empty table whose blocks are shared only with the same adapter content and the same salt."""
        return BlockTable(root_key(self._model_revision, self._kv_dtype, adapter_digest, salt))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """The longest run of leading full blocks found by content; at least the last token is left to compute."""
        if not self._caching:
            return []
        found: list[int] = []
        lookup = self.pool.lookup
        for key in self.prefix_keys(table, token_ids):
            block_id = lookup(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def prefix_keys(self, table: BlockTable, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Keys of the leading full blocks that could be found; at least the last token is left to compute."""
        count = (len(token_ids) - 1) // self.block_size
        return islice(self._keys(table, token_ids, count), count)

    def admit(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = (), reserve: int = 0) -> bool:
        """Fills an empty table for num_tokens tokens: `hits` (from match_prefix) first, fresh blocks after them.

        False, and nothing changed, when fewer than `reserve` blocks would be left.
        """
        assert not table.block_ids, "only an empty table is admitted"
        fresh = self.blocks_for(num_tokens) - len(hits)
        idle_hits = sum(map(self.pool.is_idle, hits))
        if fresh + idle_hits + reserve > self.pool.num_allocatable:
            return False
        self._share(table, hits, len(hits))
        added = self.pool.allocate(fresh)
        assert added is not None
        self._append(table, added)
        return True

    def extend(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Blocks appended so that the table holds num_tokens tokens (perhaps none), None when the pool lacks them."""
        missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        if added is not None:
            self._append(table, added)
        return added

    def fork(self, parent: BlockTable, child: BlockTable, num_tokens: int) -> None:
        """The empty child shares the parent's blocks of the first num_tokens computed tokens, a partial one too."""
        assert not child.block_ids and num_tokens <= parent.capacity and child.root == parent.root
        self._share(child, parent.block_ids[: self.blocks_for(num_tokens)], num_tokens // self.block_size)
        parent.may_share = child.may_share = True

    def make_writable(self, table: BlockTable, start: int, end: int, step_id: int) -> list[BlockCopy] | None:
        """Copy-on-write: gives tokens [start, end) blocks that no one else uses; None when the pool lacks blocks.

        The plan step_id carries the copies, so the sources stay named until it returns.
        """
        shared = [i for i in self._written(table, start, end) if not self.pool.is_exclusive(table.block_ids[i])]
        fresh = self.pool.allocate(len(shared))
        if fresh is None:
            return None
        copies = [BlockCopy(i, table.block_ids[i], new) for i, new in zip(shared, fresh, strict=True)]
        for place, _, new in copies:
            table.block_ids[place] = new
        self.pool.release([copy.source for copy in copies], step_id)
        table.may_share = False
        return copies

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes the blocks that num_computed tokens fill: all of them known, their KV computed, results applied."""
        full = num_computed // self.block_size
        keys = self._keys(table, token_ids, full)
        for index in range(table.num_committed, full):
            self.pool.publish(table.block_ids[index], keys[index])
        self._set_committed(table, max(full, table.num_committed))

    def release(self, table: BlockTable, step_id: int) -> None:
        """Lets go of every block; step_id is the last plan that names them. Tails are evicted before heads."""
        self.pool.release(reversed(table.block_ids), step_id)
        table.block_ids.clear()
        table.capacity = table.num_committed = 0
        table.next_commit = NEVER
        table.may_share = False

    def forget(self, table: BlockTable) -> None:
        """Its published blocks are found no more (a step over them went wrong); other users keep what they have."""
        table.num_committed = 0
        for block_id in table.block_ids:
            self.pool.forget(block_id)

    # ---- inside ----

    def _written(self, table: BlockTable, start: int, end: int) -> range:
        return range(start // self.block_size, min(self.blocks_for(end), len(table.block_ids)))

    def _share(self, table: BlockTable, block_ids: Sequence[int], num_committed: int) -> None:
        for block_id in block_ids:
            self.pool.acquire(block_id)
        self._append(table, block_ids)
        self._set_committed(table, num_committed)

    def _append(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        table.block_ids.extend(block_ids)
        table.capacity = len(table.block_ids) * self.block_size

    def _set_committed(self, table: BlockTable, count: int) -> None:
        table.num_committed = count
        table.next_commit = (count + 1) * self.block_size if self._caching else NEVER

    def _keys(self, table: BlockTable, token_ids: Sequence[int], count: int) -> list[bytes]:
        """At least the first `count` chained keys. Known tokens only ever grow, so keys computed once stay true."""
        keys, size = table.keys, self.block_size
        for index in range(len(keys), count):
            keys.append(block_key(keys[-1] if keys else table.root, token_ids[index * size : (index + 1) * size]))
        return keys

    # ---- laws, for tests ----

    def check_laws(
        self, tables: Iterable[BlockTable], loading: Iterable[int] = (), storing: Iterable[int] = ()
    ) -> None:
        """Asserts the pool's laws against these tables, which must be all that hold blocks, and the blocks that open
        tickets use (loading, one entry per use) or read (storing)."""
        uses: dict[int, int] = {}
        for table in tables:
            assert table.capacity == len(table.block_ids) * self.block_size
            assert len(set(table.block_ids)) == len(table.block_ids), "a block is twice in one table"
            for block_id in table.block_ids:
                uses[block_id] = uses.get(block_id, 0) + 1
        for block_id in loading:
            uses[block_id] = uses.get(block_id, 0) + 1
        holds: dict[int, int] = {}
        for block_id in storing:
            holds[block_id] = holds.get(block_id, 0) + 1
        self.pool.check_laws(uses, holds)
