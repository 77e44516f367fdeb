"""DevicePlaces: which adapters are on the device: room for the next in line, who is evicted or drains for it.

Room comes from idle residents, least recently used first. If that is not enough, and the line is short, the residents
that have been in use for longest give way: their requests pause, with their KV, and stand in line, for a slice of time
behind those without a first token. So no first token waits for a whole answer. In a line longer than what is on the
device everybody would only wait longer for the end. Nobody pauses in vain: the room must be enough, and who comes must
find a row.

When the line has not moved for longer than a bound, residents in use drain: sequences that were only queued for them
wait in line again, and requests that have run keep them until they end. So the line moves at least once in the bound
plus the longest answer. An adapter serves sequences that waited for it before it drains or gives way.
"""

from collections.abc import Callable, Iterable

from tandem.workers.engine.adapters.adapter_memory import AdapterMemory
from tandem.workers.engine.adapters.adapter_state import Adapter
from tandem.workers.engine.adapters.known_adapters import KnownAdapters
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.base.stats import LOAD_BOUNDS_S
from tandem.workers.messages.transfer import Failure, PlaceAdapter

LOOK_AGAIN_S = 0.05
SLICE_STEPS = 6
"""Steps of use, besides SLICE_S, after which an adapter may give way: to come and go takes two or three."""


class DevicePlaces:
    """Adapters over num_pages device pages. wait_bound_s: seconds without movement of the line before residents in use
    drain for the first in it. slice_s: seconds on the device after which one in use may give way."""

    def __init__(self, known: KnownAdapters, num_pages: int, wait_bound_s: float, slice_s: float) -> None:
        self.memory = AdapterMemory(num_pages)
        self.loads = Histogram(LOAD_BOUNDS_S)
        self.num_evictions = 0
        self._known = known
        self._wait_bound_s = wait_bound_s
        self._slice_s = slice_s
        self._still_since_s: float | None = None
        self._num_waiting = 0
        self._able_to_pause: list[Adapter] = []  # the longest in use first
        self._pausing_for: tuple[Adapter, int] | None = None  # the first in line, and how many pages it lacks

    # ---- placing ----

    def place_all(self, line: list[Adapter], pinned: list[Adapter], now_s: float) -> None:
        """Makes room for adapters on the host, in order; none overtakes the first that lacks room."""
        self._num_waiting, self._able_to_pause, self._pausing_for = len(line), [], None
        for adapter in line:
            if adapter.is_resident:  # it was draining, and is first in line before it was evicted
                self._admit_waiters(adapter, now_s)
            elif adapter.on_host and adapter.move is None:
                if self._still_since_s is None:
                    self._still_since_s = now_s
                if not self._make_room(adapter, now_s):
                    self._known.waited.look_again_at(now_s + LOOK_AGAIN_S)
                    return
                self._still_since_s = None
                self._start(adapter)
        self._still_since_s = None
        for adapter in self._known:
            adapter.is_draining = False  # nobody lacks room
        for adapter in pinned:
            is_ready = adapter.on_host and adapter.move is None and not self._known.is_refused_pin(adapter)
            if is_ready and self._make_room(adapter, now_s):
                self._start(adapter)

    def _start(self, adapter: Adapter) -> None:
        adapter.allocation = self.memory.take(adapter.num_pages)
        assert adapter.allocation is not None, "room was made"
        slot, pages = adapter.allocation
        self._known.start(adapter, PlaceAdapter(adapter=adapter.ref, slot=slot, pages=pages))

    def end_place(self, adapter: Adapter, op: PlaceAdapter, failure: Failure | None, now_s: float) -> None:
        """Notes that every rank has answered: the adapter is on the device, or refused."""
        if failure is not None:
            assert adapter.allocation is not None
            self.memory.give_back(adapter.allocation, 0)
            adapter.allocation = None
            self._known.refuse_moved(adapter, None, op, failure)
            return
        self.loads.observe(adapter.load_s)
        adapter.load_s = 0.0
        tenants = self._known.waited.waiting.tenants
        if waiters := [seq for seq in self._known.waiters(adapter) if not seq.bound_step]:  # who paused pays nothing
            tenants.charge_swap(min(waiters, key=tenants.counter))
        self._admit_waiters(adapter, now_s)

    def _admit_waiters(self, adapter: Adapter, now_s: float) -> None:
        """Admits its waiters, which are pending until they have run."""
        adapter.is_resident, adapter.is_draining = True, False
        adapter.served_s, adapter.placed_s = None, now_s
        adapter.pending = set(self._known.waited.admit(adapter.digest))
        self._known.touch(adapter)

    # ---- room ----

    def _make_room(self, adapter: Adapter, now_s: float) -> bool:
        """Returns whether its pages are free; evicts idle adapters if that is enough, drains others after the bound."""
        need, memory, known = adapter.num_pages, self.memory, self._known
        residents = sorted((a for a in known if a.is_resident), key=lambda a: a.used)
        open_ones = [a for a in residents if not a.is_draining]
        idle = [a for a in open_ones if known.is_idle(a) and not known.is_pinned(a)]
        coming = memory.num_free + memory.num_pending + sum(a.num_pages for a in residents if a.is_draining)
        lacking = need - coming - sum(a.num_pages for a in idle)
        if lacking <= 0:
            victims = idle
        elif self._still_since_s is not None and now_s - self._still_since_s >= self._wait_bound_s:
            victims = sorted((a for a in open_ones if not self._is_guarded(a, now_s)), key=self._staying_power)
        else:
            victims = []
            self._pausing_for = adapter, lacking
            self._able_to_pause = self._choose_to_pause(adapter, open_ones, now_s)
        for victim in victims:
            if coming >= need:
                break
            coming += victim.num_pages
            self._start_draining(victim, now_s)
        for draining in residents:
            if draining.is_draining and known.is_idle(draining):
                self._evict(draining)
        return memory.num_free >= need

    def giving_way(self, may_pause: Callable[[Sequence], bool], *, has_room: bool) -> list[Adapter]:
        """Returns the adapters whose requests should pause for the first in line: no more than make room for it, none
        if they do not, or if it would then wait for a row. See AdmissionRule.giving_way."""
        if not self._able_to_pause or self._pausing_for is None:
            return []
        (first, lacking), chosen = self._pausing_for, list[Adapter]()
        for adapter in self._able_to_pause:
            if lacking > 0 and self._may_pause(adapter) and all(map(may_pause, adapter.used_by())):
                chosen.append(adapter)
                lacking -= adapter.num_pages
        return chosen if lacking <= 0 and (has_room or self._is_before_queue(first)) else []

    def give_way(self, adapters: Iterable[Adapter], now_s: float) -> None:
        """Takes their places from adapters whose requests have paused and wait for them."""
        self._able_to_pause = []
        for adapter in adapters:
            adapter.users.clear()
            adapter.since_s = now_s
            self._evict(adapter)

    def has_just_paused(self, adapter: Adapter) -> bool:
        """Returns whether all that wait for it have paused for others, less than a slice ago: first tokens go first."""
        is_recent = self._known.waited.clock() - adapter.since_s < self._slice_s
        return is_recent and all(seq.bound_step for seq in self._known.waiters(adapter))

    def _choose_to_pause(self, first: Adapter, open_ones: list[Adapter], now_s: float) -> list[Adapter]:
        """Returns the residents that have been in use for a slice at least, the longest first, and whose tenants were
        served no less, and asked for nothing more urgent, than those of the first in line."""
        waiters = self._known.waiters(first)
        if not waiters or self.has_just_paused(first) or self._num_waiting > len(open_ones):
            return []
        now_step = self.memory.done_step
        served, urgency = self._known.waited.least_served(waiters), min(seq.order[0] for seq in waiters)
        able = [
            adapter
            for adapter in open_ones
            if now_s - adapter.in_use_s >= self._slice_s and now_step - adapter.served_step >= SLICE_STEPS
            if self._may_pause(adapter)
            if all(seq.order[0] >= urgency for seq in adapter.used_by())
            if self._known.waited.least_served(adapter.used_by()) >= served
        ]
        return sorted(able, key=lambda adapter: adapter.in_use_s)

    def _is_before_queue(self, first: Adapter) -> bool:
        """Returns whether a sequence that waits for this adapter goes before all that wait for a row."""
        waiting = self._known.waited.waiting
        queued, counter = waiting.peek(), waiting.tenants.counter
        waiters = self._known.waiters(first)
        return queued is None or any((counter(s), s.order) < (counter(queued), queued.order) for s in waiters)

    def _may_pause(self, adapter: Adapter) -> bool:
        """Returns whether nothing but requests that have run holds an adapter, which can come back from the host."""
        is_held = adapter.pending or adapter.is_draining or self._known.is_pinned(adapter)
        is_there = adapter.is_resident and adapter.on_host and adapter.users
        return bool(is_there and not is_held and not self._known.queued(adapter))

    def _staying_power(self, adapter: Adapter) -> tuple[bool, bool, int]:
        return self._known.is_pinned(adapter), not self._known.is_idle(adapter), adapter.used

    def _is_guarded(self, adapter: Adapter, now_s: float) -> bool:
        """Returns whether sequences that waited for it must run before it drains: one in any case, all of them within
        the bound."""
        return bool(adapter.pending) and (adapter.served_s is None or now_s - adapter.placed_s < self._wait_bound_s)

    def _start_draining(self, adapter: Adapter, now_s: float) -> None:
        """Refuses new users; sequences that were only queued wait in line again."""
        adapter.is_draining = True
        if queued := self._known.queued(adapter):
            for seq in queued:
                self._known.waited.block(seq, adapter.digest)
            adapter.since_s = now_s
            adapter.pending.clear()
            self._known.waited.has_changed = True

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.allocation is not None
        self.memory.give_back(adapter.allocation, adapter.last_step)
        adapter.allocation, adapter.is_resident, adapter.is_draining = None, False, False
        self.num_evictions += 1

    def check_invariants(self) -> None:
        """Asserts that memory adds up, and that residents have some."""
        self.memory.check_invariants([a.allocation for a in self._known if a.allocation is not None])
        for adapter in self._known:
            assert not adapter.is_resident or adapter.allocation is not None, "resident nowhere"
