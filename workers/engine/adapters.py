"""LoRA adapters of one group, for the scheduler: which are on the device, who waits for which, who has to go.

Each content (digest) is in one state on the device, and beside that has a host copy on every rank or has none:

    unknown --fetch--> on host --place--> resident --close--> closed --last holder ends--> on host, or unknown
       `--error--> refused      `--error--> refused  `------- idle, and the room is wanted ------^

A sequence whose adapter is not resident waits outside the queue. Adapters that are waited for stand in a line (least
served tenant, then longest wait); those on the host get room in that order. Room comes from residents that nobody uses,
least recently used first; when the line has stood still longer than a bound, from residents in use: they are closed,
what only queued for them waits in line behind, and what has run keeps them until it ends. So the line moves at least
once in a bound and the longest answer. An adapter serves those that waited for it before it is closed. Tiers of
adapters and their eviction: S-LoRA (Sheng et al. 2023).
Owned by the engine, on its thread; moves no bytes, knows no transport (send).
"""

import logging
import math
from collections.abc import Callable, Iterable

from configs.schema import LoraSettings
from workers.engine.adapter_memory import AdapterMemory
from workers.engine.adapter_moves import AdapterMoves, Move
from workers.engine.adapter_state import Adapter, Refusals, Turnover
from workers.engine.sequence import WAITS, RequestState, Sequence, Status
from workers.engine.stats import LOAD_BOUNDS_S, AdapterStats, Histogram
from workers.messages import AdapterMove, AdapterRef, TransferDone

log = logging.getLogger("tandem.engine")
UNREADABLE = "its files cannot be read at the moment, or are not those that were listed"
WAIT_BOUND_S = 1.0
"""How long the line stands still before residents in use are closed for the first in it. As long as it moves, closing
would only take adapters from those who come for them next: under load that costs more than it gives."""
MAX_FETCHES = 4
"""Ranks may read one source after the other: what is wanted more must not stand behind a long row of others."""
LATE_FETCH_S = 600.0
LOOK_AGAIN_S = 0.05


class AdapterPool:
    """Adapters over num_pages device pages. turn: how early in line a sequence stands, the smaller the earlier; of two
    with equal ones the adapter that is wanted longer. on_swap: told for whom an adapter was placed."""

    def __init__(
        self,
        settings: LoraSettings,
        num_pages: int,
        send: Callable[[AdapterMove], None],
        num_ranks: int,
        clock: Callable[[], float],
        turn: Callable[[Sequence], float] = lambda seq: 0.0,
        on_swap: Callable[[Sequence], None] = lambda seq: None,
        wait_bound_s: float = WAIT_BOUND_S,
    ) -> None:
        self._max_on_host = settings.max_cpu_loras
        self._memory = AdapterMemory(num_pages)
        self._moves = AdapterMoves(send, num_ranks, clock)
        self._clock = clock
        self._turn = turn
        self._on_swap = on_swap
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
    def is_busy(self) -> bool:
        """Whether ranks owe answers."""
        return self._moves.is_busy

    @property
    def look_again_s(self) -> float:
        """The moment of the clock from which tend() has something to do without any answer; inf: none."""
        return self._look_again_s

    def owns(self, ticket: int) -> bool:
        return self._moves.owns(ticket)

    def check(self, ref: AdapterRef) -> None:
        """Raises RequestRefused for an adapter that was refused lately, under the name that the request has for it."""
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
            in_use=sum(bool(adapter.queued or adapter.holders) for adapter in known),
            waiting=sum(len(adapter.waiters) for adapter in known),
            loads=loads.count,
            load_s=loads,
            evictions=self._num_evictions,
            refused=self._refusals.count,
        )

    # ---- the scheduler's side ----

    def admit(self, seq: Sequence) -> bool:
        """Whether its adapter is on the device for it; else it waits in line and comes back as ready."""
        ref = _ref_of(seq)
        adapter = self._known.setdefault(ref.digest, Adapter(ref))
        holds = seq.state in adapter.holders
        if adapter.is_resident and (holds or not adapter.is_closed):
            self._touch(adapter)
            if not holds:
                adapter.queued[seq] = None
            return True
        if not adapter.waiters:
            adapter.since_s = self._clock()
        adapter.waiters[seq] = None
        self._has_changed = True
        return False

    def bind(self, seq: Sequence) -> int:
        """It has a row now, and its request holds the adapter until leave(); the slot."""
        adapter = self._of(seq)
        assert adapter.is_resident and adapter.place is not None, "a row without its adapter"
        adapter.queued.pop(seq, None)
        adapter.guests.discard(seq)
        adapter.has_served = True
        adapter.holders.add(seq.state)
        self._touch(adapter)
        return adapter.place.slot

    def unbind(self, seq: Sequence) -> None:
        """Its row is free; plans up to seq.last_step name the slot."""
        adapter = self._of(seq)
        adapter.last_step = max(adapter.last_step, seq.last_step)
        self._touch(adapter)

    def drop(self, seq: Sequence) -> None:
        """A sequence that waits, in line or in the queue, waits no more."""
        adapter = self._known.get(_ref_of(seq).digest)
        if adapter is not None:
            adapter.waiters.pop(seq, None)
            adapter.queued.pop(seq, None)
            adapter.guests.discard(seq)
            self._has_changed |= self._is_lacking

    # ---- the engine's side ----

    def leave(self, state: RequestState) -> None:
        """A request has ended, with all its sequences."""
        ref = state.request.adapter
        adapter = None if ref is None else self._known.get(ref.digest)
        if adapter is not None:
            adapter.holders.discard(state)
            self._has_changed |= self._is_lacking

    def set_pinned(self, refs: Iterable[AdapterRef]) -> None:
        """These and no others: brought to the device when there is room, and the last to be evicted."""
        self._pinned = {ref.digest: ref for ref in refs}
        for digest, ref in self._pinned.items():
            self._known.setdefault(digest, Adapter(ref))
        self._has_changed = True

    def tend(self, messages: Iterable[TransferDone], done_step: int) -> Turnover:
        """Takes in answers of ranks, frees what plans up to done_step had named, and moves what can be moved."""
        turnover = Turnover([], [], [])
        for message in messages:
            move = self._moves.answer(message)
            if move is not None:
                self._finish(move, turnover)
                self._has_changed = True
        self._has_changed |= self._memory.retire(done_step)
        now_s = self._clock()
        if self._has_changed or now_s >= self._look_again_s:
            self._has_changed = False
            self._look_again_s = math.inf
            self._advance(now_s, turnover)
        return turnover

    # ---- moving ----

    def _advance(self, now_s: float, turnover: Turnover) -> None:
        line = sorted((a for a in self._known.values() if a.waiters), key=self._place_in_line)
        pinned = [a for digest in self._pinned if not (a := self._known[digest]).waiters and not a.is_resident]
        for adapter in (*line, *pinned):
            if not self._fetch(adapter, now_s):
                break
        self._place_all(line, pinned, now_s, turnover)
        self._judge_late(now_s, turnover)
        for digest in [d for d, a in self._known.items() if a.is_gone and d not in self._pinned]:
            del self._known[digest]
        self._is_lacking = any(a.waiters for a in self._known.values()) or bool(pinned)

    def _place_in_line(self, adapter: Adapter) -> tuple[float, float]:
        return min(map(self._turn, adapter.waiters)), adapter.since_s

    def _fetch(self, adapter: Adapter, now_s: float) -> bool:
        """Starts its way to the host if it is not on it; False: nothing can be fetched now."""
        if adapter.on_host or adapter.move is not None or adapter.is_resident or self._is_refused_pin(adapter):
            return True
        fetching = [a for a in self._known.values() if a.move is not None and a.move.kind == "fetch"]
        in_time = sum(now_s - a.move.began_s < LATE_FETCH_S for a in fetching if a.move is not None)
        on_host = [a for a in self._known.values() if a.on_host]
        if in_time >= MAX_FETCHES:
            return False
        if len(on_host) + len(fetching) >= self._max_on_host and not self._drop_one(on_host, bool(adapter.waiters)):
            return False
        if adapter.waiters:
            adapter.ref = _ref_of(next(iter(adapter.waiters)))
        adapter.load_s = 0.0
        adapter.move = self._moves.start("fetch", adapter.ref)
        return True

    def _drop_one(self, on_host: list[Adapter], for_waiters: bool) -> bool:
        """Makes room on the host: the copy least recently used, of a resident or of one that nobody waits for. A pinned
        one goes for waiters only."""

        def is_kept(adapter: Adapter) -> bool:
            return adapter.ref.digest in self._pinned and not adapter.is_resident

        fit = [a for a in on_host if a.move is None and (a.is_resident or not a.waiters)]
        fit = [a for a in fit if for_waiters or not is_kept(a)]
        if not fit:
            return False
        self._drop_copy(min(fit, key=lambda a: (is_kept(a), a.used)))
        return True

    def _drop_copy(self, adapter: Adapter) -> None:
        adapter.on_host = False
        adapter.move = self._moves.start("drop", adapter.ref)

    def _place_all(self, line: list[Adapter], pinned: list[Adapter], now_s: float, turnover: Turnover) -> None:
        """Room for those on the host, in order; nobody overtakes the first of them that lacks it."""
        for adapter in line:
            if adapter.is_resident:  # closed, and its turn has come before it had to go
                self._open(adapter, now_s, turnover)
            elif adapter.on_host and adapter.move is None:
                if self._still_since_s is None:
                    self._still_since_s = now_s
                if not self._make_room(adapter, now_s, turnover):
                    self._look_again_s = min(self._look_again_s, now_s + LOOK_AGAIN_S)
                    return
                self._still_since_s = None
                self._start_place(adapter)
        self._still_since_s = None
        for adapter in self._known.values():
            adapter.is_closed = False  # nobody lacks room
        for adapter in pinned:
            is_ready = adapter.on_host and adapter.move is None and not self._is_refused_pin(adapter)
            if is_ready and self._make_room(adapter, now_s, turnover):
                self._start_place(adapter)

    def _start_place(self, adapter: Adapter) -> None:
        adapter.place = self._memory.take(adapter.num_pages)
        assert adapter.place is not None, "room was made"
        adapter.move = self._moves.start("place", adapter.ref, adapter.place)

    def _make_room(self, adapter: Adapter, now_s: float, turnover: Turnover) -> bool:
        """Whether its pages are free; evicts what nobody uses if that is enough, and closes others after the bound."""
        need, memory = adapter.num_pages, self._memory
        residents = sorted((a for a in self._known.values() if a.is_resident), key=lambda a: a.used)
        open_ones = [a for a in residents if not a.is_closed]
        idle = [a for a in open_ones if a.is_idle and a.ref.digest not in self._pinned]
        coming = memory.num_free + memory.num_pending + sum(a.num_pages for a in residents if a.is_closed)
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
            self._close(victim, now_s, turnover)
        for closed in residents:
            if closed.is_closed and closed.is_idle:
                self._evict(closed)
        return memory.num_free >= need

    def _staying_power(self, adapter: Adapter) -> tuple[bool, bool, int]:
        return adapter.ref.digest in self._pinned, not adapter.is_idle, adapter.used

    def _is_guarded(self, adapter: Adapter, now_s: float) -> bool:
        """Those who had waited for it go first: one of them in any case, all of them within the bound."""
        return bool(adapter.guests) and (not adapter.has_served or now_s - adapter.placed_s < self._wait_bound_s)

    def _close(self, adapter: Adapter, now_s: float, turnover: Turnover) -> None:
        """Nobody begins with it any more: who only queued waits in line again."""
        adapter.is_closed = True
        if adapter.queued:
            turnover.withdrawn.extend(adapter.queued)
            adapter.waiters.update(adapter.queued)
            adapter.since_s = now_s
            adapter.queued.clear()
            adapter.guests.clear()
            self._has_changed = True

    def _open(self, adapter: Adapter, now_s: float, turnover: Turnover) -> None:
        """Lets in who waits for it; they are its guests."""
        adapter.is_resident, adapter.is_closed = True, False
        adapter.has_served, adapter.placed_s = False, now_s
        adapter.guests = set(adapter.waiters)
        turnover.ready.extend(adapter.waiters)
        adapter.queued.update(adapter.waiters)
        adapter.waiters.clear()
        self._touch(adapter)

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.place is not None
        self._memory.give_back(adapter.place, adapter.last_step)
        adapter.place, adapter.is_resident, adapter.is_closed = None, False, False
        self._num_evictions += 1

    # ---- ends of moves ----

    def _finish(self, move: Move, turnover: Turnover) -> None:
        adapter, now_s = self._known[move.ref.digest], self._clock()
        assert adapter.move is move, "one move of an adapter at a time"
        adapter.move = None
        adapter.load_s += now_s - move.began_s
        if move.kind == "fetch":
            self._end_fetch(adapter, move, turnover)
        elif move.kind == "place" and move.error is not None:
            assert adapter.place is not None
            self._memory.give_back(adapter.place, 0)
            adapter.place = None
            self._refuse_moved(adapter, None, move, turnover)
        elif move.kind == "place":
            self._loads.observe(adapter.load_s)
            adapter.load_s = 0.0
            if adapter.waiters:
                self._on_swap(min(adapter.waiters, key=self._turn))
            self._open(adapter, now_s, turnover)

    def _end_fetch(self, adapter: Adapter, move: Move, turnover: Turnover) -> None:
        adapter.on_host, adapter.num_pages = move.error is None, max(1, move.pages)
        if move.error is not None:
            self._refuse_moved(adapter, move.ref.source, move, turnover)
            if move.any_done:
                self._drop_copy(adapter)
        elif adapter.num_pages > self._memory.num_pages:
            have = self._memory.num_pages
            message = f"it takes {adapter.num_pages} pages of device memory, --lora-memory-bytes holds {have}"
            self._refuse(adapter, None, message, turnover)
            self._drop_copy(adapter)

    def _refuse_moved(self, adapter: Adapter, source: str | None, move: Move, turnover: Turnover) -> None:
        """A rank could not do its part. Only what is wrong with the content is told to clients."""
        assert move.error is not None
        log.warning("%s of adapter %s (%.12s) failed: %s", move.kind, move.ref.name, move.ref.digest, move.error)
        reason = UNREADABLE if move.is_passing else move.error
        self._refuse(adapter, source, reason, turnover, is_passing=move.is_passing)

    def _refuse(
        self, adapter: Adapter, source: str | None, reason: str, turnover: Turnover, *, is_passing: bool = False
    ) -> None:
        """Who waits for it from that source (None: from any) waits no more; the engine ends their requests."""
        refusal = self._refusals.add(adapter.ref, source, reason, is_passing=is_passing)
        for seq in [seq for seq in adapter.waiters if source in (None, _ref_of(seq).source)]:
            del adapter.waiters[seq]
            turnover.refused.append((seq.state, refusal.of(_ref_of(seq))))

    def _is_refused_pin(self, adapter: Adapter) -> bool:
        """Whether nobody but a pin asks for it, in vain until its refusal is over."""
        refusal = None if adapter.waiters else self._refusals.of(adapter.ref)
        if refusal is not None:
            self._look_again_s = min(self._look_again_s, refusal.until_s)
        return refusal is not None

    def _judge_late(self, now_s: float, turnover: Turnover) -> None:
        """Ends who waits for a source that does not answer; the ticket stays open."""
        for adapter in self._known.values():
            if adapter.move is None or adapter.move.kind != "fetch" or not adapter.waiters:
                continue
            due_s = adapter.move.began_s + LATE_FETCH_S
            if now_s >= due_s:
                reason = f"its source has not been read in {LATE_FETCH_S:.0f} s"
                self._refuse(adapter, adapter.move.ref.source, reason, turnover, is_passing=True)
            else:
                self._look_again_s = min(self._look_again_s, due_s)

    # ---- small things ----

    def _of(self, seq: Sequence) -> Adapter:
        adapter = self._known.get(_ref_of(seq).digest)
        assert adapter is not None, "an adapter that is used is not known"
        return adapter

    def _touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.used = self._uses

    # ---- laws, for tests ----

    def check_laws(self, running: Iterable[Sequence]) -> None:
        """Asserts that memory adds up, and that users are counted as they are. running: all sequences with a row."""
        self._memory.check_laws([a.place for a in self._known.values() if a.place is not None])
        for adapter in self._known.values():
            users = adapter.queued or adapter.holders
            in_line = all(seq.status is Status.UNPLACED for seq in adapter.waiters)
            assert in_line, "in line though it does not wait"
            assert all(seq.status in WAITS for seq in adapter.queued), "in the queue though it does not wait"
            assert not users or adapter.is_resident, "users of an adapter that is not on the device"
            assert not adapter.waiters.keys() & adapter.queued.keys(), "in line and in the queue at once"
            assert adapter.guests <= set(adapter.queued), "a guest that does not wait"
            assert not adapter.is_resident or adapter.place is not None, "resident nowhere"
            assert all(state.num_live for state in adapter.holders), "a request that has ended holds an adapter"
        for seq in running:
            assert seq.adapter is None or seq.state in self._of(seq).holders, "a row whose request holds nothing"
        copies = sum(a.on_host or (a.move is not None and a.move.kind == "fetch") for a in self._known.values())
        assert copies <= self._max_on_host, "more host copies than --max-cpu-loras"


def _ref_of(seq: Sequence) -> AdapterRef:
    ref = seq.state.request.adapter
    assert ref is not None
    return ref
