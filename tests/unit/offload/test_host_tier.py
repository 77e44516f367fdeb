"""The host tier's slots against a naive model: no slot twice, pinned ones stay, only whole blocks are found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


KEYS = st.integers(0, 7).map(key)


class Index:
    """The index that a later owner of the memory would read."""

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}

    def write(self, slot: int, key: bytes) -> None:
        assert slot not in self.slots, "written before it was cleared"
        self.slots[slot] = key

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)


class HostTierMachine(RuleBasedStateMachine):
    """`slots`: by slot the key it is being filled with or holds, and which of those."""

    @initialize(num_slots=st.integers(1, 5), policy=st.sampled_from(["lru", "cost"]))
    def start(self, num_slots, policy):
        self.index = Index()
        self.tier = HostTier(num_slots, make_policy(policy), self.index)
        self.num_slots, self.is_lru = num_slots, policy == "lru"
        self.slots: dict[int, tuple[str, bytes]] = {}
        self.pins: list[bytes] = []
        self.used: list[bytes] = []
        self.told: set[bytes] = set()
        self.tier.on_change = self.note_change

    def note_change(self, k):
        (self.told.add if self.tier.has(k) else self.told.discard)(k)

    def slot_of(self, state: str, k: bytes) -> int | None:
        return next((slot for slot, entry in self.slots.items() if entry == (state, k)), None)

    def in_state(self, *states: str) -> list[bytes]:
        return [k for state, k in self.slots.values() if state in states]

    def evictable(self) -> list[bytes]:
        return [k for k in self.in_state("stored") if k not in self.pins]

    @rule(k=KEYS, cost=st.sampled_from([1.0, 2.0]))
    def prepare_store(self, k, cost):
        evictable = sorted(self.evictable(), key=self.used.index)
        slot = self.tier.prepare_store(k, cost)
        if k in self.in_state("stored", "writing", "doomed"):
            assert slot is None
            return
        if len(self.slots) == self.num_slots and not evictable:
            assert slot is None
            return
        assert slot is not None
        if slot in self.slots:
            assert len(self.slots) == self.num_slots, "evicted though a slot was free"
            assert self.slots[slot][1] in evictable, "a slot that is in use"
            assert not self.is_lru or self.slots[slot][1] == evictable[0]
        assert slot not in self.index.slots
        self.slots[slot] = ("writing", k)

    @precondition(lambda self: self.in_state("writing"))
    @rule(data=st.data(), works=st.booleans())
    def end_store(self, data, works):
        k = data.draw(st.sampled_from(self.in_state("writing")))
        slot = self.slot_of("writing", k)
        del self.slots[slot]
        if works:
            self.tier.complete_store(k)
            self.slots[slot] = ("stored", k)
            self.note_use(k)
        else:
            self.tier.fail_store(k)

    @rule(k=KEYS)
    def prepare_load(self, k):
        there = k in self.in_state("stored")
        assert self.tier.prepare_load(k) == there
        if there:
            self.pins.append(k)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), works=st.booleans())
    def end_load(self, data, works):
        k = data.draw(st.sampled_from(self.pins))
        self.pins.remove(k)
        (self.tier.complete_load if works else self.tier.fail_load)(k)
        self.after_pin(k, works)

    @rule(k=KEYS)
    def forget(self, k):
        self.tier.forget(k)
        if k in self.in_state("stored"):
            self.after_pin(k, works=False)

    def after_pin(self, k, works):
        slot = self.slot_of("stored", k)
        slot = self.slot_of("doomed", k) if slot is None else slot
        doomed = not works or self.slots[slot][0] == "doomed"
        if k in self.pins:
            self.slots[slot] = ("doomed" if doomed else "stored", k)
        elif doomed:
            del self.slots[slot]
        else:
            self.note_use(k)

    def note_use(self, k):
        self.used = [other for other in self.used if other != k] + [k]

    @invariant()
    def agree(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check_invariants()
        stored = {slot: k for slot, (state, k) in self.slots.items() if state == "stored"}
        assert {k for k in map(key, range(8)) if self.tier.has(k)} == set(stored.values()) == self.told
        assert all(self.tier.slot(k) == slot for slot, k in stored.items())
        assert self.index.slots == stored, "whoever comes after a crash finds whole blocks and no others"
        assert {k for k in map(key, range(8)) if self.tier.is_writing(k)} == set(self.in_state("writing"))
        free = self.num_slots - len(self.slots)
        assert self.tier.num_available == free + len(self.evictable())


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_failed_load_forgets_a_block_that_others_still_read():
    index = Index()
    tier = HostTier(1, make_policy("lru"), index)
    assert tier.prepare_store(key(1), 1.0) == 0
    tier.complete_store(key(1))
    assert tier.prepare_load(key(1)) and tier.prepare_load(key(1))
    tier.fail_load(key(1))
    assert not index.slots, "a later owner of the memory must not find it"
    assert not tier.has(key(1)) and tier.prepare_store(key(2), 1.0) is None, "its slot is still being read"
    tier.complete_load(key(1))
    assert not tier.has(key(1)) and tier.prepare_store(key(2), 1.0) == 0


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_blocks_of_an_earlier_owner_are_found_and_can_be_evicted(policy):
    tier = HostTier(3, make_policy(policy), found=[(2, key(5)), (0, key(6)), (1, key(5))])
    tier.check_invariants()
    assert tier.has(key(5)) and tier.slot(key(6)) == 0 and tier.num_stored == 2
    assert {tier.prepare_store(key(n), 1.0) for n in range(3)} == {0, 1, 2}
    assert not tier.has(key(5)) and not tier.has(key(6))


def test_a_block_that_lies_twice_in_an_earlier_owners_memory_is_found_once():
    index = Index()
    index.slots = {2: key(5), 1: key(5), 0: key(6)}
    tier = HostTier(3, make_policy("lru"), index, found=[(2, key(5)), (1, key(5)), (0, key(6))])
    tier.check_invariants()
    assert index.slots == {2: key(5), 0: key(6)}
    assert (tier.slot(key(5)), tier.slot(key(6)), tier.num_stored, tier.num_available) == (2, 0, 2, 3)
    assert tier.prepare_store(key(7), 1.0) == 1, "the second one's slot is free"


def test_what_earlier_uses_have_made_dear_is_cheap_again_after_it_was_forgotten():
    """By cost a block counts by its uses; content that was not to be trusted begins anew."""
    for forgotten, left in ((True, 2), (False, 1)):
        tier = HostTier(2, make_policy("cost"))
        for number in (1, 2):
            assert tier.prepare_store(key(number), 1.0) is not None
            tier.complete_store(key(number))
        for number, uses in ((1, 9), (2, 3)):
            for _ in range(uses):
                assert tier.prepare_load(key(number))
                tier.complete_load(key(number))
        if forgotten:
            tier.forget(key(1))
            assert tier.prepare_store(key(1), 1.0) is not None
            tier.complete_store(key(1))
        assert tier.prepare_store(key(3), 1.0) is not None
        assert [number for number in (1, 2) if tier.has(key(number))] == [left]
