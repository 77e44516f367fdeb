"""The block invariants hold over random histories; each seeded defect breaks them."""

import pytest
from block_machine import machine
from builders import filled
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tandem.workers.engine.blocks.block_manager import (
    NEVER,
    BlockCopy,
    BlockManager,
    BlockTable,
)
from tandem.workers.engine.blocks.block_pool import BlockPool

TestBlockInvariants = machine(BlockManager).TestCase
TestBlockInvariants.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

HUNT = settings(
    max_examples=4000, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


def assert_caught(defect: type[BlockManager]) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(machine(defect), settings=HUNT)


def test_a_skipped_decref_is_caught():
    class SkippedDecref(BlockManager):
        def release(self, table: BlockTable, step_id: int) -> None:
            if len(table.block_ids) > 2:
                table.block_ids.pop()
            super().release(table, step_id)

    assert_caught(SkippedDecref)


def test_a_double_free_is_caught():
    class DoubleFree(BlockManager):
        def release(self, table: BlockTable, step_id: int) -> None:
            if len(table.block_ids) > 2:
                self.pool.release(table.block_ids[:1], step_id)
            super().release(table, step_id)

    assert_caught(DoubleFree)


def test_a_missing_salt_is_caught():
    class MissingSalt(BlockManager):
        def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
            return super().new_table(adapter_digest, "")

    assert_caught(MissingSalt)


def test_a_missing_adapter_digest_is_caught():
    class MissingAdapter(BlockManager):
        def new_table(self, adapter_digest: str | None, salt: str) -> BlockTable:
            return super().new_table(None, salt)

    assert_caught(MissingAdapter)


def test_a_missing_copy_on_write_is_caught():
    class MissingCopy(BlockManager):
        def make_writable(self, table: BlockTable, start: int, end: int, step_id: int) -> list[BlockCopy] | None:
            return []

    assert_caught(MissingCopy)


def test_reuse_while_a_step_names_the_block_is_caught():
    class EarlyReuse(BlockManager):
        def release(self, table: BlockTable, step_id: int) -> None:
            super().release(table, 0)

    assert_caught(EarlyReuse)


def test_a_copy_source_stays_named_until_the_plan_with_the_copy_returns():
    m = manager()
    parent, child = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, parent, 3)
    m.fork(parent, child, 3)
    copies = m.make_writable(child, 3, 4, step_id=9)
    assert copies is not None and [copy.source for copy in copies] == [parent.block_ids[1]]
    m.release(parent, step_id=8)
    m.pool.retire(8)
    assert m.pool.num_pending == 1, "the source of the copy in plan 9"
    m.pool.retire(9)
    assert m.pool.num_pending == 0
    m.check_invariants([child])


def test_publishing_blocks_before_they_are_full_is_caught():
    class EarlyCommit(BlockManager):
        def commit(self, table: BlockTable, token_ids: list[int], num_computed: int) -> None:
            super().commit(table, token_ids, min(len(token_ids), num_computed + 1))

    assert_caught(EarlyCommit)


def test_an_index_entry_that_survives_eviction_is_caught():
    class StaleIndexPool(BlockPool):
        def _drop_key(self, block_id: int, key: bytes) -> None:
            self._keys[block_id] = None

    class StaleIndex(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, **names: str) -> None:
            super().__init__(num_blocks, block_size, **names)
            self.pool = StaleIndexPool(num_blocks)

    assert_caught(StaleIndex)


def test_eviction_of_the_most_recently_used_is_caught():
    class WrongEndPool(BlockPool):
        def _evict(self) -> int:
            self._cached.move_to_end(next(reversed(self._cached)), last=False)
            return super()._evict()

    class WrongEnd(BlockManager):
        def __init__(self, num_blocks: int, block_size: int, **names: str) -> None:
            super().__init__(num_blocks, block_size, **names)
            self.pool = WrongEndPool(num_blocks)

    assert_caught(WrongEnd)


def manager(num_blocks: int = 8, block_size: int = 2) -> BlockManager:
    return BlockManager(num_blocks, block_size, model_revision="m", kv_dtype="d")


def test_allocation_is_all_or_nothing():
    m = manager(num_blocks=3)
    one, two = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, one, 4) and not m.admit(two, 4)
    assert two.block_ids == [] and m.pool.num_allocatable == 1
    assert m.extend(one, 9) is None and len(one.block_ids) == 2


def test_a_prefix_is_found_after_its_owner_is_gone_until_it_is_evicted():
    m = manager(num_blocks=4)
    tokens = [1, 2, 3, 4, 5]
    first = m.new_table(None, "")
    assert filled(m, first, 5)
    m.commit(first, tokens, 5)
    blocks = list(first.block_ids)
    m.release(first, 0)
    assert m.match_prefix(m.new_table(None, ""), tokens) == blocks[:2]
    assert m.match_prefix(m.new_table(None, ""), [1, 2, 9, 9, 9]) == blocks[:1]
    assert m.match_prefix(m.new_table(None, ""), [1, 2, 3, 4]) == blocks[:1], "one token is always left to compute"
    filler = m.new_table(None, "")
    assert filled(m, filler, 6)
    assert m.match_prefix(m.new_table(None, ""), tokens) == blocks[:1], "the tail goes first"


def test_a_running_prefix_is_shared_not_copied():
    m = manager()
    tokens = [1, 2, 3, 4, 5]
    one, two = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, one, 5)
    m.commit(one, tokens, 4)
    assert filled(m, two, 5, m.match_prefix(two, tokens))
    assert two.block_ids[:2] == one.block_ids[:2] and two.block_ids[2] != one.block_ids[2]
    m.check_invariants([one, two])


def test_reserve_keeps_blocks_back():
    m = manager(num_blocks=4)
    assert not m.admit(m.new_table(None, ""), 6, reserve=2)
    assert m.admit(m.new_table(None, ""), 6, reserve=1)


def test_blocks_named_by_a_step_in_flight_come_back_when_it_returns():
    m = manager(num_blocks=2)
    table = m.new_table(None, "")
    assert filled(m, table, 4)
    m.release(table, 7)
    assert (m.pool.num_allocatable, m.pool.num_pending, m.pool.num_used) == (0, 2, 2)
    m.pool.retire(6)
    assert m.pool.num_pending == 2
    m.pool.retire(7)
    assert (m.pool.num_allocatable, m.pool.num_pending) == (2, 0)


def test_without_caching_nothing_is_found():
    m = BlockManager(8, 2, model_revision="m", kv_dtype="d", enable_prefix_caching=False)
    table = m.new_table(None, "")
    assert filled(m, table, 4)
    assert table.next_commit > 10**9
    assert m.match_prefix(m.new_table(None, ""), [1, 2, 3, 4, 5]) == []


def test_a_table_says_when_its_next_block_can_be_published():
    m, tokens = manager(), [1, 2, 3, 4, 5, 6, 7]
    table = m.new_table(None, "")
    assert filled(m, table, 7)
    seen = [(table.num_committed, table.next_commit)]
    for computed in (1, 2, 5, 7):
        m.commit(table, tokens, computed)
        seen.append((table.num_committed, table.next_commit))
    assert seen == [(0, 2), (0, 2), (1, 4), (2, 6), (3, 8)]
    m.release(table, 0)
    assert (table.num_committed, table.next_commit, table.capacity) == (0, NEVER, 0)
    again = m.new_table(None, "")
    assert filled(m, again, 7, m.match_prefix(again, tokens))
    assert (again.num_committed, again.next_commit) == (3, 8)


def test_a_table_says_whether_a_block_of_it_may_have_another_user():
    m = manager()
    parent, child = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, parent, 3)
    assert not parent.may_share and not child.may_share
    m.fork(parent, child, 3)
    assert parent.may_share and child.may_share
    assert m.make_writable(child, 3, 4, step_id=1)
    assert not child.may_share and parent.may_share
    m.release(parent, 1)
    assert not parent.may_share


def test_only_what_will_be_written_is_copied():
    m = manager(num_blocks=9)
    parent, child = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, parent, 6)
    m.fork(parent, child, 6)
    copies = m.make_writable(child, 3, 4, step_id=1)
    assert [copy.table_index for copy in copies or []] == [1]
    assert [a == b for a, b in zip(parent.block_ids, child.block_ids, strict=True)] == [True, False, True]
    copies = m.make_writable(child, 0, 9, step_id=2)
    assert [copy.table_index for copy in copies or []] == [0, 2], "tokens beyond the table have no block yet"
    m.check_invariants([parent, child])


def test_a_fork_shares_what_is_computed_and_has_published_its_whole_blocks_only():
    m = manager()
    parent, child = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, parent, 6)
    m.fork(parent, child, 3)
    assert child.block_ids == parent.block_ids[:2]
    assert (child.num_committed, child.next_commit, child.capacity) == (1, 4, 4)


def test_a_copy_for_which_there_is_no_block_changes_nothing():
    m = manager(num_blocks=2)
    parent, child = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, parent, 3)
    m.fork(parent, child, 3)
    assert m.make_writable(child, 0, 3, step_id=1) is None
    assert child.block_ids == parent.block_ids and child.may_share
    m.check_invariants([parent, child])


def test_admission_counts_hits_that_nobody_uses_as_taken():
    m, tokens = manager(num_blocks=4), [1, 2, 3, 4, 5]
    first = m.new_table(None, "")
    assert filled(m, first, 5)
    m.commit(first, tokens, 5)
    m.release(first, 0)
    second = m.new_table(None, "")
    hits = m.match_prefix(second, tokens)
    assert len(hits) == 2 and not m.admit(second, 5, hits, reserve=2)
    assert second.block_ids == [] and m.pool.num_allocatable == 4
    assert m.admit(second, 5, hits, reserve=1) and second.block_ids == hits


def test_a_forgotten_table_keeps_its_blocks_and_nobody_finds_them():
    m, tokens = manager(), [1, 2, 3, 4, 5]
    table = m.new_table(None, "")
    assert filled(m, table, 5)
    m.commit(table, tokens, 5)
    m.forget(table)
    assert len(table.block_ids) == 3 and table.num_committed == 0
    assert m.match_prefix(m.new_table(None, ""), tokens) == []
    m.check_invariants([table])


def test_a_pool_knows_its_slots():
    assert manager(num_blocks=8, block_size=2).num_slots == 16
