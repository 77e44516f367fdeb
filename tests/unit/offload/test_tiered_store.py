"""The store over host and disk: moves between tiers, pins during a move, and the state after a failure."""

from pathlib import Path

from tandem.offload.kv.disk_tier import DiskTier
from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tiered_store import MAX_SPILLS, TieredStore


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def store_of(num_slots: int = 4, disk_keys: int = 0) -> TieredStore:
    disk = DiskTier(Path("nowhere"), disk_keys, 1) if disk_keys else None
    return TieredStore(HostTier(num_slots, make_policy("lru")), disk)


def put(store: TieredStore, *numbers: int) -> None:
    ticket = store.store([(key(n), n) for n in numbers], [1.0] * len(numbers))
    assert ticket is not None
    store.complete(ticket, set())


def test_a_store_larger_than_the_host_keeps_the_head_of_the_prefix():
    """Tails without their heads would never be found."""
    store = store_of(num_slots=3)
    ticket = store.store([(key(n), 10 + n) for n in range(8)], [1.0] * 8)
    assert ticket is not None and sorted(ticket.keys) == [key(0), key(1), key(2)]
    assert sorted(ticket.block_ids) == [10, 11, 12]
    store.complete(ticket, set())
    put(store, 50)
    assert [store.place(key(n)) for n in range(3)] == ["host", "host", None], "the tail goes first"


def test_a_failed_place_is_found_nowhere_and_the_others_are():
    store = store_of()
    ticket = store.store([(key(n), n) for n in range(3)], [1.0] * 3)
    assert ticket is not None and store.place(key(0)) is None and store.is_kept(key(0))
    store.complete(ticket, {ticket.keys.index(key(1))})
    assert [store.place(key(n)) for n in range(3)] == ["host", None, "host"]
    load = store.load([key(0), key(2)], [7, 8])
    store.complete(load, {0})
    assert [store.place(key(n)) for n in range(3)] == [None, None, "host"]
    store.host.check_invariants()


def test_what_comes_to_the_host_goes_on_to_the_disk_and_comes_back():
    store = store_of(num_slots=2, disk_keys=10)
    put(store, 1, 2)
    spill = store.spill()
    assert spill is not None and set(spill.keys) == {key(1), key(2)} and store.spill() is None
    assert store.store([(key(3), 3)], [1.0]) is None, "slots that a spill reads are not given out"
    store.complete(spill, set())
    put(store, 3, 4)
    assert [store.place(key(n)) for n in (1, 2, 3)] == ["disk", "disk", "host"]
    fetch = store.fetch([key(1), key(2)], [1.0, 1.0])
    assert fetch is not None and fetch.keys == [key(1), key(2)] and store.place(key(1)) == "disk"
    store.complete(fetch, {1})
    assert [store.place(key(n)) for n in (1, 2)] == ["host", None], "a file that could not be read is not asked again"


def test_a_fetch_takes_what_finds_a_slot_from_the_head_on():
    store = store_of(num_slots=2, disk_keys=10)
    put(store, 1, 2)
    spill = store.spill()
    assert spill is not None
    store.complete(spill, set())
    put(store, 3, 4)
    pinned = store.load([key(3)], [0])
    fetch = store.fetch([key(1), key(2)], [1.0, 1.0])
    assert fetch is not None and fetch.keys == [key(1)]
    assert store.fetch([key(2)], [1.0]) is None
    store.complete(fetch, set())
    store.complete(pinned, set())
    store.host.check_invariants()


def test_a_failed_disk_has_nothing_and_moves_under_way_still_end():
    store = store_of(num_slots=4, disk_keys=10)
    put(store, 1)
    first = store.spill()
    assert first is not None and store.disk is not None
    store.complete(first, set())
    put(store, 2)
    second = store.spill()
    assert second is not None
    store.disk.disable("full")
    store.complete(second, {0})
    put(store, 3)
    assert store.spill() is None and [store.place(key(n)) for n in (1, 2, 3)] == ["host"] * 3
    store.host.forget(key(1))
    assert store.place(key(1)) is None


def test_few_spills_are_under_way_and_few_wait():
    """A disk slower than the stores: the newest blocks go first, and what waits is bounded by the host's slots."""
    store = store_of(num_slots=200, disk_keys=5000)
    for start in range(0, 4000, 100):
        put(store, *range(start, start + 100))
    assert len(store._to_spill) == 200
    ticket = store.spill()
    assert ticket is not None and len(ticket.keys) == MAX_SPILLS and store.spill() is None
    store.complete(ticket, set())
    assert store.spill() is not None


def test_a_forgotten_block_is_found_on_no_tier():
    store = store_of(num_slots=4, disk_keys=10)
    put(store, 1, 2)
    spill = store.spill()
    assert spill is not None
    store.complete(spill, set())
    load = store.load([key(1)], [0])
    store.forget(key(1))
    store.forget(key(9))
    assert [store.place(key(n)) for n in (1, 2)] == [None, "host"]
    store.complete(load, set())
    assert store.place(key(1)) is None and store.host.num_stored == 1
    store.host.check_invariants()


def test_tickets_have_numbers_of_their_own_and_say_what_goes_where():
    store = store_of(num_slots=3, disk_keys=10)
    stored = store.store([(key(n), 10 + n) for n in (1, 2)], [1.0, 1.0])
    assert stored is not None
    store.complete(stored, set())
    slots = {k: store.host.slot(k) for k in stored.keys}
    assert dict(zip(stored.keys, stored.slots, strict=True)) == slots and len(set(slots.values())) == 2
    assert dict(zip(stored.keys, stored.block_ids, strict=True)) == {key(1): 11, key(2): 12}
    loaded = store.load([key(2), key(1)], [7, 8])
    assert (loaded.keys, loaded.block_ids) == ([key(2), key(1)], [7, 8])
    assert loaded.slots == [slots[key(2)], slots[key(1)]]
    spilled = store.spill()
    assert spilled is not None and (spilled.block_ids, spilled.dropped) == ([], [])
    assert dict(zip(spilled.keys, spilled.slots, strict=True)) == slots
    for ticket in (loaded, spilled):
        store.complete(ticket, set())
    put(store, 3, 4, 5)
    fetched = store.fetch([key(1)], [1.0])
    assert fetched is not None and len(fetched.slots) == 1
    store.complete(fetched, set())
    assert fetched.slots == [store.host.slot(key(1))] and store.place(key(1)) == "host"


def test_a_fetch_ends_before_a_key_that_the_disk_has_lost_or_that_finds_no_slot():
    store = TieredStore(HostTier(2, make_policy("lru")), DiskTier(Path("nowhere"), 2, 1, [key(1), key(2)]))
    fetch = store.fetch([key(1), key(9), key(2)], [1.0] * 3)
    assert fetch is not None and fetch.keys == [key(1)]
    pinned = store.store([(key(5), 0)], [1.0])
    assert pinned is not None and store.fetch([key(2)], [1.0]) is None
    assert store.disk is not None and store.disk.prepare_store(key(6)) == [key(2)], "it is not read, so it may go"


def test_a_spill_passes_over_what_is_gone_from_the_host_or_on_disk_already():
    disk = DiskTier(Path("nowhere"), 10, 1, [key(3)])
    found = [(slot, key(number)) for slot, number in enumerate((1, 2, 3, 4))]
    store = TieredStore(HostTier(5, make_policy("lru"), found=found), disk)
    store.host.forget(key(4))
    spill = store.spill()
    assert spill is not None and spill.keys == [key(2), key(1)]


def test_a_spill_passes_over_what_the_disk_cannot_take_now():
    """A file that a reader found corrupt, while another reads it still."""
    disk = DiskTier(Path("nowhere"), 10, 1, [key(2)])
    store = TieredStore(HostTier(5, make_policy("lru"), found=[(0, key(1)), (1, key(2))]), disk)
    assert disk.prepare_load(key(2)) and disk.prepare_load(key(2))
    disk.fail_load(key(2))
    spill = store.spill()
    assert spill is not None and spill.keys == [key(1)]


def test_stores_that_fail_take_no_place_among_those_that_wait_for_the_disk():
    store = store_of(num_slots=2, disk_keys=10)
    put(store, 1)
    for number in (2, 3):
        ticket = store.store([(key(number), number)], [1.0])
        assert ticket is not None
        store.complete(ticket, {0})
    spill = store.spill()
    assert spill is not None and spill.keys == [key(1)]


def test_what_the_disk_drops_for_new_blocks_is_told_with_them():
    disk = DiskTier(Path("nowhere"), 1, 1, [key(9)])
    store = TieredStore(HostTier(2, make_policy("lru")), disk)
    put(store, 1)
    spill = store.spill()
    assert spill is not None and (spill.keys, spill.dropped) == ([key(1)], [key(9)])
