"""KVOffload by itself: what a copy is weighed against, whom an open ticket holds up, what becomes of failures."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import FakeClock, filled, request

from tandem.offload.kv.disk_tier import DiskTier
from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tiered_store import Kind, TieredStore
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.engine.transfers.kv_offload import (
    COST_DEPTH_TOKENS,
    MAX_LOADS,
    MIN_PATIENCE_S,
    PATIENCE,
    KVOffload,
)
from tandem.workers.engine.transfers.transfer_manager import STUCK_S, TransferManager
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.transfer import CopyKV, Failure, TransferOp, TransferResult

SIZE = 4


class Prices(CopyCosts):
    """A token costs 1 to compute again, a block what the test says to copy. Keeps what it is told of copies."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.block: dict[Kind, float] = {}
        self.observed: list[tuple[Any, ...]] = []

    def recompute_s(self, tokens: int) -> float:
        return float(tokens)

    def copy_s(self, kind: Kind, blocks: int) -> float:
        return self.block.get(kind, 0.0) * blocks

    def observe_copy(
        self, kind: Kind, blocks: int, copy_s: float, elapsed_s: float, beside_steps: bool = False
    ) -> None:
        self.observed.append((kind, blocks, copy_s, elapsed_s, beside_steps))


def tokens_of(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@dataclass
class Rig:
    """One group's device, host, disk and offload, and what the offload has sent to its two ranks."""

    manager: BlockManager
    store: TieredStore
    clock: FakeClock = field(default_factory=FakeClock)
    prices: Prices = field(default_factory=Prices)
    sent: list[CopyKV] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transfers = TransferManager(self.send, 2, self.clock)
        self.offload = KVOffload(self.manager, self.store, self.transfers, self.prices, self.clock)
        self.waiting = WaitingQueue()

    def send(self, op: TransferOp) -> None:
        assert isinstance(op, CopyKV)
        self.sent.append(op)

    def load(self, seq: Sequence, reserve: int) -> bool:
        """Whether it waits for a load now."""
        ticket = self.offload.load(seq, reserve)
        if ticket is not None:
            self.waiting.block(seq, Blocker.KV, ticket)
        return ticket is not None

    def drop(self, seq: Sequence) -> None:
        if self.waiting.blocker_of(seq) is not None:
            self.waiting.remove(seq)
        self.offload.drop(seq)

    def overdue(self) -> list[Sequence]:
        return self.freed(self.transfers.overdue())

    def freed(self, late: Iterable[int] = ()) -> list[Sequence]:
        """As the scheduler does: who waits no longer."""
        freed = []
        for event in self.offload.take_events(late):
            for seq in self.waiting.unblock(event):
                if event.failure is not None:
                    self.offload.forbid_loads(seq)
                freed.append(seq)
        return freed

    def sequence(self, tokens: list[int]) -> Sequence:
        state = RequestState(request("a", tokens), 0.0)
        table = self.manager.new_table(None, "")
        seq = Sequence(state, 0, tokens, len(tokens), 100, len(tokens), frozenset(), (0, 0, 0), table)
        state.sequences.append(seq)
        self.sequences.append(seq)
        return seq

    def newcomer(self, tiers: str, first: int = 0) -> Sequence:
        """A sequence whose leading blocks lie, one after the other, on d(evice), h(ost), f(ile) or nowhere."""
        seq = self.sequence(tokens_of(len(tiers) * SIZE + 1, first))
        keys = list(self.manager.prefix_keys(seq.table, seq.tokens))
        earlier = self.manager.pool.allocate(tiers.count("d")) or []
        on_device = [key for key, tier in zip(keys, tiers, strict=True) if tier == "d"]
        for block_id, key in zip(earlier, on_device, strict=True):
            self.manager.pool.publish(block_id, key)
        self.manager.pool.release(earlier, 0)
        on_host = [key for key, tier in zip(keys, tiers, strict=True) if tier == "h"]
        ticket = self.store.store([(key, 0) for key in on_host], [1.0] * len(on_host))
        if ticket is not None:
            self.store.complete(ticket, set())
        for key in (key for key, tier in zip(keys, tiers, strict=True) if tier == "f"):
            assert self.store.disk is not None and self.store.disk.prepare_store(key) is not None
            self.store.disk.complete_store(key)  # type: ignore[attr-defined]
        return seq

    def computed(self, num_blocks: int, first: int = 0) -> BlockTable:
        """A running sequence's table, with so many published blocks."""
        tokens = tokens_of(num_blocks * SIZE, first)
        table = self.manager.new_table(None, "")
        assert filled(self.manager, table, len(tokens))
        self.manager.commit(table, tokens, len(tokens))
        return table

    def answer(self, ranks: tuple[int, ...] = (0, 1), ticket: int = -1, **parts: Any) -> list[Sequence]:
        """Ranks answer the ticket that was sent last."""
        number = self.sent[ticket].ticket
        for rank in ranks:
            self.transfers.take(TransferResult(rank=rank, ticket=number, **parts))
        return self.freed()

    def check(self, *tables: BlockTable) -> None:
        self.offload.check_invariants(self.waiting.keys_of(Blocker.KV))
        waiting = (seq.table for seq in self.sequences)
        self.manager.check_invariants([*tables, *waiting], self.offload.table_uses(), self.offload.held())


def rig(num_blocks: int = 16, host_slots: int = 16, disk_keys: int = 0) -> Rig:
    manager = BlockManager(num_blocks, SIZE, model_revision="m", kv_dtype="d")
    disk = DiskTier(Path("nowhere"), disk_keys, 1) if disk_keys else None
    return Rig(manager, TieredStore(HostTier(host_slots, make_policy("lru")), disk))


# ---- what is worth a copy ----


@pytest.mark.parametrize(("block_price", "is_worth"), [(4.25, False), (4.0, False), (3.75, True)])
def test_a_copy_is_weighed_against_the_tokens_behind_what_the_device_has(block_price, is_worth):
    """Three blocks on the device, two below it: eight tokens are saved, not those that the device has anyway."""
    r = rig()
    r.prices.block = {"load": block_price}
    assert r.load(r.newcomer("dddhh"), reserve=0) is is_worth
    assert len(r.sent) == is_worth


@pytest.mark.parametrize(
    ("tiers", "prices", "is_worth"),
    [
        ("ff", {"load": 3.0, "fetch": 1.0}, False),
        ("ff", {"load": 3.0, "fetch": 0.9}, True),
        ("ff", {"load": 5.0, "fetch": 1.1}, False),
        ("hf", {"load": 5.0}, False),
        ("hf", {"load": 3.0, "fetch": 1.9}, True),
        ("hf", {"load": 3.0, "fetch": 2.0}, False),
        ("dhf", {"load": 2.0, "fetch": 2.0}, True),
        ("dfh", {"load": 2.0, "fetch": 2.0}, True),
        ("hd", {"load": 7.9}, True),
        ("hd", {"load": 8.0}, False),
    ],
)
def test_what_lies_on_disk_is_copied_twice(tiers, prices, is_worth):
    r = rig(disk_keys=8)
    r.prices.block = prices
    assert r.load(r.newcomer(tiers), reserve=0) is is_worth


def test_a_hole_ends_what_is_found():
    r = rig()
    seq = r.newcomer("h-hd")
    assert r.load(seq, reserve=0)
    assert r.sent[0].kind == "load" and len(r.sent[0].block_ids) == 1


@pytest.mark.parametrize("tiers", ["", "dd", "-h"])
def test_nothing_is_loaded_where_nothing_is_lacking_or_found(tiers):
    r = rig()
    seq = r.newcomer(tiers)
    assert not r.load(seq, reserve=0) and r.offload.load_overlapped(seq) is None
    assert not r.sent and seq.num_loads == 0


# ---- loads ----


def test_a_load_fills_blocks_that_are_found_afterwards():
    r = rig()
    seq = r.newcomer("dhh")
    assert r.load(seq, reserve=0)
    (sent,) = r.sent
    assert (sent.kind, len(sent.slots), len(sent.block_ids), sent.keys) == ("load", 2, 2, [])
    assert seq.num_loads == 1 and r.offload.is_busy and r.transfers.is_open([7, sent.ticket])
    assert r.manager.pool.num_used == 3, "those that come and the one that leads them"
    r.check()
    assert r.answer((0,)) == [] and r.transfers.is_open([sent.ticket])
    assert r.answer((1,)) == [seq]
    assert not r.offload.is_busy and not r.transfers.is_open([sent.ticket])
    assert len(r.manager.match_prefix(seq.table, seq.tokens)) == 3 and r.manager.pool.num_used == 0
    r.check()


def test_a_block_that_one_rank_lacks_is_a_miss_and_the_others_are_not():
    r = rig()
    seq = r.newcomer("hhh")
    assert r.load(seq, reserve=0)
    keys = list(r.manager.prefix_keys(seq.table, seq.tokens))
    assert r.answer((0,)) == [] and r.answer((1,), failed=[2]) == [seq]
    assert len(r.manager.match_prefix(seq.table, seq.tokens)) == 2
    assert [r.store.place(key) for key in keys] == ["host", "host", None]
    assert r.offload.counts.failed_blocks == 1 and r.offload.take_failed_loads() == []
    assert not r.prices.observed, "a copy that failed says nothing about the next one"
    r.check()


def test_who_wants_the_same_waits_for_the_same_ticket():
    r = rig()
    first, second = r.newcomer("hh"), r.sequence(tokens_of(9))
    assert r.load(first, reserve=0) and r.load(second, reserve=0)
    assert len(r.sent) == 1 and second.num_loads == 1
    assert r.answer() == [first, second]
    assert not r.load(first, reserve=0), "it is on the device"


def test_after_a_failed_load_the_next_one_begins_anew():
    r = rig()
    first = r.newcomer("hh")
    assert r.load(first, reserve=0)
    assert r.answer(failed=[1]) == [first]
    r.manager.pool.forget(r.manager.match_prefix(first.table, first.tokens)[0])
    assert r.load(first, reserve=0) and len(r.sent) == 2 and len(r.sent[1].slots) == 1


def test_a_sequence_that_was_led_up_too_often_computes():
    r = rig()
    for join in (False, True):
        seq = r.newcomer("hh", first=50 if join else 0)
        seq.num_loads = MAX_LOADS
        assert not r.load(seq, 0) and r.offload.load_overlapped(seq) is None
        seq.num_loads = MAX_LOADS - 1
        assert r.offload.load_overlapped(seq) if join else r.load(seq, 0)
        assert seq.num_loads == MAX_LOADS


def test_what_is_reserved_for_others_is_not_loaded_over():
    """Twelve blocks; each newcomer wants six in all, of which five come up."""
    r = rig(num_blocks=12)
    first, second = r.newcomer("hhhhh"), r.newcomer("hhhhh", first=50)
    assert not r.load(first, reserve=7), "six and seven are more than twelve"
    assert r.load(first, reserve=6)
    assert not r.load(second, reserve=0), "seven blocks are left, and six of twelve are the first one's"
    assert r.answer() == [first]
    assert not r.load(second, reserve=1), "its promise holds until its turn"
    assert not r.load(first, reserve=0)
    assert r.load(second, reserve=1), "the first one's turn has come"


@pytest.mark.parametrize("turn", ["drop", "join"])
def test_a_promise_ends_with_who_had_it(turn):
    r = rig(num_blocks=12)
    first, second = r.newcomer("hhhhh"), r.newcomer("hhhhh", first=50)
    assert r.load(first, reserve=0) and r.answer() == [first]
    assert not r.load(second, reserve=1)
    if turn == "drop":
        r.drop(first)
    else:
        assert r.offload.load_overlapped(first) is None
    assert r.load(second, reserve=1)


def test_who_waits_no_more_is_not_given_back():
    r = rig()
    first, second = r.newcomer("hh"), r.sequence(tokens_of(9))
    assert r.load(first, reserve=0) and r.load(second, reserve=0)
    r.drop(first)
    r.drop(r.sequence([1, 2]))
    r.check()
    assert r.answer() == [second]


# ---- plans that wait for a load ----


def test_a_joined_load_names_the_prefix_with_what_comes():
    r = rig()
    seq = r.newcomer("dhdh")
    on_device = [r.manager.pool.lookup(key) for key in r.manager.prefix_keys(seq.table, seq.tokens)]
    overlapped = r.offload.load_overlapped(seq)
    assert overlapped is not None and overlapped.ticket == r.sent[0].ticket and seq.num_loads == 1
    assert overlapped.block_ids[0::2] == on_device[0::2] and overlapped.block_ids[1::2] == r.sent[0].block_ids
    r.check()
    assert r.answer() == [] and r.offload.take_failed_loads() == []
    again = r.newcomer("hhhhh", first=50)
    assert r.load(again, reserve=10), "a joined load leaves no promise behind"


def test_who_ran_on_a_load_that_failed_is_told_of_once():
    r = rig()
    seq = r.newcomer("hh")
    assert r.offload.load_overlapped(seq) is not None
    assert r.answer((0,), failed=[0]) == [] and r.offload.take_failed_loads() == []
    assert r.answer((1,)) == []
    assert r.offload.take_failed_loads() == [seq] and r.offload.take_failed_loads() == []


@pytest.mark.parametrize("case", ["on disk", "not worth it", "coming already", "no room"])
def test_a_plan_waits_for_no_load_that(case):
    r = rig(disk_keys=4, num_blocks=4)
    seq = r.newcomer("hf" if case == "on disk" else "hh")
    if case == "not worth it":
        r.prices.block = {"load": 4.0}
    elif case == "coming already":
        assert r.load(r.sequence(tokens_of(9)), reserve=0)
    elif case == "no room":
        assert r.manager.pool.allocate(2)
    before = len(r.sent)
    assert r.offload.load_overlapped(seq) is None
    assert len(r.sent) == before and seq.num_loads == 0


# ---- the disk ----


def test_what_lies_on_disk_comes_to_the_host_and_then_to_the_device():
    r = rig(disk_keys=8)
    seq = r.newcomer("hff")
    keys = list(r.manager.prefix_keys(seq.table, seq.tokens))
    assert r.load(seq, reserve=0) and r.load(other := r.sequence(tokens_of(13)), reserve=0)
    (fetch,) = r.sent
    assert (fetch.kind, fetch.keys, fetch.block_ids) == ("fetch", keys[1:], [])
    assert list(r.offload.table_uses()) == list(r.offload.held()) == []
    assert r.answer(ticket=0) == [seq, other]
    assert [r.store.place(key) for key in keys] == ["host"] * 3
    assert r.load(seq, reserve=0) and r.sent[-1].kind == "load" and len(r.sent[-1].block_ids) == 3


def test_a_fetch_for_which_the_host_has_no_room_is_none():
    r = rig(disk_keys=8, host_slots=1)
    filler = r.computed(1, first=80)
    r.offload.store(filler)
    seq = r.newcomer("ff")
    assert not r.load(seq, reserve=0) and len(r.sent) == 1 and seq.num_loads == 0


def test_what_came_to_the_host_goes_on_to_the_disk():
    r = rig(disk_keys=8)
    table = r.computed(2)
    r.offload.store(table)
    r.answer()
    assert [t.kind for t in r.sent] == ["store", "spill"]
    assert sorted(r.sent[1].keys) == sorted(table.keys) and r.sent[1].block_ids == []
    assert list(r.offload.table_uses()) == list(r.offload.held()) == []
    r.answer()
    assert r.offload.counts.blocks == {"store": 2, "load": 0, "spill": 2, "fetch": 0} and not r.offload.is_busy


def test_a_disk_that_fails_is_switched_off_by_one_ranks_word():
    r = rig(disk_keys=8)
    r.offload.store(r.computed(1))
    r.answer()
    r.answer((0,), failed=[0], failure=Failure("source", "something else"))
    assert r.offload.stats(1).disk_disabled is None
    r.answer((1,), failed=[0], failure=Failure("disk", "no space left"))
    assert r.offload.stats(1).disk_disabled == "no space left"


def test_a_disk_error_without_a_disk_is_a_failed_copy():
    r = rig()
    r.offload.store(r.computed(1))
    r.answer(failed=[0], failure=Failure("disk", "no space left"))
    assert r.offload.counts.failed_blocks == 1 and r.offload.stats(1).disk_disabled is None


# ---- stores ----


def test_published_blocks_are_stored_once_the_deeper_the_dearer():
    r = rig()
    costs: list[float] = []
    store = r.store.store

    def noted(blocks: Any, costs_of: Any) -> Any:
        costs.extend(costs_of)
        return store(blocks, costs_of)

    r.store.store = noted  # type: ignore[method-assign]
    table = r.computed(3)
    r.offload.store(table)
    (sent,) = r.sent
    assert sent.kind == "store" and sorted(sent.block_ids) == sorted(table.block_ids) and sent.keys == []
    assert costs == [1.0, 1.0 + SIZE / COST_DEPTH_TOKENS, 1.0 + 2 * SIZE / COST_DEPTH_TOKENS]
    assert r.manager.pool.num_held == 3 and sorted(r.offload.held()) == sorted(table.block_ids)
    assert list(r.offload.table_uses()) == []
    r.check(table)
    r.offload.store(table)
    assert len(r.sent) == 1, "on its way"
    r.answer()
    assert r.manager.pool.num_held == 0 and [r.store.place(key) for key in table.keys] == ["host"] * 3
    r.offload.store(table)
    assert len(r.sent) == 1, "kept"


def test_a_table_without_a_published_block_goes_nowhere():
    r = rig()
    table = r.manager.new_table(None, "")
    assert filled(r.manager, table, 3)
    r.offload.store(table)
    r.offload.swap_out(table)
    counts = r.offload.counts
    assert not r.sent and (counts.swapped_out, counts.recomputed) == (0, 0)


def test_stores_hold_half_of_the_pool_the_heads_first():
    r = rig(num_blocks=9)
    table, other = r.computed(6), r.computed(2, first=50)
    r.offload.store(table)
    assert sorted(r.sent[0].block_ids) == sorted(table.block_ids[:4])
    r.offload.store(other)
    assert len(r.sent) == 1, "no room"
    r.answer()
    r.offload.store(other)
    assert len(r.sent) == 2


@pytest.mark.parametrize(
    ("prices", "is_swapped"),
    [
        ({"store": 1.0, "load": 1.0}, True),
        ({"store": 2.0, "load": 1.9}, True),
        ({"store": 2.0, "load": 2.0}, False),
        ({"store": 5.0, "load": 4.0}, False),
    ],
)
def test_who_gives_way_is_kept_below_when_both_ways_cost_less_than_computing(prices, is_swapped):
    r = rig()
    r.prices.block = prices
    r.offload.swap_out(r.computed(2))
    counts = r.offload.counts
    assert (len(r.sent), counts.swapped_out, counts.recomputed) == (int(is_swapped), int(is_swapped), not is_swapped)


def test_a_forgotten_table_is_found_on_no_tier_also_where_it_is_on_its_way():
    r = rig()
    kept, moving = r.computed(1), r.computed(2, first=50)
    r.offload.store(kept)
    r.answer()
    r.offload.store(moving)
    failing = r.manager.new_table(None, "")
    failing.keys = [kept.keys[0], moving.keys[0]]
    r.offload.forget(failing)
    assert r.store.place(kept.keys[0]) is None
    r.answer()
    assert [r.store.place(key) for key in moving.keys] == [None, "host"]
    assert r.offload.counts.failed_blocks == 1


# ---- what is counted ----


def test_copies_are_timed_by_the_slowest_rank_and_what_they_took_in_all():
    r = rig()
    r.offload.store(r.computed(2))
    r.clock.now_s += 3.0
    r.answer((0,), copy_s=0.5)
    r.answer((1,), copy_s=0.25)
    assert r.prices.observed == [("store", 2, 0.5, 3.0, False)]
    assert r.load(r.newcomer("hh", first=50), reserve=0)
    r.prices.num_steps += 1
    r.answer(copy_s=1.0)
    assert r.prices.observed[1:] == [("load", 2, 1.0, 0.0, True)]
    stats = r.offload.stats(block_bytes=10)
    assert stats.copy_s == {"store": 0.5, "load": 1.0, "spill": 0.0, "fetch": 0.0}
    assert stats.blocks == {"store": 2, "load": 2, "spill": 0, "fetch": 0}
    assert (stats.block_bytes, stats.host_slots, stats.host_blocks, stats.open_tickets) == (10, 16, 4, 0)
    assert (stats.loaded_tokens, stats.failed_blocks, stats.disk_disabled) == (2 * SIZE, 0, None)


# ---- copies that take too long ----


@pytest.mark.parametrize(("block_price", "patience_s"), [(0.0, MIN_PATIENCE_S), (1.0, 2 * PATIENCE)])
def test_who_waits_longer_than_a_copy_should_take_computes(block_price, patience_s):
    r = rig()
    r.prices.block = {"load": block_price}
    seq = r.newcomer("hh")
    assert r.load(seq, reserve=0)
    while patience_s > 0:
        r.clock.now_s += min(1.0, patience_s)
        patience_s -= 1.0
        assert r.overdue() == []
    r.check()
    r.clock.now_s += 0.01
    assert r.overdue() == [seq] and seq.num_loads == MAX_LOADS
    r.check()
    assert r.overdue() == [] and r.offload.is_busy, "the copy goes on"
    assert r.answer() == [] and not r.offload.is_busy


def pass_seconds(r: Rig, seconds: int) -> None:
    """A second a turn: more of one turn would not count."""
    for _ in range(seconds):
        r.clock.now_s += 1.0
        r.overdue()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_rank_that_copies_nothing_loses_its_group_after_its_time(kind):
    r = rig()
    pass_seconds(r, 40)
    if kind == "store":
        r.offload.store(r.computed(2))
    else:
        assert r.load(r.newcomer("hh"), reserve=0)
    r.answer((0,))
    pass_seconds(r, int(STUCK_S) - 1)
    r.clock.now_s += 1.0
    with pytest.raises(GroupLost, match=r"rank\(s\) \[1\] have not copied 2 KV blocks"):
        r.overdue()


def test_time_in_which_this_process_was_stopped_does_not_count():
    r = rig()
    r.offload.store(r.computed(2))
    r.clock.now_s += 10 * STUCK_S
    assert r.overdue() == []


@pytest.mark.parametrize("kind", ["spill", "fetch"])
def test_a_disk_that_answers_nothing_is_switched_off_after_its_time(kind):
    r = rig(disk_keys=8)
    if kind == "spill":
        r.offload.store(r.computed(1))
        r.answer()
    else:
        assert r.load(r.newcomer("f"), reserve=0)
    pass_seconds(r, int(STUCK_S) - 1)
    assert r.offload.stats(1).disk_disabled is None
    pass_seconds(r, 1)
    assert f"a {kind} of 1 blocks has not ended" in (r.offload.stats(1).disk_disabled or "")
