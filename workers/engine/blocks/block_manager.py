"""Block tables of sequences over one BlockPool: prefix hits, reservation, growth, fork, copy-on-write, commit, release.

A table lists the blocks of a sequence's leading tokens: token t is slot t % block_size of block_ids[t // block_size].
Only running sequences hold or reserve blocks, so waiting sequences cannot lock the pool. A prompt reserves all blocks
that it lacks when it is admitted, and each of its chunks takes its own, which nobody else can have got meanwhile. The
scheduler and the result applier call it; it moves no bytes, and returns the copies for the StepPlan. Block tables are
vLLM's PagedAttention (Kwon et al. 2023); sharing of prefixes by content is vLLM's automatic prefix caching and SGLang's
RadixAttention."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tandem.offload.kv.block_key import block_key, root_key
from tandem.workers.engine.blocks.block_pool import BlockPool

NEVER = sys.maxsize


class BlockCopy(NamedTuple):
    """One copy-on-write: entry `table_index` was block `source` and is now `destination`, which gets its content."""

    table_index: int
    source: int
    destination: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence, in token order.

    root: key of the empty prefix (model, KV dtype, adapter, salt). keys: chained keys of the leading full blocks,
    computed when first needed. capacity: tokens that block_ids can hold. num_committed: leading blocks already
    published. next_commit: computed tokens at which another block can be published. may_share: a block that will be
    written may have another user. num_reserved: blocks that the pool keeps for tokens that block_ids cannot hold yet.
    num_promised: blocks that loads for others leave to this table, while its sequence waits. finds_prefix: whether
    tokens whose KV exists already need not be computed.
    """

    root: bytes
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    capacity: int = 0
    num_committed: int = 0
    next_commit: int = NEVER
    may_share: bool = False
    num_reserved: int = 0
    num_promised: int = 0
    finds_prefix: bool = True


class BlockManager:
    """Block tables over one BlockPool. Each operation happens whole or changes nothing.

    num_promised: the sum over all tables. A promise binds only those who promise, not those who run or get a row.

    model_revision, kv_dtype: part of every block's key. enable_prefix_caching: False: no block is found by content.
    """

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
        self.num_promised = 0
        self._model_revision = model_revision
        self._kv_dtype = kv_dtype
        self._caching = enable_prefix_caching

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
        """Returns an empty table, whose blocks are shared only under the same adapter content and the same salt."""
        return BlockTable(root_key(self._model_revision, self._kv_dtype, adapter_digest, salt))

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that num_tokens tokens need."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Returns the longest run of leading full blocks found by content; the last token is always computed."""
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
        """Returns the keys of the leading full blocks that a prefix hit may use: all but the last token's block; none
        for a table that does not look for its prefix."""
        count = (len(token_ids) - 1) // self.block_size if table.finds_prefix else 0
        return islice(self._keys(table, token_ids, count), count)

    def admit(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = (), reserve: int = 0) -> bool:
        """Gives an empty table `hits` (from match_prefix), and reserves the other blocks that num_tokens tokens need.

        Returns False, with nothing changed, if fewer than `reserve` allocatable blocks would be left.
        """
        assert not table.block_ids, "only an empty table is admitted"
        fresh = self.blocks_for(num_tokens) - len(hits)
        idle_hits = sum(map(self.pool.is_idle, hits))
        if fresh + idle_hits + reserve > self.pool.num_allocatable:
            return False
        self._share(table, hits, len(hits))
        return self.reserve(table, num_tokens)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Reserves the blocks that the table lacks for num_tokens tokens; returns False if the pool has too few."""
        missing = max(0, self.blocks_for(num_tokens) - len(table.block_ids) - table.num_reserved)
        if not self.pool.reserve(missing):
            return False
        table.num_reserved += missing
        return True

    def take_reserved(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Appends reserved blocks until the table holds num_tokens tokens; returns them."""
        missing = self.blocks_for(num_tokens) - len(table.block_ids)
        assert missing <= table.num_reserved, f"a chunk takes {missing} blocks, {table.num_reserved} are reserved"
        added = self.extend(table, num_tokens)
        assert added is not None, "reserved blocks are always there"
        return added

    def extend(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Appends blocks until the table holds num_tokens tokens, its reserved ones first; returns them, or None if the
        pool has too few."""
        missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if missing <= 0:
            return []
        reserved = min(missing, table.num_reserved)
        added = self.pool.allocate(missing, reserved)
        if added is not None:
            table.num_reserved -= reserved
            self._append(table, added)
        return added

    def promise(self, table: BlockTable, num_tokens: int, reserve: int) -> bool:
        """Promises a waiting sequence the blocks of num_tokens tokens, so that loads for others do not evict what is
        loaded for it. Returns False if fewer than `reserve` blocks would be left beside it and earlier promises.
        """
        blocks = self.blocks_for(num_tokens)
        if blocks + reserve + self.num_promised > self.pool.num_allocatable:
            return False
        self.num_promised += blocks
        table.num_promised += blocks
        return True

    def withdraw_promise(self, table: BlockTable) -> None:
        """Ends a promise, if there is one: the sequence gets a row, looks again or has ended."""
        self.num_promised -= table.num_promised
        table.num_promised = 0

    def fork(self, parent: BlockTable, child: BlockTable, num_tokens: int) -> None:
        """Shares the parent's blocks of the first num_tokens computed tokens with an empty child."""
        assert not child.block_ids and num_tokens <= parent.capacity and child.root == parent.root
        self._share(child, parent.block_ids[: self.blocks_for(num_tokens)], num_tokens // self.block_size)
        parent.may_share = child.may_share = True

    def make_writable(self, table: BlockTable, start: int, end: int, step_id: int) -> list[BlockCopy] | None:
        """Gives tokens [start, end) blocks without other users (copy-on-write); None if the pool has too few blocks.

        The plan step_id carries the copies, so it names the sources until it returns.
        """
        shared = [i for i in self._written(table, start, end) if not self.pool.is_exclusive(table.block_ids[i])]
        fresh = self.pool.allocate(len(shared))
        if fresh is None:
            return None
        copies = [BlockCopy(i, table.block_ids[i], new) for i, new in zip(shared, fresh, strict=True)]
        for index, _, new in copies:
            table.block_ids[index] = new
        self.pool.release([copy.source for copy in copies], step_id)
        table.may_share = False
        return copies

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes the blocks that the first num_computed tokens fill. Their KV is on the device."""
        full = num_computed // self.block_size
        keys = self._keys(table, token_ids, full)
        for index in range(table.num_committed, full):
            self.pool.publish(table.block_ids[index], keys[index])
        self._set_committed(table, max(full, table.num_committed))

    def release(self, table: BlockTable, step_id: int) -> None:
        """Releases every block, and what is left of the reservation; step_id is the last plan that names the blocks.
        Tails are evicted before heads."""
        self.pool.unreserve(table.num_reserved)
        table.num_reserved = 0
        self.pool.release(reversed(table.block_ids), step_id)
        table.block_ids.clear()
        table.capacity = table.num_committed = 0
        table.next_commit = NEVER
        table.may_share = False

    def forget(self, table: BlockTable) -> None:
        """Removes the table's published blocks from the index, after a step over them failed; other users keep them."""
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
        """Returns at least the first `count` chained keys. Known tokens only grow, so computed keys stay valid."""
        keys, size = table.keys, self.block_size
        for index in range(len(keys), count):
            keys.append(block_key(keys[-1] if keys else table.root, token_ids[index * size : (index + 1) * size]))
        return keys

    # ---- invariants, for tests ----

    def check_invariants(
        self, tables: Iterable[BlockTable], loading: Iterable[int] = (), storing: Iterable[int] = ()
    ) -> None:
        """Asserts the invariants of tables and pool. tables: all that hold blocks, or have reservations or promises.
        loading, storing: blocks that open tickets write or read, one entry for each use."""
        uses: dict[int, int] = {}
        reserved = promised = 0
        for table in tables:
            reserved, promised = reserved + table.num_reserved, promised + table.num_promised
            assert table.capacity == len(table.block_ids) * self.block_size
            assert len(set(table.block_ids)) == len(table.block_ids), "a block is twice in one table"
            for block_id in table.block_ids:
                uses[block_id] = uses.get(block_id, 0) + 1
        assert self.pool.num_reserved == reserved, "reserved blocks are not the sum of the tables' reservations"
        assert self.num_promised == promised, "promised blocks are not the sum of the tables' promises"
        for block_id in loading:
            uses[block_id] = uses.get(block_id, 0) + 1
        holds: dict[int, int] = {}
        for block_id in storing:
            holds[block_id] = holds.get(block_id, 0) + 1
        self.pool.check_invariants(uses, holds)
