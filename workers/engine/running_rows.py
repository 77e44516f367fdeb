"""RunningRows: the sequences that have a row, in their order; which rows are free; who gives way to whom.

Row numbers are reused at once: every rank runs plans in submission order, so a plan that rebinds a row comes after all
earlier plans that name it, on each stage. Called by the scheduler alone.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf

from tandem.workers.engine.base.sequence import Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.blocks.kept_tables import KeptTable, KeptTables
from tandem.workers.engine.transfers.lower_tiers import LowerTiers
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.least_share import gives_way, latest_idle
from tandem.workers.engine.waiting.row_shares import HeldBlocks
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.step import RowInit


class RunningRows:
    """num_rows rows of one scheduler. tiers: where blocks go that a preempted sequence loses; None: none."""

    def __init__(
        self,
        num_rows: int,
        manager: BlockManager,
        waiting: WaitingQueue,
        tiers: LowerTiers | None,
        rules: ListOf[AdmissionRule],
    ) -> None:
        self.sequences: list[Sequence] = []  # earliest first; those that have ended stay until prune()
        self.num_preemptions = 0
        self.free = list(range(num_rows - 1, -1, -1))
        self._manager = manager
        self._waiting = waiting
        self._tiers = tiers
        self._rules = rules
        self._pausing = [rule for rule in rules if type(rule).giving_way is not AdmissionRule.giving_way]
        self._kept = KeptTables(manager)
        self._unsent_freed: set[int] = set()
        self._any_ended = False

    # ---- queries ----

    def running(self) -> list[Sequence]:
        """Returns the sequences that run, in their order."""
        return [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]

    @property
    def reserve(self) -> int:
        """Blocks to leave for running sequences (each takes one of each group per block_size steps), so that a new one
        is not preempted in the next steps. 0 when none runs, so that a sequence that fits the empty pool is
        admitted."""
        return -(-len(self.sequences) * self._manager.groups.count // 4)

    # ---- rows ----

    def prune(self) -> None:
        """Drops the sequences that have ended."""
        if self._any_ended:
            self.sequences = [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]
            self._any_ended = False

    def take_freed(self) -> list[int]:
        """Returns the rows that have become free since the last call, and are."""
        freed = sorted(self._unsent_freed) if self._unsent_freed else []
        self._unsent_freed.clear()
        return freed

    def bind(self, seq: Sequence, step_id: int) -> RowInit:
        """Gives a sequence a row, from this step on."""
        seq.row = self.free.pop()
        self._unsent_freed.discard(seq.row)
        seq.status = SequenceStatus.RUNNING
        seq.num_sent = len(seq.tokens)
        seq.bound_step = step_id
        self._waiting.tenants.take_row(seq)
        for rule in self._rules:
            rule.bound(seq)
        if not self.sequences or self.sequences[-1].order < seq.order:
            self.sequences.append(seq)
        else:
            insort(self.sequences, seq, key=lambda other: other.order)
        return RowInit(
            row=seq.row,
            token_ids=seq.tokens.copy(),
            prompt_len=seq.prompt_len,
            num_computed=seq.num_scheduled,
            sampling=seq.row_sampling(),
            adapter_slot=seq.adapter_slot,
            pool=seq.state.request.pool,
        )

    def end(self, seq: Sequence) -> None:
        """Takes the row and the blocks of a sequence, which leaves the list with the next prune()."""
        self._any_ended = True
        self._unbind(seq)

    def some(self, shares_step: Callable[[Sequence], bool], most: int) -> Iterator[Sequence]:
        """Yields the sequences that may share a step, in their order, but for those that are preempted meanwhile; if
        they are more than `most`, those that no step has served for longest."""
        some = [seq for seq in self.sequences if shares_step(seq)]
        chosen = set(heapq.nsmallest(most, some, key=lambda seq: seq.last_step))
        return (seq for seq in some if seq in chosen and seq.status is SequenceStatus.RUNNING)

    def preempt(self, seq: Sequence, *, keeps_blocks: bool = False) -> None:
        """Returns a running sequence to the queue without blocks. Its samples in flight still count. keeps_blocks: they
        stay for it as long as nobody needs them."""
        self.sequences.remove(seq)
        if keeps_blocks:
            self._kept.keep(seq, KeptTable(seq.table, seq.num_scheduled, seq.last_step))
            seq.table = self._manager.new_table_like(seq.table)
        elif self._tiers is not None:
            self._tiers.swap_out(seq.table)
        self.charge(seq)
        self._waiting.push(seq)  # while its tenant runs something: it keeps what it is owed
        self._unbind(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled = seq.num_computed = seq.num_loads = 0
        self.num_preemptions += 1
        seq.state.num_preemptions += 1

    def _unbind(self, seq: Sequence) -> None:
        self.charge(seq)
        self._waiting.tenants.leave_row(seq)
        for rule in self._rules:
            rule.unbound(seq)
        self._manager.release(seq.table, seq.last_step)
        self.free.append(seq.row)
        self._unsent_freed.add(seq.row)
        seq.row = -1

    # ---- blocks without a row ----

    def kept_tables(self) -> list[BlockTable]:
        """Returns the tables that wait for their sequences; for check_invariants()."""
        return [kept.table for kept in self._kept]

    def has_kept(self, seq: Sequence) -> bool:
        """Returns whether a waiting sequence has left its blocks where they are."""
        return seq in self._kept

    def table_of(self, seq: Sequence) -> BlockTable:
        """Returns the blocks of a sequence, or those that it has left where they are."""
        kept = self._kept.get(seq)
        return seq.table if kept is None else kept.table

    def take_kept(self, seq: Sequence) -> bool:
        """Returns whether a sequence that gets a row has its blocks again, with those that all its known tokens need.
        The plans that name it have returned."""
        kept = self._kept.take(seq, len(seq.tokens))
        if kept is None:
            return False
        seq.table = kept.table
        seq.num_scheduled = seq.num_computed = kept.num_tokens
        return True

    def drop_kept(self, seq: Sequence) -> None:
        """Releases the blocks of a waiting sequence that has ended."""
        self._kept.drop(seq)

    def clear_kept(self) -> bool:
        """Releases the blocks of all sequences that wait; returns whether there were any."""
        if self._tiers is not None:
            for kept in self._kept:
                self._tiers.swap_out(kept.table)
        return self._kept.clear()

    # ---- what tenants have had ----

    def charge_all(self) -> None:
        """Charges tenants for the tokens of running sequences since the last charge."""
        for seq in self.sequences:
            self.charge(seq)

    def charge(self, seq: Sequence) -> None:
        """Charges a sequence's tenant for its tokens since the last charge."""
        num_tokens = len(seq.tokens)
        if num_tokens > seq.num_charged:
            self._waiting.tenants.charge(seq, output_tokens=num_tokens - seq.num_charged)
            seq.num_charged = num_tokens

    # ---- who gives way ----

    def make_way(self) -> None:
        """Preempts idle work for queued sequences that are none; then, for queued ones of tenants that lack rows of
        their share, sequences of tenants that have more than theirs. All rows are taken."""
        tenants = self._waiting.tenants
        for _ in range(tenants.num_urgent):
            if (idle := latest_idle(self.sequences, self._waiting.peek())) is None:
                break
            self.preempt(idle, keeps_blocks=self._may_keep(idle))
        if not tenants.shares.is_shared:
            return
        self.charge_all()
        for taker, lacking in tenants.lacking():
            for _ in range(lacking):
                victim = gives_way(taker, self.sequences, tenants.shares)
                if victim is None:
                    break
                self.preempt(victim, keeps_blocks=self._may_keep(victim))

    def pause(self, *, has_room: bool) -> None:
        """Preempts the sequences that a rule names, so that others come to what these hold; none that would lose what
        it has computed. has_room: others find rows and blocks."""
        for rule in self._pausing:
            if paused := rule.giving_way(self._may_pause, has_room=has_room):
                for seq in paused:
                    self.preempt(seq, keeps_blocks=True)
                rule.gave_way(paused)

    def _may_pause(self, seq: Sequence) -> bool:
        return seq.status is SequenceStatus.RUNNING and self._may_keep(seq)

    def free_blocks(self, first: Sequence) -> None:
        """Preempts sequences of tenants that have more blocks than their share, for the first in the queue, until it
        has those that it lacks."""
        manager, tenants = self._manager, self._waiting.tenants
        has_idle = latest_idle(self.sequences, first) is not None
        if not tenants.shares.is_shared and not has_idle:
            return
        need = manager.cost(len(first.tokens), manager.match_prefix(first.table, first.tokens))
        missing = need + self.reserve - manager.pool.num_allocatable - manager.pool.num_pending
        if missing <= 0:
            return
        while missing > 0 and (idle := latest_idle(self.sequences, first)) is not None:
            missing -= _num_blocks(idle)
            self.preempt(idle)
        if not tenants.shares.is_shared:
            return
        self.charge_all()
        while missing > 0 and (taker := tenants.claims(first, need, blocks := self._held_blocks())) is not None:
            victim = gives_way(taker, self.sequences, tenants.shares, blocks)
            if victim is None:
                return
            missing -= _num_blocks(victim)
            self.preempt(victim)

    def _held_blocks(self) -> HeldBlocks:
        held: Counter[str] = Counter()
        for seq in self.sequences:
            held[seq.tenant] += _num_blocks(seq)
        return HeldBlocks(self._manager.pool.num_blocks, held)

    def _may_keep(self, seq: Sequence) -> bool:
        """Returns whether a sequence may leave its blocks where they are: there is room for as many more as run, and
        none of its blocks, and nothing that its row counted, is shared or lost with the row."""
        alone = len(seq.state.sequences) == 1 and not seq.table.may_share and seq.table.finds_prefix
        return alone and self._manager.pool.num_allocatable >= 2 * len(self.sequences) * self._manager.groups.count

    def preempt_for(self, seq: Sequence) -> None:
        """Preempts one of those that this step has not served yet, seq included: of the tenant served most, the one of
        lowest priority, then the latest; in its place all choices of its request where blocks are shared."""
        # if it is seq itself, the sequence after it skips this step
        self.charge_all()
        unserved = self.sequences[self.sequences.index(seq) :]
        blocks, tenants = self._held_blocks(), self._waiting.tenants
        victim = max(unserved, key=lambda other: (tenants.holding(other, blocks), other.order))
        for other in self._giving_way(victim, seq):
            self.preempt(other)

    def _giving_way(self, victim: Sequence, seq: Sequence) -> list[Sequence]:
        """Returns the sequences to preempt for a victim: all running choices of its request, or the victim alone.

        The victim alone if it is a choice of seq's request (this plan may serve some choices already, and a request
        that fills the pool by itself must make progress), or without lower tiers, where each answer so far would be
        computed again. Otherwise all: shared blocks are free only when the last choice is gone.
        """
        if victim.state is seq.state or self._tiers is None:
            return [victim]
        return [other for other in self.sequences if other.state is victim.state]


def _num_blocks(seq: Sequence) -> int:
    return len(seq.table.block_ids) + seq.table.num_reserved
