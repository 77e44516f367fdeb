"""HostCopies: which adapters have a copy in the host memory of every rank: fetches, their ends, and room for them."""

from collections import Counter
from collections.abc import Collection

from tandem.workers.engine.adapters.adapter_state import Adapter
from tandem.workers.engine.adapters.known_adapters import KnownAdapters, ref_of
from tandem.workers.engine.transfers.transfer_manager import TransferOutcome
from tandem.workers.messages.transfer import DropAdapter, FetchAdapter, LaneKind, source_lane

MAX_FETCHES = 4
"""Fetches in each lane. Ranks may read one source after the other: an urgent adapter must not wait behind many."""
LATE_FETCH_S = 600.0


class HostCopies:
    """At most max_copies copies, least recently used first to go. num_pages: of the device, which a copy must fit."""

    def __init__(self, known: KnownAdapters, max_copies: int, num_pages: int) -> None:
        self._known = known
        self._most = max_copies
        self._num_pages = num_pages

    # ---- fetching ----

    def fetch_all(self, line: list[Adapter], pinned: list[Adapter]) -> None:
        """Starts fetches, in order, up to MAX_FETCHES in a lane and while there is room. What nobody waits for takes
        no room from the line: it is dropped when it comes and there is none (_make_room)."""
        in_time = [a for a in self._known if a.move is not None and a.move.is_fetch and not a.move.is_late]
        in_lane = Counter(source_lane(a.ref) for a in in_time)
        num_waited = sum(bool(self._known.waiters(a)) for a in in_time)
        room = self._most - sum(a.on_host for a in self._known) - num_waited
        for adapter in line:
            if adapter.on_host or adapter.move is not None or adapter.is_resident:
                continue
            ref = ref_of(next(iter(self._known.waiters(adapter))))
            if in_lane[source_lane(ref)] >= MAX_FETCHES:
                continue
            while room <= 0:
                if not self._drop_one(for_waiters=True):
                    return
                room += 1
            room -= 1
            adapter.ref = ref
            self._start(adapter, in_lane)
        self._fetch_pinned(pinned, in_lane, room - (len(in_time) - num_waited))

    def _fetch_pinned(self, pinned: list[Adapter], in_lane: Counter[LaneKind], room: int) -> None:
        for adapter in pinned:
            is_there = adapter.on_host or adapter.move is not None or self._known.is_refused_pin(adapter)
            if is_there or in_lane[source_lane(adapter.ref)] >= MAX_FETCHES:
                continue
            while room <= 0:
                if not self._drop_one(for_waiters=False):
                    return
                room += 1
            room -= 1
            self._start(adapter, in_lane)

    def _start(self, adapter: Adapter, in_lane: Counter[LaneKind]) -> None:
        in_lane[source_lane(adapter.ref)] += 1
        adapter.load_s = 0.0
        self._known.start(adapter, FetchAdapter(adapter=adapter.ref), late_s=LATE_FETCH_S)

    def end_fetch(self, adapter: Adapter, op: FetchAdapter, outcome: TransferOutcome) -> None:
        """Notes that every rank has answered: there is a copy, or the adapter is refused."""
        failure = outcome.failure
        adapter.on_host, adapter.num_pages = failure is None, max(1, outcome.pages)
        if failure is not None:
            self._known.refuse_moved(adapter, op.adapter.source, op, failure)
            if outcome.num_done:
                self._drop(adapter)
        elif adapter.num_pages > self._num_pages:
            have = self._num_pages
            message = f"it takes {adapter.num_pages} pages of device memory, --lora-memory-bytes holds {have}"
            self._known.refuse(adapter, None, message)
            self._drop(adapter)
        else:
            self._make_room(adapter)

    # ---- late fetches ----

    def note_late(self, late: Collection[int]) -> None:
        """Notes the tickets that TransferManager.overdue() has named."""
        for adapter in self._known if late else ():
            move = adapter.move
            if move is not None and not move.is_late and move.ticket in late:
                move.is_late = self._known.waited.has_changed = True

    def refuse_late(self) -> None:
        """Refuses waiters, whatever their source, while one source does not answer: the ticket stays open, and an
        adapter has one move at a time."""
        for adapter in self._known:
            if adapter.move is not None and adapter.move.is_late and self._known.waiters(adapter):
                reason = f"a source of it has not been read in {LATE_FETCH_S:.0f} s"
                self._known.refuse(adapter, None, reason, is_passing=True)

    # ---- room ----

    def _make_room(self, arrived: Adapter) -> None:
        """Drops a copy, if need be the one that has arrived, when nobody waited for its fetch and the room is taken."""
        is_over = sum(a.on_host for a in self._known) > self._most
        if is_over and not self._drop_one(for_waiters=bool(self._known.waiters(arrived))):
            self._drop(arrived)

    def _drop_one(self, *, for_waiters: bool) -> bool:
        """Makes room: drops the copy least recently used, of a resident or of one that nobody waits for. A pinned one
        goes for waiters only. Returns whether there was one."""
        known = self._known

        def is_kept(adapter: Adapter) -> bool:
            return known.is_pinned(adapter) and not adapter.is_resident

        on_host = [a for a in known if a.on_host]
        fit = [a for a in on_host if a.move is None and (a.is_resident or not known.waiters(a))]
        fit = [a for a in fit if for_waiters or not is_kept(a)]
        if not fit:
            return False
        self._drop(min(fit, key=lambda a: (is_kept(a), a.used)))
        return True

    def _drop(self, adapter: Adapter) -> None:
        adapter.on_host = False
        self._known.start(adapter, DropAdapter(adapter=adapter.ref))

    def check_invariants(self) -> None:
        """Asserts that there are not more copies than there is room for."""
        assert sum(a.on_host for a in self._known) <= self._most, "more host copies than --max-cpu-loras"
