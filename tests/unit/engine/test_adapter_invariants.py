"""The invariants of adapters hold over random histories; each seeded defect breaks one of them, by name."""

from typing import Any
from unittest import mock

import pytest
from adapter_machine import machine
from builders import harness, request
from fake_adapters import AdapterPlan
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tandem.workers.engine.adapters.adapter_cache import AdapterCache
from tandem.workers.engine.adapters.adapter_memory import AdapterMemory, Allocation
from tandem.workers.engine.adapters.host_copies import HostCopies
from tandem.workers.engine.base.blockers import Awaited
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.engine.waiting.max_loras import MaxLoras
from tandem.workers.messages.transfer import PlaceAdapter, TransferResult

TestAdapterInvariants = machine().TestCase
TestAdapterInvariants.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

HUNT = settings(
    max_examples=4000, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


def assert_caught(defect: type[AdapterCache], because: str, **parts: Any) -> None:
    with pytest.raises((AssertionError, KeyError), match=because):
        run_state_machine_as_test(machine(defect, **parts), settings=HUNT)


@pytest.mark.chaos
def test_pages_reused_under_a_plan_in_flight_are_caught():
    class Hasty(AdapterMemory):
        def give_back(self, place: Allocation, last_step: int) -> None:
            super().give_back(place, 0)

    class Defect(AdapterCache):
        def __init__(self, settings: Any, num_pages: int, *args: Any, **named: Any) -> None:
            super().__init__(settings, num_pages, *args, **named)
            self._places.memory = Hasty(num_pages)

    assert_caught(Defect, "under a plan in flight|while its pages are being written|while it is being placed")


@pytest.mark.chaos
def test_a_slot_whose_last_plan_is_forgotten_is_caught():
    class Defect(AdapterCache):
        def unbound(self, seq: Sequence) -> None:
            pass

    assert_caught(Defect, "under a plan in flight|while its pages are being written|while it is being placed")


def test_a_lost_user_is_caught():
    class Defect(AdapterCache):
        def unbound(self, seq: Sequence) -> None:
            super().unbound(seq)
            if seq.adapter is not None:
                self._known.of(seq).users.pop(seq.state, None)

    assert_caught(Defect, "is not a user|without its adapter|is not known|only a sequence that has not run")


def test_a_user_that_never_goes_is_caught():
    class Defect(AdapterCache):
        def leave(self, state: RequestState) -> None:
            if len(state.sequences) == 1:
                super().leave(state)

    assert_caught(Defect, "a request that has ended uses an adapter")


def test_a_plan_before_every_rank_has_its_part_is_caught():
    class Defect(TransferManager):
        def take(self, result: TransferResult) -> None:
            """The first rank's word for all; the others' come too late to count."""
            opened = self._open.get(result.ticket)
            if opened is not None and isinstance(opened.outcome.op, PlaceAdapter):
                opened.awaiting = {result.rank}
            if opened is not None:
                super().take(result)

    because = "is being placed|knows no slot|pages are being written|its pages hold|beside a place"
    assert_caught(AdapterCache, because, transfers=Defect)


def test_more_host_copies_than_allowed_are_caught():
    class NeverDrops(HostCopies):
        def _drop_one(self, *, for_waiters: bool) -> bool:
            return True

    class Defect(AdapterCache):
        def __init__(self, settings: Any, num_pages: int, *args: Any, **named: Any) -> None:
            super().__init__(settings, num_pages, *args, **named)
            self._copies = NeverDrops(self._known, settings.max_cpu_loras, num_pages)

    assert_caught(Defect, "more host copies than --max-cpu-loras")


def wait_of_another(pool: type[AdapterCache]) -> float:
    """Seconds that a request for one adapter waits while requests for another, which fills the device, never pause."""
    h = harness(adapters=AdapterPlan(num_pages=2), adapter_cache=pool, num_blocks=200)
    h.add(request("first", 4, 20, adapter="a"))
    while not h.engine.stats().running:
        h.step()
    h.add(request("b", 4, 4, adapter="b"))
    begun_s = h.clock.now_s
    for i in range(1000):
        if ("b", 0) in h.sink.tokens:
            return h.clock.now_s - begun_s
        if i % 5 == 0:
            h.add(request(f"flow{i}", 4, 12, adapter="a"))
        h.step()
    return float("inf")


def test_a_starved_adapter_is_caught():
    class NobodyPauses(AdapterCache):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "slice_s": float("inf")})

    class Defect(NobodyPauses):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "wait_bound_s": float("inf")})

    assert 0.2 < wait_of_another(AdapterCache) < 0.6, "a slice, then the copy"
    assert 1.0 < wait_of_another(NobodyPauses) < 1.5, "the bound, then what ran, then the copy"
    assert wait_of_another(Defect) == float("inf")


def steps_until_its_turn(turns: type[MaxLoras]) -> float:
    """Steps that a request for a third adapter waits while those for two others, which have all turns, never pause."""
    with mock.patch("tandem.workers.engine.build_engine.MaxLoras", turns):
        h = harness(adapters=AdapterPlan(num_pages=20, max_loras=1), num_blocks=200)
    for adapter in "abc":
        h.add(request(f"bring-{adapter}", 4, 2, adapter=adapter))
    h.run()
    for i in range(400):
        if i % 4 == 0:
            h.add(request(f"flow{i}", 4, 12, adapter="ab"[i // 4 % 2]))
        if i == 100:
            h.add(request("c", 4, 4, adapter="c"))
        if ("c", 0) in h.sink.tokens:
            return i - 100
        h.step()
    return float("inf")


def test_an_adapter_that_max_loras_never_lets_into_a_step_is_caught():
    class NobodyDrains(MaxLoras):
        def before_row(self, seq: Sequence) -> Awaited | None:
            awaited = super().before_row(seq)
            self._draining = None
            return awaited

        def check_invariants(self, running: list[Sequence]) -> None:
            pass

    assert steps_until_its_turn(MaxLoras) < 40, "as long as what ran with one of them, in every second step"
    assert steps_until_its_turn(NobodyDrains) == float("inf")
