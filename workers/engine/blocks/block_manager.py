"""Block tables of sequences over one BlockPool: prefix hits, reservation, growth, fork, copy-on-write, commit, release.

A table lists the blocks of a sequence's leading tokens: token t is slot t % block_size of block_ids[t // block_size].
Where layers form several groups (docs/decisions/037-kv-groups.md) its entries are the blocks of each group in turn for
the first block_size tokens, then for the next; a group with a window has NO_BLOCK where no later token looks.
Only running sequences hold or reserve blocks, so waiting sequences cannot lock the pool. A prompt reserves all blocks
that it lacks when it is admitted, and each of its chunks takes its own, which nobody else can have got meanwhile. The
scheduler and the result applier call it; it moves no bytes, and returns the copies for the StepPlan. Block tables are
vLLM's PagedAttention (Kwon et al. 2023); sharing of prefixes by content is vLLM's automatic prefix caching and SGLang's
RadixAttention."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from tandem.offload.kv.block_key import block_key, group_key, root_key
from tandem.offload.kv.kv_groups import KVGroups
from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.blocks.kv_journal import KvJournal
from tandem.workers.engine.blocks.prefix_search import Has, longest_prefix

NEVER = sys.maxsize
NO_BLOCK: Final = -1


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
    tokens whose KV exists already need not be computed. first: for each group with entries of NO_BLOCK ahead of all
    others, the place (entry // groups) of its first block. reserved_places: places that the reservation is for.
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
    first: list[int] = field(default_factory=lambda: [0])
    reserved_places: int = 0


class BlockManager:
    """Block tables over one BlockPool. Each operation happens whole or changes nothing.

    num_promised: the sum over all tables. A promise binds only those who promise, not those who run or get a row.

    model_revision, kv_dtype: part of every block's key. enable_prefix_caching: False: no block is found by content.
    groups: None: one, in which every token sees all before it. journal: is told of keys of group 0; None: nobody is.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_revision: str,
        kv_dtype: str,
        enable_prefix_caching: bool = True,
        groups: KVGroups | None = None,
        journal: KvJournal | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, journal)
        self._journal = journal
        self.block_size = block_size
        self.groups = KVGroups(block_size) if groups is None else groups
        self._num_groups = self.groups.count
        self.num_promised = 0
        self._model_revision = model_revision
        self._kv_dtype = kv_dtype
        self._caching = enable_prefix_caching

    @property
    def num_slots(self) -> int:
        """Tokens of the longest sequence that the whole pool can hold."""
        return self.groups.longest(self.pool.num_blocks)

    def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
        """Returns an empty table, whose blocks are shared only under the same adapter content and the same salt."""
        root = root_key(self._model_revision, self._kv_dtype, adapter_digest, salt)
        return BlockTable(root, first=[0] * self._num_groups)

    def new_table_like(self, table: BlockTable) -> BlockTable:
        """Returns an empty table for the same content."""
        return BlockTable(table.root, keys=table.keys, finds_prefix=table.finds_prefix, first=[0] * self._num_groups)

    def places_for(self, num_tokens: int) -> int:
        """Returns the number of places that num_tokens tokens need: in each, every group has a block."""
        return -(-num_tokens // self.block_size)

    def lacks(self, table: BlockTable, num_tokens: int) -> int:
        """Returns the number of blocks that the table lacks to hold num_tokens tokens."""
        return max(0, self.places_for(num_tokens) * self._num_groups - len(table.block_ids))

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Returns the entries of the longest prefix of full blocks found by content; the last token is always
        computed."""
        if not self._caching:
            return []
        lookup = self.pool.lookup
        if self.groups.has_windows:
            found_keys = self.prefix_keys(table, token_ids, lambda key: lookup(key) is not None)
            return [NO_BLOCK if key is None else self.pool.block_of(key) for key in found_keys]
        found: list[int] = []
        for key in self.prefix_keys(table, token_ids):
            assert key is not None, "every block is seen"
            block_id = lookup(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def prefix_keys(
        self, table: BlockTable, token_ids: Sequence[int], has: Has | None = None
    ) -> Iterator[bytes | None]:
        """Yields the keys of the leading full blocks that a prefix hit may use: of all but the last token's block; none
        for a table that does not look for its prefix.

        has: leaves those of the longest prefix of which it has all blocks. Groups with a window need those alone that
        the first token behind it sees; the others are None. Such groups need `has`.
        """
        count = (len(token_ids) - 1) // self.block_size if table.finds_prefix else 0
        keys, groups = self._keys(table, token_ids, count), self.groups
        if has is None:
            yield from islice(keys, count)
            return
        count = longest_prefix(groups, keys, count, has)
        first = [groups.first_seen(group, count) for group in range(self._num_groups)]
        for place in range(count):
            own = keys[place * self._num_groups : (place + 1) * self._num_groups]
            yield from (key if place >= seen else None for key, seen in zip(own, first, strict=True))

    def admit(self, table: BlockTable, num_tokens: int, hits: Sequence[int] = (), reserve: int = 0) -> bool:
        """Gives an empty table `hits` (from match_prefix), and reserves the other blocks that num_tokens tokens need.

        Returns False, with nothing changed, if fewer than `reserve` allocatable blocks would be left.
        """
        assert not table.block_ids, "only an empty table is admitted"
        if self.cost(num_tokens, hits) + reserve > self.pool.num_allocatable:
            return False
        held = len(hits) // self._num_groups
        self._share(table, hits, held, self._first_seen(held))
        return self.reserve(table, num_tokens)

    def cost(self, num_tokens: int, hits: Sequence[int]) -> int:
        """Returns how many allocatable blocks a table of num_tokens tokens takes that begins with `hits`."""
        held = len(hits) // self._num_groups
        fresh = self._growth(self._first_seen(held), held, self.places_for(num_tokens))
        return fresh + sum(self.pool.is_idle(block_id) for block_id in hits if block_id != NO_BLOCK)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Reserves the blocks that the table lacks for num_tokens tokens, of a group with a window as many as it holds
        at once; returns False if the pool has too few."""
        places = self.places_for(num_tokens)
        missing = max(0, self._growth(table.first, len(table.block_ids) // self._num_groups, places))
        missing = max(0, missing - table.num_reserved)
        if not self.pool.reserve(missing):
            return False
        table.num_reserved += missing
        table.reserved_places = places
        return True

    def can_take(self, table: BlockTable, num_tokens: int) -> bool:
        """Returns whether take_reserved() may be called. Without windows it may for all tokens of the reservation; with
        windows the reservation is renewed as blocks are given back, and others may share those."""
        return self.lacks(table, num_tokens) - table.num_reserved <= self.pool.num_allocatable

    def take_reserved(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Appends reserved blocks until the table holds num_tokens tokens; returns them."""
        missing = self.lacks(table, num_tokens)
        assert self.groups.has_windows or missing <= table.num_reserved, (
            f"a chunk takes {missing} blocks, {table.num_reserved} are reserved"
        )
        added = self.extend(table, num_tokens)
        assert added is not None, "reserved blocks are always there"
        return added

    def extend(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Appends blocks until the table holds num_tokens tokens, its reserved ones first; returns them, or None if the
        pool has too few."""
        missing = self.lacks(table, num_tokens)
        if not missing:
            return []
        reserved = min(missing, table.num_reserved)
        added = self.pool.allocate(missing, reserved)
        if added is not None:
            table.num_reserved -= reserved
            added = self._in_turn(added)
            self._append(table, added)
        return added

    def promise(self, table: BlockTable, num_tokens: int, reserve: int) -> bool:
        """Promises a waiting sequence the blocks of num_tokens tokens, so that loads for others do not evict what is
        loaded for it. Returns False if fewer than `reserve` blocks would be left beside it and earlier promises.
        """
        blocks = self.groups.needed(num_tokens)
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
        entries = self.places_for(num_tokens) * self._num_groups
        self._share(child, parent.block_ids[:entries], num_tokens // self.block_size, parent.first)
        parent.may_share = child.may_share = True

    def cost_of_fork(self, parent: BlockTable, num_tokens: int, total: int) -> int | None:
        """Returns the blocks that a fork of num_tokens tokens takes and reserves if it is to hold `total` tokens. None
        if the parent has given back blocks that the fork would see."""
        whole = num_tokens // self.block_size
        if any(first > self.groups.first_seen(group, whole) for group, first in enumerate(parent.first)):
            return None
        return self._growth(parent.first, whole, self.places_for(total))

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
        """Publishes the blocks that the first num_computed tokens fill, whose KV is on the device, and gives back those
        that no later token sees. Every plan that reads these has returned."""
        full = num_computed // self.block_size
        if self._caching:
            keys = self._keys(table, token_ids, full)
            self.mark(keys, table.num_committed, full)
            for index in range(table.num_committed * self._num_groups, full * self._num_groups):
                self.pool.publish(table.block_ids[index], keys[index])
        self._set_committed(table, max(full, table.num_committed))
        if self.groups.has_windows:
            self._give_back(table)

    def mark(self, keys: Sequence[bytes | None], first: int, end: int) -> None:
        """Tells the journal of the places [first, end) of a chain, whose blocks some tier has or is about to get. keys:
        of each group in turn for each place of the chain."""
        if self._journal is not None:
            for place in self._journal.indexed(first, end):
                if (key := keys[place * self._num_groups]) is not None:
                    self._journal.mark(key)

    def num_stored(self, table: BlockTable) -> int:
        """Returns the number of published blocks that the table holds."""
        return sum(block_id != NO_BLOCK for block_id in table.block_ids[: table.num_committed * self._num_groups])

    def stored(self, table: BlockTable) -> Iterator[tuple[int, bytes, int]]:
        """Yields (place, key, block) of each published block that the table holds; of a fork, those whose keys it has
        needed itself."""
        for index, key in enumerate(table.keys[: table.num_committed * self._num_groups]):
            block_id = table.block_ids[index]
            if block_id != NO_BLOCK:
                yield index // self._num_groups, key, block_id

    def release(self, table: BlockTable, step_id: int) -> None:
        """Releases every block, and what is left of the reservation; step_id is the last plan that names the blocks.
        Tails are evicted before heads."""
        self.pool.unreserve(table.num_reserved)
        table.num_reserved = 0
        self.pool.release((block_id for block_id in reversed(table.block_ids) if block_id != NO_BLOCK), step_id)
        table.block_ids.clear()
        table.first = [0] * self._num_groups
        table.capacity = table.num_committed = table.reserved_places = 0
        table.next_commit = NEVER
        table.may_share = False

    def forget(self, table: BlockTable) -> None:
        """Removes the table's published blocks from the index, those given back too, after a step over them failed;
        other users keep them."""
        table.num_committed = 0
        for index, block_id in enumerate(table.block_ids):
            if block_id != NO_BLOCK:
                self.pool.forget(block_id)
            elif index < len(table.keys) and (found := self.pool.lookup(table.keys[index])) is not None:
                self.pool.forget(found)

    # ---- inside ----

    def _first_seen(self, held: int) -> list[int]:
        """Returns, for each group, the first of `held` places that the token behind them sees."""
        return [self.groups.first_seen(group, held) for group in range(self._num_groups)]

    def _written(self, table: BlockTable, start: int, end: int) -> range:
        groups = self._num_groups
        return range(start // self.block_size * groups, min(self.places_for(end) * groups, len(table.block_ids)))

    def _share(self, table: BlockTable, block_ids: Sequence[int], num_committed: int, first: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                self.pool.acquire(block_id)
        self._append(table, block_ids)
        table.first = list(first)
        self._set_committed(table, num_committed)

    def _in_turn(self, block_ids: list[int]) -> list[int]:
        """Returns the blocks of new places in the order of the table: of each group those that followed one another, as
        neighbours in memory are read faster."""
        if self._num_groups == 1:
            return block_ids
        places = len(block_ids) // self._num_groups
        return [block for place in range(places) for block in block_ids[place::places]]

    def _append(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        table.block_ids.extend(block_ids)
        table.capacity = len(table.block_ids) // self._num_groups * self.block_size

    def _set_committed(self, table: BlockTable, count: int) -> None:
        table.num_committed = count
        table.next_commit = (count + 1) * self.block_size if self._caching or self.groups.has_windows else NEVER

    def _growth(self, first: Sequence[int], held: int, places: int) -> int:
        """Returns how many more blocks a table of `held` places, whose groups begin at `first`, will hold at once while
        it grows to `places`."""
        groups, more = self.groups, places - held
        if not groups.has_windows:
            return more
        return sum(min(more, groups.most_held(group) - (held - begin)) for group, begin in enumerate(first))

    def _give_back(self, table: BlockTable) -> None:
        """Releases the blocks ahead of what is seen from behind the last full block, and reserves as many for a prompt
        that is still computed, as far as the pool has them."""
        groups, freed = self.groups, list[int]()
        for group, begin in enumerate(table.first):
            seen = groups.first_seen(group, table.num_committed)
            for index in range(begin * groups.count + group, seen * groups.count, groups.count):
                freed.append(table.block_ids[index])
                table.block_ids[index] = NO_BLOCK
            table.first[group] = max(begin, seen)
        self.pool.release(freed, self.pool.done_step)  # plans in flight begin behind these tokens
        held = len(table.block_ids) // groups.count
        if table.reserved_places > held:
            missing = self._growth(table.first, held, table.reserved_places) - table.num_reserved
            missing = max(0, min(missing, self.pool.num_allocatable))
            self.pool.reserve(missing)
            table.num_reserved += missing

    def _keys(self, table: BlockTable, token_ids: Sequence[int], count: int) -> list[bytes]:
        """Returns at least the keys of the first `count` places, those of group 0 chained. Known tokens only grow, so
        computed keys stay valid."""
        keys, size, groups = table.keys, self.block_size, self._num_groups
        for place in range(len(keys) // groups, count):
            key = block_key(keys[-groups] if keys else table.root, token_ids[place * size : (place + 1) * size])
            keys.append(key)
            if groups > 1:
                keys.extend(group_key(key, group) for group in range(1, groups))
        return keys

    # ---- invariants, for tests ----

    def check_invariants(
        self, tables: Iterable[BlockTable], loading: Iterable[int] = (), storing: Iterable[int] = ()
    ) -> None:
        """Asserts the invariants of tables and pool. tables: all that hold blocks, or have reservations or promises.
        loading, storing: blocks that open tickets write or read, one entry for each use."""
        uses: Counter[int] = Counter(loading)
        reserved = promised = 0
        for table in tables:
            reserved, promised = reserved + table.num_reserved, promised + table.num_promised
            assert table.capacity * self._num_groups == len(table.block_ids) * self.block_size
            own = [block_id for block_id in table.block_ids if block_id != NO_BLOCK]
            assert len(set(own)) == len(own), "a block is twice in one table"
            for group, first in enumerate(table.first):
                entries = table.block_ids[group :: self._num_groups]
                assert not set(entries[:first]) - {NO_BLOCK} and NO_BLOCK not in entries[first:]
            uses.update(own)
        assert self.pool.num_reserved == reserved, "reserved blocks are not the sum of the tables' reservations"
        assert self.num_promised == promised, "promised blocks are not the sum of the tables' promises"
        self.pool.check_invariants(uses, Counter(storing))
