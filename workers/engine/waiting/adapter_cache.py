"""LoRA adapters of one group, for the scheduler: which are on the device, which sequences wait, which are evicted.

Each content (digest) is in one state on the device, and beside that has a host copy on every rank or has none:

    unknown --fetch--> on host --place--> resident --close--> draining --last user ends--> on host or unknown
       `--error--> refused      `--error--> refused  `------- idle, and its room is wanted -------^

A sequence whose adapter is not resident is blocked. Adapters with waiters form a line (least served
tenant, then longest wait); those on the host get room in that order. Room comes from idle residents, least recently
used first. When the line has not moved for longer than a bound, residents in use drain: sequences that were only queued
for them wait in line again, and requests that have run keep them until they end. So the line moves at least once in the
bound plus the longest answer. An adapter serves sequences that waited for it before it drains. Tiers of adapters and
their eviction are S-LoRA's (Sheng et al. 2023). Owned by the engine's thread; moves no bytes (TransferManager).
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from tandem.configs.schema import LoraSettings
from tandem.workers.engine.base.blockers import Blocker, Event
from tandem.workers.engine.base.sequence import RequestState, Sequence, Status
from tandem.workers.engine.base.stats import LOAD_BOUNDS_S, AdapterStats, Histogram
from tandem.workers.engine.transfers.transfer_manager import TransferManager, TransferOutcome
from tandem.workers.engine.waiting.adapter_memory import AdapterMemory
from tandem.workers.engine.waiting.adapter_state import Adapter, AdapterEvents, AdapterOp, Move, Refusals
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import (
    DropAdapter,
    Failure,
    FetchAdapter,
    LaneKind,
    PlaceAdapter,
    source_lane,
)

log = logging.getLogger("tandem.engine")
UNREADABLE = "its files cannot be read at the moment, or are not those that were listed"
WAIT_BOUND_S = 1.0
"""Seconds without movement of the line before residents in use drain for the first in it. While it moves, draining
only takes adapters from the requests that come for them next, which under load costs more than it gains."""
MAX_FETCHES = 4
"""In each lane. Ranks may read one source after the other: an urgent adapter must not wait behind many others."""
LATE_FETCH_S = 600.0
LOOK_AGAIN_S = 0.05


class AdapterCache:
    """Adapters over num_pages device pages. The sequences that wait for them are in `waiting`.

    withdraw: blocks a sequence that was only queued until its adapter is on the device again.
    """

    def __init__(
        self,
        settings: LoraSettings,
        num_pages: int,
        transfers: TransferManager,
        waiting: WaitingQueue,
        withdraw: Callable[[Sequence], None],
        clock: Callable[[], float],
        wait_bound_s: float = WAIT_BOUND_S,
    ) -> None:
        self._max_on_host = settings.max_cpu_loras
        self._memory = AdapterMemory(num_pages)
        self._transfers = transfers
        self._outcomes: list[TransferOutcome] = []
        self._clock = clock
        self._waiting = waiting
        self._withdraw = withdraw
        self._wait_bound_s = wait_bound_s
        self._known: dict[str, Adapter] = {}
        self._pinned: dict[str, AdapterRef] = {}
        self._refusals = Refusals(clock)
        self._uses = 0
        self._has_changed = False
        self._is_lacking = False
        self._still_since_s: float | None = None
        self._look_again_s = math.inf
        self._loads = Histogram(LOAD_BOUNDS_S)
        self._num_evictions = 0

    # ---- queries ----

    @property
    def look_again_s(self) -> float:
        """The moment of the clock from which advance() has something to do without an answer; inf: none."""
        return 0.0 if self._has_changed else self._look_again_s

    def check(self, ref: AdapterRef) -> None:
        """Raises RequestRefused for a recently refused adapter, with the name that the request has for it."""
        refusal = self._refusals.of(ref)
        if refusal is not None:
            raise refusal.of(ref)

    def residency(self) -> dict[str, str]:
        """The nearest tier that has it, by digest: "device" or "host"."""
        tiers = {digest: "host" for digest, adapter in self._known.items() if adapter.on_host}
        return tiers | {digest: "device" for digest, adapter in self._known.items() if adapter.is_resident}

    def stats(self) -> AdapterStats:
        """A frozen copy of all counts; O(adapters)."""
        known = self._known.values()
        loads = self._loads.snapshot()
        return AdapterStats(
            num_pages=self._memory.num_pages,
            free_pages=self._memory.num_free,
            resident=sum(adapter.is_resident for adapter in known),
            on_host=sum(adapter.on_host for adapter in known),
            in_use=sum(bool(adapter.users or self._queued(adapter)) for adapter in known),
            waiting=sum(len(self._waiters(adapter)) for adapter in known),
            loads=loads.count,
            load_s=loads,
            evictions=self._num_evictions,
            refused=self._refusals.count,
        )

    # ---- the scheduler's side ----

    def admit(self, seq: Sequence) -> bool:
        """Returns whether its adapter is on the device; if not, the sequence is to be blocked by its digest."""
        ref = _ref_of(seq)
        adapter = self._known.setdefault(ref.digest, Adapter(ref))
        holds = seq.state in adapter.users
        if adapter.is_resident and (holds or not adapter.is_draining):
            self._touch(adapter)
            return True
        if not self._waiters(adapter):
            adapter.since_s = self._clock()
        self._has_changed = True
        return False

    def bind(self, seq: Sequence) -> int:
        """Notes that it has a row, and that its request uses the adapter until leave(); returns the slot."""
        adapter = self._of(seq)
        assert adapter.is_resident and adapter.allocation is not None, "a row without its adapter"
        adapter.pending.discard(seq)
        adapter.has_served = True
        adapter.users.add(seq.state)
        self._touch(adapter)
        return adapter.allocation.slot

    def unbind(self, seq: Sequence) -> None:
        """Notes that its row is free; plans up to seq.last_step name the slot."""
        adapter = self._of(seq)
        adapter.last_step = max(adapter.last_step, seq.last_step)
        self._touch(adapter)

    def drop(self, seq: Sequence) -> None:
        """Notes that a waiting sequence has ended."""
        adapter = self._known.get(_ref_of(seq).digest)
        if adapter is not None:
            adapter.pending.discard(seq)
            self._has_changed |= self._is_lacking

    # ---- the engine's side ----

    def leave(self, state: RequestState) -> None:
        """A request has ended, with all its sequences."""
        ref = state.request.adapter
        adapter = None if ref is None else self._known.get(ref.digest)
        if adapter is not None:
            adapter.users.discard(state)
            self._has_changed |= self._is_lacking

    def set_pinned(self, refs: Iterable[AdapterRef]) -> None:
        """Replaces the pinned adapters: they are loaded when there is room, and evicted last."""
        self._pinned = {ref.digest: ref for ref in refs}
        for digest, ref in self._pinned.items():
            self._known.setdefault(digest, Adapter(ref))
        self._has_changed = True

    def advance(self, done_step: int, late: Collection[int] = ()) -> AdapterEvents:
        """Applies the ends of moves, frees pages that only plans up to done_step named, and starts possible moves.
        late: tickets that TransferManager.overdue() has named."""
        events = AdapterEvents([], [])
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            self._finish(outcome, events)
            self._has_changed = True
        self._note_late(late)
        self._has_changed |= self._memory.retire(done_step)
        now_s = self._clock()
        if self._has_changed or now_s >= self._look_again_s:
            self._has_changed = False
            self._look_again_s = math.inf
            self._advance(now_s, events)
        return events

    # ---- moving ----

    def _advance(self, now_s: float, events: AdapterEvents) -> None:
        line = sorted((a for a in self._known.values() if self._waiters(a)), key=self._place_in_line)
        pinned = [a for digest in self._pinned if not self._waiters(a := self._known[digest]) and not a.is_resident]
        self._fetch_all(line, pinned)
        self._place_all(line, pinned, now_s, events)
        self._refuse_late_fetches(events)
        for digest in [d for d, a in self._known.items() if self._is_gone(a) and d not in self._pinned]:
            del self._known[digest]
        self._is_lacking = any(self._waiters(a) for a in self._known.values()) or bool(pinned)

    def _place_in_line(self, adapter: Adapter) -> tuple[float, float]:
        return min(map(self._waiting.tenants.counter, self._waiters(adapter))), adapter.since_s

    def _fetch_all(self, line: list[Adapter], pinned: list[Adapter]) -> None:
        """Starts fetches to the host, in order, up to MAX_FETCHES in a lane and while there is room. What nobody waits
        for takes no room from the line: it is dropped when it comes and there is none (_make_host_room)."""
        in_time = [a for a in self._known.values() if a.move is not None and a.move.is_fetch and not a.move.is_late]
        in_lane = Counter(source_lane(a.ref) for a in in_time)
        num_waited = sum(bool(self._waiters(a)) for a in in_time)
        room = self._max_on_host - sum(a.on_host for a in self._known.values()) - num_waited
        for adapter in line:
            if adapter.on_host or adapter.move is not None or adapter.is_resident:
                continue
            ref = _ref_of(next(iter(self._waiters(adapter))))
            if in_lane[source_lane(ref)] >= MAX_FETCHES:
                continue
            while room <= 0:
                if not self._drop_one(for_waiters=True):
                    return
                room += 1
            room -= 1
            adapter.ref = ref
            self._start_fetch(adapter, in_lane)
        room -= len(in_time) - num_waited
        for adapter in pinned:
            is_there = adapter.on_host or adapter.move is not None or self._is_refused_pin(adapter)
            if is_there or in_lane[source_lane(adapter.ref)] >= MAX_FETCHES:
                continue
            while room <= 0:
                if not self._drop_one(for_waiters=False):
                    return
                room += 1
            room -= 1
            self._start_fetch(adapter, in_lane)

    def _start_fetch(self, adapter: Adapter, in_lane: Counter[LaneKind]) -> None:
        in_lane[source_lane(adapter.ref)] += 1
        adapter.load_s = 0.0
        self._start(adapter, FetchAdapter(adapter=adapter.ref), late_s=LATE_FETCH_S)

    def _make_host_room(self, arrived: Adapter) -> None:
        """Drops a copy, if need be the one that has arrived, when nobody waited for its fetch and the room is taken."""
        is_over = sum(a.on_host for a in self._known.values()) > self._max_on_host
        if is_over and not self._drop_one(for_waiters=bool(self._waiters(arrived))):
            self._drop_copy(arrived)

    def _drop_one(self, *, for_waiters: bool) -> bool:
        """Makes room on the host: the copy least recently used, of a resident or of one that nobody waits for. A pinned
        one goes for waiters only."""

        def is_kept(adapter: Adapter) -> bool:
            return adapter.ref.digest in self._pinned and not adapter.is_resident

        on_host = [a for a in self._known.values() if a.on_host]
        fit = [a for a in on_host if a.move is None and (a.is_resident or not self._waiters(a))]
        fit = [a for a in fit if for_waiters or not is_kept(a)]
        if not fit:
            return False
        self._drop_copy(min(fit, key=lambda a: (is_kept(a), a.used)))
        return True

    def _drop_copy(self, adapter: Adapter) -> None:
        adapter.on_host = False
        self._start(adapter, DropAdapter(adapter=adapter.ref))

    def _place_all(self, line: list[Adapter], pinned: list[Adapter], now_s: float, events: AdapterEvents) -> None:
        """Makes room for adapters on the host, in order; none overtakes the first that lacks room."""
        for adapter in line:
            if adapter.is_resident:  # it was draining, and is first in line before it was evicted
                self._admit_waiters(adapter, now_s, events)
            elif adapter.on_host and adapter.move is None:
                if self._still_since_s is None:
                    self._still_since_s = now_s
                if not self._make_room(adapter, now_s):
                    self._look_again_s = min(self._look_again_s, now_s + LOOK_AGAIN_S)
                    return
                self._still_since_s = None
                self._start_place(adapter)
        self._still_since_s = None
        for adapter in self._known.values():
            adapter.is_draining = False  # nobody lacks room
        for adapter in pinned:
            is_ready = adapter.on_host and adapter.move is None and not self._is_refused_pin(adapter)
            if is_ready and self._make_room(adapter, now_s):
                self._start_place(adapter)

    def _start_place(self, adapter: Adapter) -> None:
        adapter.allocation = self._memory.take(adapter.num_pages)
        assert adapter.allocation is not None, "room was made"
        slot, pages = adapter.allocation
        self._start(adapter, PlaceAdapter(adapter=adapter.ref, slot=slot, pages=pages))

    def _start(self, adapter: Adapter, op: AdapterOp, late_s: float = math.inf) -> None:
        adapter.move = Move(self._transfers.start(op, self._note_outcome, late_s=late_s), op)

    def _make_room(self, adapter: Adapter, now_s: float) -> bool:
        """Returns whether its pages are free; evicts idle adapters if that is enough, drains others after the bound."""
        need, memory = adapter.num_pages, self._memory
        residents = sorted((a for a in self._known.values() if a.is_resident), key=lambda a: a.used)
        open_ones = [a for a in residents if not a.is_draining]
        idle = [a for a in open_ones if self._is_idle(a) and a.ref.digest not in self._pinned]
        coming = memory.num_free + memory.num_pending + sum(a.num_pages for a in residents if a.is_draining)
        if coming + sum(a.num_pages for a in idle) >= need:
            victims = idle
        elif self._still_since_s is not None and now_s - self._still_since_s >= self._wait_bound_s:
            victims = sorted((a for a in open_ones if not self._is_guarded(a, now_s)), key=self._staying_power)
        else:
            victims = []
        for victim in victims:
            if coming >= need:
                break
            coming += victim.num_pages
            self._start_draining(victim, now_s)
        for draining in residents:
            if draining.is_draining and self._is_idle(draining):
                self._evict(draining)
        return memory.num_free >= need

    def _staying_power(self, adapter: Adapter) -> tuple[bool, bool, int]:
        return adapter.ref.digest in self._pinned, not self._is_idle(adapter), adapter.used

    def _is_guarded(self, adapter: Adapter, now_s: float) -> bool:
        """Sequences that waited for it run before it drains: one in any case, all of them within the bound."""
        return bool(adapter.pending) and (not adapter.has_served or now_s - adapter.placed_s < self._wait_bound_s)

    def _start_draining(self, adapter: Adapter, now_s: float) -> None:
        """Refuses new users; sequences that were only queued wait in line again."""
        adapter.is_draining = True
        if queued := self._queued(adapter):
            for seq in queued:
                self._withdraw(seq)
            adapter.since_s = now_s
            adapter.pending.clear()
            self._has_changed = True

    def _admit_waiters(self, adapter: Adapter, now_s: float, events: AdapterEvents) -> None:
        """Admits its waiters, which are pending until they have run."""
        adapter.is_resident, adapter.is_draining = True, False
        adapter.has_served, adapter.placed_s = False, now_s
        ready = self._waiting.unblock(Event(Blocker.ADAPTER, adapter.digest))
        adapter.pending = set(ready)
        events.ready.extend(ready)
        self._touch(adapter)

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.allocation is not None
        self._memory.give_back(adapter.allocation, adapter.last_step)
        adapter.allocation, adapter.is_resident, adapter.is_draining = None, False, False
        self._num_evictions += 1

    # ---- ends of moves ----

    def _note_outcome(self, outcome: TransferOutcome) -> None:
        """Every rank has answered: advance() does what follows."""
        self._outcomes.append(outcome)

    def _finish(self, outcome: TransferOutcome, events: AdapterEvents) -> None:
        op, failure, now_s = outcome.op, outcome.failure, self._clock()
        assert isinstance(op, FetchAdapter | PlaceAdapter | DropAdapter), "blocks are not adapters"
        adapter = self._known[op.adapter.digest]
        assert adapter.move is not None and adapter.move.ticket == op.ticket, "one move of an adapter at a time"
        adapter.move = None
        adapter.load_s += now_s - outcome.began_s
        if isinstance(op, FetchAdapter):
            self._end_fetch(adapter, op, outcome, events)
        elif isinstance(op, PlaceAdapter) and failure is not None:
            assert adapter.allocation is not None
            self._memory.give_back(adapter.allocation, 0)
            adapter.allocation = None
            self._refuse_moved(adapter, None, op, failure, events)
        elif isinstance(op, PlaceAdapter):
            self._loads.observe(adapter.load_s)
            adapter.load_s = 0.0
            tenants = self._waiting.tenants
            if waiters := self._waiters(adapter):
                tenants.charge_swap(min(waiters, key=tenants.counter))
            self._admit_waiters(adapter, now_s, events)

    def _end_fetch(self, adapter: Adapter, op: FetchAdapter, outcome: TransferOutcome, events: AdapterEvents) -> None:
        failure = outcome.failure
        adapter.on_host, adapter.num_pages = failure is None, max(1, outcome.pages)
        if failure is not None:
            self._refuse_moved(adapter, op.adapter.source, op, failure, events)
            if outcome.num_done:
                self._drop_copy(adapter)
        elif adapter.num_pages > self._memory.num_pages:
            have = self._memory.num_pages
            message = f"it takes {adapter.num_pages} pages of device memory, --lora-memory-bytes holds {have}"
            self._refuse(adapter, None, message, events)
            self._drop_copy(adapter)
        else:
            self._make_host_room(adapter)

    def _refuse_moved(
        self, adapter: Adapter, source: str | None, op: AdapterOp, failure: Failure, events: AdapterEvents
    ) -> None:
        """Refuses it after a rank failed to move it. Clients read only failures of its content."""
        ref, what = op.adapter, "fetch" if isinstance(op, FetchAdapter) else "place"
        log.warning("%s of adapter %s (%.12s) failed: %s", what, ref.name, ref.digest, failure.message)
        is_passing = failure.kind != "content"
        self._refuse(adapter, source, UNREADABLE if is_passing else failure.message, events, is_passing=is_passing)

    def _refuse(
        self, adapter: Adapter, source: str | None, reason: str, events: AdapterEvents, *, is_passing: bool = False
    ) -> None:
        """Unblocks its waiters with that source (None: any); the engine ends their requests."""
        refusal = self._refusals.add(adapter.ref, source, reason, is_passing=is_passing)
        refused = Event(Blocker.ADAPTER, adapter.digest, Failure("source" if is_passing else "content", reason))
        for seq in self._waiting.unblock(refused, only=lambda seq: source in (None, _ref_of(seq).source)):
            events.refused.append((seq.state, refusal.of(_ref_of(seq))))

    def _is_refused_pin(self, adapter: Adapter) -> bool:
        """Whether only a pin wants it, and its refusal is still in force."""
        refusal = None if self._waiters(adapter) else self._refusals.of(adapter.ref)
        if refusal is not None:
            self._look_again_s = min(self._look_again_s, refusal.until_s)
        return refusal is not None

    def _refuse_late_fetches(self, events: AdapterEvents) -> None:
        """Refuses waiters, whatever their source, while one source does not answer: the ticket stays open, and an
        adapter has one move at a time."""
        for adapter in self._known.values():
            if adapter.move is not None and adapter.move.is_late and self._waiters(adapter):
                reason = f"a source of it has not been read in {LATE_FETCH_S:.0f} s"
                self._refuse(adapter, None, reason, events, is_passing=True)

    def _note_late(self, late: Collection[int]) -> None:
        for adapter in self._known.values() if late else ():
            move = adapter.move
            if move is not None and not move.is_late and move.ticket in late:
                move.is_late = self._has_changed = True

    # ---- small things ----

    def _of(self, seq: Sequence) -> Adapter:
        adapter = self._known.get(_ref_of(seq).digest)
        assert adapter is not None, "an adapter that is used is not known"
        return adapter

    def _waiters(self, adapter: Adapter) -> Collection[Sequence]:
        return self._waiting.blocked_by(Blocker.ADAPTER, adapter.digest).keys()

    def _queued(self, adapter: Adapter) -> list[Sequence]:
        """Returns the sequences that it admitted to the queue and that may still wait for it again."""
        return [seq for seq in self._waiting.with_adapter(adapter.digest) if seq.state not in adapter.users]

    def _is_idle(self, adapter: Adapter) -> bool:
        return adapter.is_resident and not adapter.users and not self._queued(adapter)

    def _is_gone(self, adapter: Adapter) -> bool:
        """Whether it has no user or waiter, and no rank holds it."""
        wanted = self._waiters(adapter) or adapter.users or self._queued(adapter)
        return not (wanted or adapter.on_host or adapter.move or adapter.allocation)

    def _touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.used = self._uses

    # ---- invariants, for tests ----

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """Asserts that memory adds up, and that users are counted as they are. running: all sequences with a row."""
        self._memory.check_invariants([a.allocation for a in self._known.values() if a.allocation is not None])
        for adapter in self._known.values():
            queued = self._queued(adapter)
            waits = all(seq.status is Status.WAITING for seq in (*self._waiters(adapter), *queued))
            assert waits, "in line though it does not wait"
            users = queued or adapter.users
            assert not users or adapter.is_resident, "users of an adapter that is not on the device"
            assert adapter.pending <= set(queued), "a pending sequence that does not wait"
            assert not adapter.is_resident or adapter.allocation is not None, "resident nowhere"
            assert all(state.num_live for state in adapter.users), "a request that has ended uses an adapter"
        for seq in running:
            assert seq.adapter is None or seq.state in self._of(seq).users, "a row whose request is not a user"
        copies = sum(a.on_host for a in self._known.values())
        assert copies <= self._max_on_host, "more host copies than --max-cpu-loras"


def _ref_of(seq: Sequence) -> AdapterRef:
    ref = seq.state.request.adapter
    assert ref is not None
    return ref
