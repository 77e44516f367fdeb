"""LoRA adapters of one group, for the scheduler and the engine: which are on the device, and which sequences wait.

Each content (digest) is in one state on the device, and beside that has a host copy on every rank or has none:

    unknown --fetch--> on host --place--> resident --close--> draining --last user ends--> on host or unknown
       `--error--> refused      `--error--> refused  `------- idle, and its room is wanted -------^

A sequence whose adapter is not resident is blocked. Adapters with waiters form a line (least served tenant, then who
has not paused just now, then longest wait); HostCopies fetches them in that order, and DevicePlaces gives them room.
Tiers of adapters and their eviction are S-LoRA's (Sheng et al. 2023). Owned by the engine's thread; moves no bytes
(TransferManager).
"""

import math
from collections.abc import Callable, Collection, Iterable

from tandem.configs.schema import LoraSettings
from tandem.workers.engine.adapters.adapter_state import Adapter
from tandem.workers.engine.adapters.device_places import DevicePlaces
from tandem.workers.engine.adapters.host_copies import HostCopies
from tandem.workers.engine.adapters.known_adapters import KnownAdapters, ref_of
from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.base.stats import AdapterStats
from tandem.workers.engine.transfers.transfer_manager import TransferManager, TransferOutcome
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waited import NO_EVENTS, CacheEvents, Waited
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import DropAdapter, FetchAdapter, PlaceAdapter

WAIT_BOUND_S = 1.0
"""Seconds without movement of the line before residents in use drain for the first in it. While it moves, draining
only takes adapters from the requests that come for them next, which under load costs more than it gains."""
SLICE_S = 0.25
"""Seconds of use after which an adapter may give way; as long it then stands behind first tokens."""


class AdapterCache(AdmissionRule):
    """Adapters over num_pages device pages. The sequences that wait for them are in `waiting`."""

    cause = "adapter"

    def __init__(
        self,
        settings: LoraSettings,
        num_pages: int,
        transfers: TransferManager,
        waiting: WaitingQueue,
        clock: Callable[[], float],
        wait_bound_s: float = WAIT_BOUND_S,
        slice_s: float = SLICE_S,
    ) -> None:
        self._waited = Waited(Blocker.ADAPTER, transfers, waiting, clock)
        self._known = KnownAdapters(self._waited)
        self._copies = HostCopies(self._known, settings.max_cpu_loras, num_pages)
        self._places = DevicePlaces(self._known, num_pages, wait_bound_s, slice_s)
        self._is_lacking = False

    # ---- queries ----

    @property
    def look_again_s(self) -> float:
        """Implements WaitedCache."""
        return 0.0 if self._waited.has_changed else self._waited.look_again_s

    def residency(self) -> dict[str, str]:
        """Returns the nearest tier that has an adapter, "device" or "host", by digest."""
        tiers = {adapter.digest: "host" for adapter in self._known if adapter.on_host}
        return tiers | {adapter.digest: "device" for adapter in self._known if adapter.is_resident}

    def stats(self) -> AdapterStats:
        """Returns a frozen copy of all counts; O(adapters)."""
        known, places = self._known, self._places
        loads = places.loads.snapshot()
        return AdapterStats(
            num_pages=places.memory.num_pages,
            free_pages=places.memory.num_free,
            resident=sum(adapter.is_resident for adapter in known),
            on_host=sum(adapter.on_host for adapter in known),
            in_use=sum(bool(adapter.users or known.queued(adapter)) for adapter in known),
            waiting=sum(len(known.waiters(adapter)) for adapter in known),
            loads=loads.count,
            load_s=loads,
            evictions=places.num_evictions,
            refused=known.refusals.count,
        )

    # ---- the scheduler's side: AdmissionRule ----

    def before_queue(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: a sequence waits until its adapter is on the device, and takes new users."""
        if seq.adapter is None:
            return None
        adapter = self._known.entry(ref_of(seq))
        holds = seq.state in adapter.users
        if adapter.is_resident and (holds or not adapter.is_draining):
            self._known.touch(adapter)
            return None
        if not self._known.waiters(adapter):
            adapter.since_s = self._waited.clock()
        self._waited.has_changed = True
        return Awaited(Blocker.ADAPTER, adapter.digest)

    def bound(self, seq: Sequence) -> None:
        """Implements AdmissionRule: the row names the adapter's slot, and the request uses it until leave()."""
        if seq.adapter is None:
            return
        adapter = self._known.of(seq)
        assert adapter.is_resident and adapter.allocation is not None, "a row without its adapter"
        adapter.pending.discard(seq)
        if adapter.served_s is None:
            adapter.served_s, adapter.served_step = self._waited.clock(), seq.bound_step
        adapter.users[seq.state] = None
        self._known.touch(adapter)
        seq.adapter_slot = adapter.allocation.slot

    def unbound(self, seq: Sequence) -> None:
        """Implements AdmissionRule."""
        if seq.adapter is not None:
            adapter = self._known.of(seq)
            adapter.last_step = max(adapter.last_step, seq.last_step)
            self._known.touch(adapter)

    def left(self, seq: Sequence) -> None:
        """Implements AdmissionRule."""
        adapter = None if seq.adapter is None else self._known.get(seq.adapter)
        if adapter is not None:
            adapter.pending.discard(seq)
            self._waited.has_changed |= self._is_lacking

    def giving_way(self, may_pause: Callable[[Sequence], bool], *, has_room: bool) -> list[Sequence]:
        """Implements AdmissionRule: the sequences of the residents that are to give way to the first in line."""
        return [seq for adapter in self._places.giving_way(may_pause, has_room=has_room) for seq in adapter.used_by()]

    def gave_way(self, paused: list[Sequence]) -> None:
        """Implements AdmissionRule: the sequences stand in line again, and their adapters leave the device."""
        adapters = dict.fromkeys(map(self._known.of, paused))
        for seq in paused:
            self._waited.waiting.block(seq, Blocker.ADAPTER, seq.adapter)
        self._places.give_way(adapters, self._waited.clock())
        self._waited.has_changed = True

    # ---- the engine's side: WaitedCache ----

    def check(self, state: RequestState) -> None:
        """Implements WaitedCache; the refusal has the name that the request has for the adapter."""
        ref = state.request.adapter
        refusal = None if ref is None else self._known.refusals.of(ref)
        if ref is not None and refusal is not None:
            raise refusal.of(ref)

    def enter(self, state: RequestState) -> None:
        """Implements WaitedCache: a request is no user before it has a row."""

    def leave(self, state: RequestState) -> None:
        """Implements WaitedCache."""
        ref = state.request.adapter
        adapter = None if ref is None else self._known.get(ref.digest)
        if adapter is not None:
            adapter.users.pop(state, None)
            self._waited.has_changed |= self._is_lacking

    def set_pinned(self, refs: Iterable[AdapterRef]) -> None:
        """Replaces the pinned adapters: they are loaded when there is room, and evicted last."""
        self._known.pinned = {ref.digest: ref for ref in refs}
        for ref in self._known.pinned.values():
            self._known.entry(ref)
        self._waited.has_changed = True

    def advance(self, done_step: int, late: Collection[int] = ()) -> CacheEvents:
        """Implements WaitedCache: applies the ends of moves, frees pages that only plans up to done_step named, and
        starts possible moves."""
        waited = self._waited
        if waited.outcomes:
            waited.has_changed = True
            for outcome in waited.take_outcomes():
                self._finish(outcome)
        self._copies.note_late(late)
        waited.has_changed |= self._places.memory.retire(done_step)
        now_s = waited.clock()
        if not waited.has_changed and now_s < waited.look_again_s:
            return NO_EVENTS
        waited.has_changed = False
        waited.look_again_s = math.inf
        self._advance(now_s)
        return waited.take_events()

    # ---- inside ----

    def _advance(self, now_s: float) -> None:
        known = self._known
        line = sorted((a for a in known if known.waiters(a)), key=self._place_in_line)
        pinned = [a for a in map(known.entry, known.pinned.values()) if not known.waiters(a) and not a.is_resident]
        self._copies.fetch_all(line, pinned)
        self._places.place_all(line, pinned, now_s)
        self._copies.refuse_late()
        known.forget_gone()
        self._is_lacking = any(known.waiters(a) for a in known) or bool(pinned)

    def _place_in_line(self, adapter: Adapter) -> tuple[float, bool, float]:
        waiters = self._known.waiters(adapter)
        return self._waited.least_served(waiters), self._places.has_just_paused(adapter), adapter.since_s

    def _finish(self, outcome: TransferOutcome) -> None:
        op, now_s = outcome.op, self._waited.clock()
        assert isinstance(op, FetchAdapter | PlaceAdapter | DropAdapter), "blocks are not adapters"
        adapter = self._known.get(op.adapter.digest)
        assert adapter is not None, "an adapter that moves is known"
        assert adapter.move is not None and adapter.move.ticket == op.ticket, "one move of an adapter at a time"
        adapter.move = None
        adapter.load_s += now_s - outcome.began_s
        if isinstance(op, FetchAdapter):
            self._copies.end_fetch(adapter, op, outcome)
        elif isinstance(op, PlaceAdapter):
            self._places.end_place(adapter, op, outcome.failure, now_s)

    # ---- invariants, for tests ----

    def check_invariants(self, running: list[Sequence]) -> None:
        """Asserts that memory adds up, and that users are counted as they are. running: all sequences with a row."""
        known = self._known
        self._places.check_invariants()
        self._copies.check_invariants()
        for adapter in known:
            queued = known.queued(adapter)
            waits = all(seq.status is SequenceStatus.WAITING for seq in (*known.waiters(adapter), *queued))
            assert waits, "in line though it does not wait"
            users = queued or adapter.users
            assert not users or adapter.is_resident, "users of an adapter that is not on the device"
            assert adapter.pending <= set(queued), "a pending sequence that does not wait"
            assert all(state.num_live for state in adapter.users), "a request that has ended uses an adapter"
        for seq in running:
            assert seq.adapter is None or seq.state in known.of(seq).users, "a row whose request is not a user"
