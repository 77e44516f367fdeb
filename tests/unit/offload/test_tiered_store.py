"""Host and disk as one: what moves where, what is pinned meanwhile, what a failure leaves."""

from pathlib import Path

from offload.disk_tier import DiskTier
from offload.eviction import make_policy
from offload.host_tier import HostTier
from offload.tiered_store import MAX_SPILLS, TieredStore


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
    store.host.check_laws()


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
    store.host.check_laws()


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
    store.host.check_laws()
