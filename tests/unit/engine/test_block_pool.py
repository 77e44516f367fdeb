"""The block pool by itself: when a block that a copy read, or that a plan named, falls idle, and in which order."""

from tandem.workers.engine.blocks.block_pool import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def held_and_let_go(step_id: int) -> tuple[BlockPool, int]:
    """A block whose user is gone, which a copy still reads and plans up to step_id name."""
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.hold(block_ids)
    pool.release(block_ids, step_id)
    assert (pool.num_pending, pool.num_allocatable, pool.num_held) == (1, 1, 1)
    return pool, block_ids[0]


def test_a_copy_that_ends_after_the_last_step_gives_the_block_back():
    pool, block_id = held_and_let_go(3)
    pool.retire(3)
    assert pool.num_pending == 1, "the copy reads it still"
    pool.unhold([block_id])
    assert (pool.num_pending, pool.num_allocatable, pool.num_held) == (0, 2, 0)
    pool.check_invariants({})


def test_a_copy_that_ends_before_the_last_step_leaves_the_block_to_that_step():
    pool, block_id = held_and_let_go(3)
    pool.retire(2)
    pool.unhold([block_id])
    assert (pool.num_pending, pool.num_allocatable) == (1, 1), "a plan names it still"
    pool.check_invariants({})
    pool.retire(3)
    assert (pool.num_pending, pool.num_allocatable) == (0, 2)
    pool.check_invariants({})


def test_a_copy_that_ends_leaves_a_block_with_a_user_alone():
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.hold(block_ids)
    pool.unhold(block_ids)
    assert (pool.num_pending, pool.num_allocatable) == (0, 1)
    pool.check_invariants({block_ids[0]: 1})


def test_two_copies_of_one_block_both_count():
    pool, block_id = held_and_let_go(0)
    pool.hold([block_id])
    pool.unhold([block_id])
    assert (pool.num_pending, pool.num_held) == (1, 1)
    pool.unhold([block_id])
    assert (pool.num_pending, pool.num_held, pool.num_allocatable) == (0, 0, 2)


def test_idle_is_what_nobody_uses_and_no_plan_names():
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1) or []
    assert not pool.is_idle(block_id)
    pool.release([block_id], 3)
    assert not pool.is_idle(block_id), "plan 3 names it"
    pool.retire(3)
    assert pool.is_idle(block_id)


def test_a_block_may_be_written_only_by_its_one_user_and_while_nobody_else_counts_on_it():
    pool = BlockPool(4)
    plain, found, copied, shared = pool.allocate(4) or []
    assert pool.is_exclusive(plain)
    pool.publish(found, key(1))
    pool.hold([copied])
    pool.publish(shared, key(2))
    pool.acquire(shared)
    pool.forget(shared)
    assert [pool.is_exclusive(b) for b in (plain, found, copied, shared)] == [True, False, False, False]
    pool.unhold([copied])
    pool.release([shared], 0)
    pool.forget(found)
    assert all(pool.is_exclusive(b) for b in (plain, found, copied, shared))


def test_a_forgotten_block_is_found_no_more_and_given_out_again():
    pool = BlockPool(2)
    used, cached = pool.allocate(2) or []
    pool.publish(used, key(1))
    pool.publish(cached, key(2))
    pool.release([cached], 0)
    pool.forget(used)
    pool.forget(cached)
    assert pool.lookup(key(1)) is None and pool.lookup(key(2)) is None
    assert (pool.num_cached, pool.num_allocatable) == (0, 1)
    pool.check_invariants({used: 1})
    assert pool.allocate(1) == [cached]
    pool.publish(cached, key(1))
    assert pool.lookup(key(1)) == cached, "its content may be published anew"


def test_a_copy_of_many_blocks_ends_for_all_of_them():
    """Also for those behind one that another copy reads still."""
    pool = BlockPool(3)
    block_ids = pool.allocate(3) or []
    pool.hold(block_ids)
    pool.hold(block_ids[:1])
    pool.release(block_ids, 0)
    pool.unhold(block_ids)
    assert (pool.num_held, pool.num_pending, pool.num_allocatable) == (1, 1, 2)
    pool.check_invariants({}, {block_ids[0]: 1})


def test_the_longest_unused_goes_first_and_unpublished_ones_before_it():
    pool = BlockPool(3)
    block_ids = pool.allocate(3) or []
    for number in (0, 1):
        pool.publish(block_ids[number], key(number))
    pool.release([block_ids[1], block_ids[0], block_ids[2]], 0)
    assert pool.allocate(1) == [block_ids[2]]
    assert pool.allocate(1) == [block_ids[1]] and pool.lookup(key(1)) is None
    assert pool.lookup(key(0)) == block_ids[0]
    assert pool.allocate(2) is None and pool.allocate(1) == [block_ids[0]]


def test_a_block_that_waits_for_its_last_step_is_taken_up_again():
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1) or []
    pool.publish(block_id, key(1))
    pool.release([block_id], 3)
    assert (pool.num_pending, pool.num_used) == (1, 1)
    pool.acquire(block_id)
    assert (pool.num_pending, pool.num_used) == (0, 1)
    pool.retire(3)
    pool.check_invariants({block_id: 1})
    pool.release([block_id], 3)
    assert (pool.num_cached, pool.num_used, pool.num_allocatable) == (1, 0, 3)
    pool.acquire(block_id)
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.check_invariants({block_id: 1})


def test_of_two_blocks_with_one_content_the_first_is_found_and_a_block_keeps_its_key():
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    pool.publish(first, key(2))
    assert pool.lookup(key(1)) == first and pool.lookup(key(2)) is None
    pool.check_invariants({first: 1, second: 1})
    pool.release([first, second], 0)
    assert (pool.num_cached, pool.num_allocatable) == (1, 2), "the second holds nothing that anybody finds"
