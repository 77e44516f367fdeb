"""KV between the device and the tiers below it, for the scheduler: what to load before a sequence runs, what to keep.

A load fills device blocks that the ticket holds; when it is over they are published and fall idle as cached blocks, so
that the ordinary prefix match finds them and a waiting sequence never holds a block. A store reads published blocks,
held until it is over. Ranks answer each ticket; a ticket whose bytes did not arrive is a miss, computed again.
Owned by the engine, on its thread; knows no transport (send) and moves no bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.tiered_store import Kind, Ticket, TieredStore
from workers.engine.block_manager import BlockManager, BlockTable
from workers.engine.copy_costs import CopyCosts
from workers.engine.scheduler import Joined
from workers.engine.sequence import Sequence
from workers.engine.stats import OffloadStats
from workers.errors import GroupLost
from workers.messages import Transfer, TransferDone
from workers.running_clock import RunningClock

MAX_LOADS = 3
"""A sequence that finds its loaded blocks evicted again and again is admitted with what there is."""
STUCK_S = 60.0
LONGEST_TURN_S = 1.0
PATIENCE = 4.0
MIN_PATIENCE_S = 0.5
COST_DEPTH_TOKENS = 4096
"""Attention makes deeper blocks dearer to compute again: about twice as dear at this depth."""


class _Found(NamedTuple):
    """What the tiers hold of a prefix beyond the device: all of it in order (None where the device lacks it), the
    device's own blocks, and the missing keys by place. num_tokens: what need not be computed."""

    run: list[int | None]
    on_device: list[int]
    from_host: list[bytes]
    from_disk: list[bytes]
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Open:
    """A ticket on its way: ranks that have not answered, places that failed, who waits for it, since when and since
    which step; or who runs on it already."""

    ticket: Ticket
    awaiting: set[int]
    began_s: float
    began_step: int
    due_s: float
    began_running_s: float
    kept: list[int] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    copy_s: float = 0.0
    waiters: dict[Sequence, None] = field(default_factory=dict)
    joined: Sequence | None = None


@dataclass(slots=True, eq=False)
class OffloadCounts:
    """Counted from the start. Blocks by kind of ticket, those that failed, tokens found below the device."""

    blocks: dict[Kind, int] = field(default_factory=lambda: {"store": 0, "load": 0, "spill": 0, "fetch": 0})
    copy_s: dict[Kind, float] = field(default_factory=lambda: {"store": 0.0, "load": 0.0, "spill": 0.0, "fetch": 0.0})
    failed_blocks: int = 0
    swapped_out: int = 0
    recomputed: int = 0
    loaded_tokens: int = 0


class KVOffload:
    """LowerTiers of the scheduler. `send` hands a Transfer to every one of num_ranks ranks."""

    def __init__(
        self,
        manager: BlockManager,
        store: TieredStore,
        send: Callable[[Transfer], None],
        num_ranks: int,
        costs: CopyCosts,
        clock: Callable[[], float],
    ) -> None:
        self.counts = OffloadCounts()
        self._manager = manager
        self._store = store
        self._send = send
        self._ranks = range(num_ranks)
        self._costs = costs
        self._clock = clock
        self._running = RunningClock(clock, LONGEST_TURN_S)
        self._open: dict[int, _Open] = {}
        self._coming: dict[bytes, _Open] = {}
        self._loading: dict[Sequence, _Open] = {}
        self._promised: dict[Sequence, int] = {}
        self._misled: list[Sequence] = []

    # ---- queries ----

    @property
    def is_busy(self) -> bool:
        """Whether tickets are open."""
        return bool(self._open)

    def stats(self, block_bytes: int) -> OffloadStats:
        """A frozen copy of all counts."""
        counts, host, disk = self.counts, self._store.host, self._store.disk
        return OffloadStats(
            block_bytes=block_bytes,
            host_slots=host.num_slots,
            host_blocks=host.num_stored,
            blocks={str(kind): count for kind, count in counts.blocks.items()},
            copy_s={str(kind): seconds for kind, seconds in counts.copy_s.items()},
            failed_blocks=counts.failed_blocks,
            swapped_out=counts.swapped_out,
            recomputed=counts.recomputed,
            loaded_tokens=counts.loaded_tokens,
            disk_disabled=None if disk is None else disk.disabled_reason,
            open_tickets=len(self._open),
        )

    def check_laws(self) -> None:
        """Asserts the host's laws, and that every waiting sequence hangs on an open ticket."""
        self._store.host.check_laws()
        assert set(self._loading) == {seq for opened in self._open.values() for seq in opened.waiters}

    # ---- the scheduler's side: LowerTiers ----

    def load(self, seq: Sequence, reserve: int) -> bool:
        self._promised.pop(seq, None)
        if seq.num_loads >= MAX_LOADS:
            return False
        found = self._find(seq)
        if found is None or not self._is_worth(found):
            return False
        opened = self._coming.get((found.from_disk or found.from_host)[0])
        if opened is None and found.from_disk:
            opened = self._fetch(found.from_disk)
        elif opened is None:
            opened = self._load(seq, found, reserve)
        if opened is None:
            return False
        seq.num_loads += 1
        opened.waiters[seq] = None
        self._loading[seq] = opened
        return True

    def join(self, seq: Sequence) -> Joined | None:
        self._promised.pop(seq, None)
        if seq.num_loads >= MAX_LOADS:
            return None
        found = self._find(seq)
        if found is None or found.from_disk or not self._is_worth(found):
            return None
        if found.from_host[0] in self._coming:
            return None  # load() waits for the copy under way
        opened = self._load(seq, found, reserve=0)
        if opened is None:
            return None
        del self._promised[seq]
        seq.num_loads += 1
        opened.joined = seq
        loaded = iter(opened.ticket.block_ids)
        block_ids = [next(loaded) if block_id is None else block_id for block_id in found.run]
        return Joined(opened.ticket.id, block_ids)

    def drop(self, seq: Sequence) -> None:
        self._promised.pop(seq, None)
        opened = self._loading.pop(seq, None)
        if opened is not None:
            del opened.waiters[seq]

    def store(self, table: BlockTable) -> None:
        if table.num_committed:
            self._store_blocks(table)

    def swap_out(self, table: BlockTable) -> None:
        blocks = table.num_committed
        if not blocks:
            return
        swap_s = self._costs.copy_s("store", blocks) + self._costs.copy_s("load", blocks)
        if swap_s < self._costs.recompute_s(blocks * self._manager.block_size):
            self.counts.swapped_out += 1
            self._store_blocks(table)
        else:
            self.counts.recomputed += 1

    def forget(self, table: BlockTable) -> None:
        keys = set(table.keys)
        for opened in self._open.values():
            opened.failed.update(place for place, key in enumerate(opened.ticket.keys) if key in keys)
        for key in keys:
            self._store.forget(key)

    # ---- the engine's side ----

    def done(self, message: TransferDone) -> list[Sequence]:
        """One rank's answer. Returns the sequences whose wait is over, to be queued."""
        opened = self._open[message.ticket]
        opened.awaiting.discard(message.rank)
        opened.failed.update(message.failed)
        opened.copy_s = max(opened.copy_s, message.copy_s)
        if message.disk_error and self._store.disk is not None:
            self._store.disk.disable(message.error or "the disk failed")
        if opened.awaiting:
            return []
        del self._open[message.ticket]
        if opened.joined is not None and opened.failed:
            self._misled.append(opened.joined)
        self._close(opened)
        self._spill()
        return self._release_waiters(opened)

    def is_open(self, tickets: list[int]) -> bool:
        """Whether some rank has not answered one of them yet."""
        return any(ticket in self._open for ticket in tickets)

    def take_misled(self) -> list[Sequence]:
        """Sequences that ran on loads which have failed since the last call."""
        misled, self._misled = self._misled, []
        return misled

    def overdue(self) -> list[Sequence]:
        """Sequences that have waited far longer than a copy should take: they compute. The tickets stay open.

        GroupLost when a copy in memory does not come back at all: its blocks can never be used again.
        """
        now_s = self._clock()
        late = [opened for opened in self._open.values() if opened.waiters and now_s > opened.due_s]
        self._judge_stuck()
        given_up = [seq for opened in late for seq in self._release_waiters(opened)]
        for seq in given_up:
            seq.num_loads = MAX_LOADS
        return given_up

    def table_uses(self) -> Iterator[int]:
        """Device blocks that open loads use, one entry per use; for the laws."""
        for opened in self._open.values():
            if opened.ticket.kind == "load":
                yield from opened.ticket.block_ids
                yield from opened.kept

    def held(self) -> Iterator[int]:
        """Device blocks that open stores read; for the laws."""
        for opened in self._open.values():
            if opened.ticket.kind == "store":
                yield from opened.ticket.block_ids

    # ---- finding and starting ----

    def _find(self, seq: Sequence) -> _Found | None:
        """The longest findable prefix over all tiers; None when nothing of it is missing on the device."""
        pool, store = self._manager.pool, self._store
        run: list[int | None] = []
        missing: dict[str, list[bytes]] = {"host": [], "disk": []}
        first = 0
        for key in self._manager.prefix_keys(seq.table, seq.tokens):
            block_id = pool.lookup(key)
            if block_id is None:
                place = store.place(key)
                if place is None:
                    break
                if not missing["host"] and not missing["disk"]:
                    first = len(run)
                missing[place].append(key)
            run.append(block_id)
        if not missing["host"] and not missing["disk"]:
            return None
        on_device = [block_id for block_id in run if block_id is not None]
        num_tokens = (len(run) - first) * self._manager.block_size
        return _Found(run, on_device, missing["host"], missing["disk"], num_tokens)

    def _is_worth(self, found: _Found) -> bool:
        costs, disk = self._costs, len(found.from_disk)
        copy_s = costs.copy_s("load", len(found.from_host) + disk) + costs.copy_s("fetch", disk)
        return copy_s < costs.recompute_s(found.num_tokens)

    def _fetch(self, keys: list[bytes]) -> _Open | None:
        ticket = self._store.fetch(keys, [1.0] * len(keys))
        return None if ticket is None else self._start(ticket)

    def _load(self, seq: Sequence, found: _Found, reserve: int) -> _Open | None:
        """Only when all of it would find room beside what was promised to others, which loads must not evict."""
        manager, pool = self._manager, self._manager.pool
        blocks = manager.blocks_for(len(seq.tokens))
        if blocks + reserve + sum(self._promised.values()) > pool.num_allocatable:
            return None
        for block_id in found.on_device:
            pool.acquire(block_id)
        block_ids = pool.allocate(len(found.from_host))
        if block_ids is None:
            pool.release(reversed(found.on_device), 0)
            return None
        self._promised[seq] = blocks
        self.counts.loaded_tokens += len(block_ids) * manager.block_size
        return self._start(self._store.load(found.from_host, block_ids), kept=found.on_device)

    def _store_blocks(self, table: BlockTable) -> None:
        """The committed blocks that the host lacks; at most half of the pool is held by stores, the heads first."""
        manager = self._manager
        room = manager.pool.num_blocks // 2 - manager.pool.num_held
        wanted = [
            (place, key) for place, key in enumerate(table.keys[: table.num_committed]) if not self._store.is_kept(key)
        ][: max(0, room)]
        costs = [1.0 + place * manager.block_size / COST_DEPTH_TOKENS for place, _ in wanted]
        ticket = self._store.store([(key, table.block_ids[place]) for place, key in wanted], costs)
        if ticket is not None:
            manager.pool.hold(ticket.block_ids)
            self._start(ticket)

    def _spill(self) -> None:
        ticket = self._store.spill()
        if ticket is not None:
            self._start(ticket)

    def _start(self, ticket: Ticket, kept: list[int] | None = None) -> _Open:
        now_s = self._clock()
        patience_s = max(MIN_PATIENCE_S, PATIENCE * self._costs.copy_s(ticket.kind, len(ticket.keys)))
        running_s, step = self._running.turn(), self._costs.num_steps
        opened = _Open(ticket, set(self._ranks), now_s, step, now_s + patience_s, running_s, kept or [])
        self._open[ticket.id] = opened
        if ticket.kind in ("load", "fetch"):
            self._coming.update(dict.fromkeys(ticket.keys, opened))  # who wants the same waits for the same
        on_disk = ticket.kind in ("spill", "fetch")
        self._send(
            Transfer(
                ticket=ticket.id,
                kind=ticket.kind,
                slots=ticket.slots,
                block_ids=ticket.block_ids,
                keys=ticket.keys if on_disk else [],
                dropped=ticket.dropped,
            )
        )
        return opened

    def _judge_stuck(self) -> None:
        """A disk that does not answer is given up, a rank that does not copy loses its group. Time that this process
        was stopped does not count."""
        now_s = self._running.turn()
        for opened in self._open.values():
            if now_s - opened.began_running_s < STUCK_S:
                continue
            kind = opened.ticket.kind
            if kind in ("store", "load"):
                waiting = sorted(opened.awaiting)
                raise GroupLost(
                    f"rank(s) {waiting} have not copied {len(opened.ticket.keys)} KV blocks in {STUCK_S:.0f} s"
                )
            if self._store.disk is not None:
                self._store.disk.disable(
                    f"a {kind} of {len(opened.ticket.keys)} blocks has not ended in {STUCK_S:.0f} s"
                )

    # ---- ending ----

    def _close(self, opened: _Open) -> None:
        ticket, pool, counts = opened.ticket, self._manager.pool, self.counts
        blocks = len(ticket.keys)
        for key in ticket.keys:
            if self._coming.get(key) is opened:
                del self._coming[key]
        counts.blocks[ticket.kind] += blocks
        counts.copy_s[ticket.kind] += opened.copy_s
        counts.failed_blocks += len(opened.failed)
        if not opened.failed:
            beside_steps = self._costs.num_steps > opened.began_step
            elapsed_s = self._clock() - opened.began_s
            self._costs.observe_copy(ticket.kind, blocks, opened.copy_s, elapsed_s, beside_steps=beside_steps)
        self._store.complete(ticket, opened.failed)
        if ticket.kind == "store":
            pool.unhold(ticket.block_ids)
        elif ticket.kind == "load":
            for place, (key, block_id) in enumerate(zip(ticket.keys, ticket.block_ids, strict=True)):
                if place not in opened.failed:
                    pool.publish(block_id, key)
            pool.release(reversed([*opened.kept, *ticket.block_ids]), 0)

    def _release_waiters(self, opened: _Open) -> list[Sequence]:
        waiters = list(opened.waiters)
        opened.waiters.clear()
        for seq in waiters:
            del self._loading[seq]
        return waiters
