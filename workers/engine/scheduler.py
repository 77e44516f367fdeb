"""Who computes how many tokens in the next step: continuous batching without phases, over one block manager.

Every step gives tokens to sequences until their scheduled tokens catch up with the known ones (iteration-level
scheduling: Orca; paged blocks and preemption by recompute: vLLM; prompt chunks beside streams: Sarathi-Serve).
Running rows come first: those one token behind (streams), then the chunks of running prompts, then the waiting.

Why a row number and, physically, a block could be reused at once: every rank runs plans strictly in submission order,
so a plan that rebinds a row or rewrites a block comes after all earlier plans that name it, on each stage by itself.
Rows are therefore reused at once; results are attributed by step, never by row. Blocks are held back until the last
plan that names them has returned (BlockPool), for the index and the tiers look at blocks outside that order.

Adapters: a sequence whose adapter is not on the device waits outside the queue; at most max_loras of them share a step
(adapter_turns.py). Between tenants the queue decides, by what the scheduler tells it of tokens computed (fairness.py).

Called by the engine: add, schedule, returned, finish. Knows no clock, no output, no transport.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from configs.schema import SchedulerSettings
from workers.engine.adapter_turns import AdapterTurns
from workers.engine.admission import WaitingQueue
from workers.engine.block_manager import BlockManager, BlockTable
from workers.engine.pacing import Pacer
from workers.engine.sequence import WAITS, Sequence, Status
from workers.messages import RowInit, RowWork, StepPlan


@dataclass(slots=True, eq=False)
class Flight:
    """One plan and whom it serves: sequences[i] is the owner of work[i]; `admitted` were first given a row here."""

    step_id: int
    sequences: list[Sequence] = field(default_factory=list)
    work: list[RowWork] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    awaits: list[int] = field(default_factory=list)
    num_decode: int = 0
    num_prompt_tokens: int = 0

    def plan(self, freed_rows: list[int]) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            work=self.work,
            new_rows=self.new_rows,
            freed_rows=freed_rows,
            block_copies=self.block_copies,
            awaits=self.awaits,
        )


class Joined(NamedTuple):
    """A load that a plan waits for layer by layer: its ticket, and the device blocks of the prefix with it."""

    ticket: int
    block_ids: list[int]


class LowerTiers(Protocol):
    """What the scheduler asks of the tiers below the device (kv_offload.py)."""

    def load(self, seq: Sequence, reserve: int) -> bool:
        """Starts bringing up what is found of its prefix; True: it waits for that and is given back to requeue()."""
        ...

    def join(self, seq: Sequence) -> Joined | None:
        """The same for a sequence that runs at once, in a plan that waits for the load; room for all of it is there.
        None: nothing to load, or not worth it."""
        ...

    def drop(self, seq: Sequence) -> None:
        """A sequence that waits, for a load or in the queue, waits no more."""
        ...

    def store(self, table: BlockTable) -> None:
        """The blocks of a sequence that has ended, which still holds them, begin their way down."""
        ...

    def swap_out(self, table: BlockTable) -> None:
        """The same for a preempted one, if coming back that way is cheaper than computing again."""
        ...

    def forget(self, table: BlockTable) -> None:
        """A step over these blocks went wrong: what the tiers have of them is found no more."""
        ...


class NoTiers:
    """Only the device."""

    def load(self, seq: Sequence, reserve: int) -> bool:
        del seq, reserve
        return False

    def join(self, seq: Sequence) -> Joined | None:
        del seq
        return None

    def drop(self, seq: Sequence) -> None:
        del seq

    def store(self, table: BlockTable) -> None:
        del table

    def swap_out(self, table: BlockTable) -> None:
        del table

    def forget(self, table: BlockTable) -> None:
        del table


class Scheduler:
    """One group's rows and running order. `relay` (PP > 1): sampled tokens travel back through plans, so a sequence
    waits for its sample; otherwise ranks append it themselves and the next step may be planned before it is known.
    early_loads: what a lower tier has of a prompt is asked for when it enters the queue and its turn comes soon, not
    only at its turn.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        manager: BlockManager,
        waiting: WaitingQueue,
        pacer: Pacer,
        *,
        relay: bool,
        depth: int,
        tiers: LowerTiers | None = None,
        turns: AdapterTurns | None = None,
        early_loads: bool = True,
    ) -> None:
        self.waiting = waiting
        self.num_preemptions = 0
        self.done_step = 0
        self._manager = manager
        self._tiers: LowerTiers = NoTiers() if tiers is None else tiers
        self._swaps = tiers is not None
        self._turns = AdapterTurns(None, 1, waiting) if turns is None else turns
        self._pacer = pacer
        self._relay = relay
        self._early_loads = early_loads and tiers is not None
        self._depth = depth
        self._budget = settings.max_num_batched_tokens
        num_rows = min(settings.max_num_seqs, self._budget)
        self._paced = settings.max_itl_ms is not None
        self._running: list[Sequence] = []
        self._any_finished = False
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._unsent_freed: set[int] = set()
        self._one_token = [RowWork(row=row, num_tokens=1, samples=True) for row in range(num_rows)]
        self._next_step = 1

    # ---- queries ----

    @property
    def num_running(self) -> int:
        return sum(seq.status is Status.RUNNING for seq in self._running)

    def check_laws(self) -> None:
        """Asserts the laws of waiting and of adapters in a step; for tests."""
        self._turns.check_laws([seq for seq in self._running if seq.status is Status.RUNNING])

    # ---- commands ----

    def add(self, seq: Sequence) -> None:
        """A sequence may come in as soon as there is room."""
        seq.num_known = seq.num_charged = len(seq.tokens)
        self.requeue(seq)

    def requeue(self, seq: Sequence) -> None:
        """Into the queue, or first to wait for its adapter, then for what a lower tier has of its prefix. With nobody
        else there it runs while that comes up (_find_prefix)."""
        if seq.adapter is not None and not self._turns.admit(seq):
            self._set_aside(seq, Status.UNPLACED)
            return
        if self._early_loads and self._is_next(seq) and self._tiers.load(seq, self._reserve):
            self._set_aside(seq, Status.LOADING)
            return
        seq.status = Status.PREEMPTED if seq.bound_step else Status.WAITING
        self.waiting.push(seq)

    def _is_next(self, seq: Sequence) -> bool:
        """Others run or wait, and one step may compute what those ahead are behind and begin with seq (who has run
        before leads the queue). What comes up for a later turn is often evicted before it, and has sent away what turns
        before it would have found."""
        behind = [other.num_known - other.num_scheduled for other in self._running if other.status is Status.RUNNING]
        queued = 0 if seq.bound_step else self.waiting.num_tokens
        return bool(behind or len(self.waiting)) and sum(behind) + queued < self._budget

    def withdraw(self, seq: Sequence) -> None:
        """A sequence that waits, perhaps in the queue, waits for its adapter again; requeue() follows."""
        assert seq.status in WAITS and not seq.bound_step, "only newcomers wait for their adapter again"
        self._tiers.drop(seq)
        self._turns.pass_over(seq)
        self._set_aside(seq, Status.UNPLACED)

    def charge_running(self) -> None:
        """Tells the queue what running sequences have cost since it was told last."""
        for seq in self._running:
            self._charge(seq)

    def schedule(self) -> tuple[Flight, StepPlan] | None:
        """The next plan, or None when nobody can compute anything now."""
        if self._any_finished:
            self._running = [seq for seq in self._running if seq.status is Status.RUNNING]
            self._any_finished = False
        flight = Flight(self._next_step)
        preemptions = self.num_preemptions
        chunks = self._schedule_streams(flight)
        budget = self._budget - flight.num_decode
        if self._paced and flight.num_decode and (chunks or len(self.waiting)):
            budget = min(budget, self._pacer.limit())
        if chunks:
            budget = self._schedule_chunks(flight, chunks, budget)
        if budget > 0 and self._free_rows and preemptions == self.num_preemptions:
            self._admit_waiting(flight, budget)
        if not flight.work:
            return None
        self._next_step += 1
        freed_rows = sorted(self._unsent_freed) if self._unsent_freed else []
        self._unsent_freed.clear()
        return flight, flight.plan(freed_rows)

    def returned(self, step_id: int) -> None:
        """The result of step_id is here; results come in order, so no earlier plan is in flight either."""
        self.done_step = step_id
        self._manager.pool.retire(step_id)

    def forget(self, seq: Sequence) -> None:
        """Something went wrong with a sequence: no one finds its KV again, on any tier. finish() follows."""
        self._manager.forget(seq.table)
        self._tiers.forget(seq.table)

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and lets go of all it holds. Its results in flight are discarded."""
        if seq.status in WAITS:
            self._charge(seq)
            self.waiting.remove(seq)
            self._tiers.drop(seq)
            if seq.adapter is not None:
                self._turns.drop(seq)
        elif seq.status is Status.RUNNING:
            self._any_finished = True
            self._tiers.store(seq.table)
            self._unbind(seq)
        seq.status = Status.FINISHED

    # ---- running ----

    def _schedule_streams(self, flight: Flight) -> list[Sequence]:
        """One token for every running row that is one token behind; returns the rows that are further behind."""
        chunks: list[Sequence] = []
        one_token, step_id, relay = self._one_token, flight.step_id, self._relay
        add_seq, add_work = flight.sequences.append, flight.work.append
        most = -(-len(self._running) // self._depth) if relay else len(self._running)
        for seq in self._running:
            known = seq.num_known
            if known - seq.num_scheduled != 1:
                chunks.append(seq)
                continue
            if known >= seq.max_len or (relay and (known != len(seq.tokens) or flight.num_decode >= most)):
                continue
            table = seq.table
            if relay or known > table.capacity or table.may_share:
                work = self._grow(flight, seq)
                if work is None:
                    continue
                add_work(work)
            else:
                add_work(one_token[seq.row])
            add_seq(seq)
            seq.num_scheduled = known
            seq.num_known = known + 1
            seq.last_step = step_id
            flight.num_decode += 1
        return chunks

    def _grow(self, flight: Flight, seq: Sequence) -> RowWork | None:
        """One token of work that needs more than its row's standing entry: blocks, or tokens that ranks lack."""
        known = seq.num_known
        added = self._extend_or_preempt(seq, known)
        if added is None:
            return None
        replaced: list[tuple[int, int]] = []
        if seq.table.may_share:
            copies = self._manager.make_writable(seq.table, seq.num_scheduled, known, flight.step_id)
            assert copies is not None, "forks leave no shared block to a running writer (see _share_prompt)"
            flight.block_copies.extend((copy.source, copy.destination) for copy in copies)
            replaced = [(copy.place, copy.destination) for copy in copies]
        lacking = seq.tokens[seq.num_sent :] if self._relay else []
        seq.num_sent = known
        return RowWork(
            row=seq.row, num_tokens=1, samples=True, new_block_ids=added, token_ids=lacking, replaced_blocks=replaced
        )

    def _extend_or_preempt(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Blocks for seq, taken from another that runs if need be (perhaps from seq itself: None).

        None as well while blocks of preempted or ended sequences are still named by plans in flight: seq sits out.
        """
        manager, pool = self._manager, self._manager.pool
        while (added := manager.extend(seq.table, num_tokens)) is None:
            missing = manager.blocks_for(num_tokens) - len(seq.table.block_ids)
            if pool.num_allocatable + pool.num_pending >= missing:
                return None
            for victim in self._giving_way(self._victim(seq), seq):
                self._running.remove(victim)
                self._preempt(victim)
            if seq.status is not Status.RUNNING:
                return None
        return added

    def _victim(self, seq: Sequence) -> Sequence:
        """Of those that this step has not served yet, seq included: one of the tenant that has been served most, of the
        lowest priority there, the latest. (If it is seq itself, the one after it sits this step out.)"""
        self.charge_running()
        unserved = self._running[self._running.index(seq) :]
        return max(unserved, key=lambda other: (self.waiting.counter(other), other.order))

    def _giving_way(self, victim: Sequence, seq: Sequence) -> list[Sequence]:
        """All running choices of the victim's request, which is later than seq's: what they share is free only when the
        last of them goes, and is shared again when they come back. Choices of one request give way to each other one by
        one: this plan may serve some already, and a request that fills the pool by itself must get on. So do they all
        where nothing is kept below the device: what each had said would have to be computed again.
        """
        if victim.state is seq.state or not self._swaps:
            return [victim]
        return [other for other in self._running if other.state is victim.state]

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without blocks; its samples in flight still count, its KV is loaded or computed again."""
        self._tiers.swap_out(seq.table)
        self._unbind(seq)
        seq.status = Status.PREEMPTED
        seq.num_scheduled = seq.num_computed = seq.num_loads = 0
        self.num_preemptions += 1
        self.waiting.push(seq)

    def roll_back(self, seq: Sequence) -> None:
        """What it computed rests on KV that did not arrive: back to the queue, and no result in flight counts."""
        if seq.status is Status.RUNNING:
            self._any_finished = True
            self._unbind(seq)
            seq.status = Status.PREEMPTED
            seq.num_scheduled = seq.num_computed = 0
            self.waiting.push(seq)
        if seq.status is not Status.FINISHED:
            seq.num_known = len(seq.tokens)
            seq.void_until = self._next_step - 1

    def _unbind(self, seq: Sequence) -> None:
        self._charge(seq)
        if seq.adapter is not None:
            self._turns.unbind(seq)
        self._manager.release(seq.table, seq.last_step)
        self._free_rows.append(seq.row)
        self._unsent_freed.add(seq.row)
        seq.row = -1

    def _charge(self, seq: Sequence) -> None:
        num_tokens = len(seq.tokens)
        if num_tokens > seq.num_charged:
            self.waiting.charge(seq, output_tokens=num_tokens - seq.num_charged)
            seq.num_charged = num_tokens

    def _schedule_chunks(self, flight: Flight, chunks: list[Sequence], budget: int) -> int:
        """The next part of running prompts, earliest first. Their blocks were allocated when they were admitted."""
        for seq in chunks:
            if seq.status is Status.RUNNING and budget > 0:
                budget -= self._give(flight, seq, budget, [])
        return budget

    def _give(self, flight: Flight, seq: Sequence, budget: int, new_block_ids: list[int]) -> int:
        """Up to `budget` of the tokens that seq is behind; a sample when that reaches the last known token."""
        behind = seq.num_known - seq.num_scheduled
        num_tokens = min(behind, budget)
        samples = num_tokens == behind
        flight.sequences.append(seq)
        flight.work.append(RowWork(row=seq.row, num_tokens=num_tokens, samples=samples, new_block_ids=new_block_ids))
        flight.num_prompt_tokens += num_tokens
        seq.num_scheduled += num_tokens
        seq.num_known += samples
        seq.last_step = flight.step_id
        return num_tokens

    # ---- waiting ----

    def _admit_waiting(self, flight: Flight, budget: int) -> None:
        """Lets in the head of the queue while rows, blocks and tokens last; nobody overtakes a head that must wait for
        those (for its adapter's turn: adapter_turns.py)."""
        if self._turns.is_due:
            self._turns.bring_back()
        if self.waiting.is_contested:
            self.charge_running()
        while budget > 0 and self._free_rows and (seq := self.waiting.peek()) is not None:
            if seq.last_step > self.done_step:
                return  # preempted, with samples still in flight
            if seq.adapter is not None and not self._turns.may_run(seq):
                continue
            alone = not self._running and not flight.work
            joined = self._tiers.join(seq) if alone else None
            if joined is None and self._tiers.load(seq, self._reserve):
                self._set_aside(seq, Status.LOADING)
                continue
            admitted = self._share_prompt(flight, seq) or self._find_prefix(flight, seq, joined)
            if not admitted:
                return
            self.waiting.remove(seq)
            if not seq.bound_step:
                flight.admitted.append((seq, seq.num_scheduled))
                self.waiting.charge(seq, prompt_tokens=len(seq.tokens) - seq.num_scheduled)
            self._bind(flight, seq)
            budget -= self._give(flight, seq, budget, list(seq.table.block_ids))

    def _set_aside(self, seq: Sequence, status: Status) -> None:
        self.waiting.set_aside(seq)
        seq.status = status

    @property
    def _reserve(self) -> int:
        """Blocks to leave for those who run (each takes one per block_size steps), so that a newcomer is not preempted
        in the very next steps. None when nobody runs: what fits an empty pool never waits forever."""
        return -(-len(self._running) // 4)

    def _find_prefix(self, flight: Flight, seq: Sequence, joined: Joined | None) -> bool:
        """Blocks for all known tokens, those found by content first. False when there is no room.

        A sequence that is alone need not wait for a lower tier: no stream is held up by a step that does.
        """
        hits = self._manager.match_prefix(seq.table, seq.tokens) if joined is None else joined.block_ids
        admitted = self._manager.admit(seq.table, len(seq.tokens), hits, self._reserve)
        if joined is not None:
            assert admitted, "there was room for all of it"
            flight.awaits.append(joined.ticket)
        if not admitted:
            return False
        seq.num_scheduled = seq.num_computed = len(hits) * self._manager.block_size
        return True

    def _share_prompt(self, flight: Flight, seq: Sequence) -> bool:
        """n > 1: takes over the prompt's blocks of a running choice, and copies the one it will write, at once. Not
        when more is found by content: its own answer so far, which came back from a lower tier or never left."""
        if len(seq.state.sequences) == 1:
            return False
        num_tokens = min(seq.prompt_len, len(seq.tokens) - 1)
        source = seq.state.fork_source(num_tokens, self.done_step)
        manager, total = self._manager, len(seq.tokens)
        whole = num_tokens // manager.block_size
        if source is None or manager.blocks_for(total) - whole + self._reserve > manager.pool.num_allocatable:
            return False
        if seq.num_output and len(manager.match_prefix(seq.table, seq.tokens)) > whole:
            return False
        manager.fork(source.table, seq.table, num_tokens)
        copies = manager.make_writable(seq.table, num_tokens, total, flight.step_id)
        added = manager.extend(seq.table, total)
        assert copies is not None and added is not None
        flight.block_copies.extend((copy.source, copy.destination) for copy in copies)
        seq.num_scheduled = seq.num_computed = num_tokens
        return True

    def _bind(self, flight: Flight, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        self._unsent_freed.discard(seq.row)
        seq.status = Status.RUNNING
        seq.num_sent = len(seq.tokens)
        seq.bound_step = flight.step_id
        slot = None if seq.adapter is None else self._turns.bind(seq)
        flight.new_rows.append(
            RowInit(
                row=seq.row,
                token_ids=seq.tokens.copy(),
                prompt_len=seq.prompt_len,
                num_computed=seq.num_scheduled,
                sampling=seq.row_sampling(),
                adapter_slot=slot,
            )
        )
        if not self._running or self._running[-1].order < seq.order:
            self._running.append(seq)
        else:
            insort(self._running, seq, key=lambda other: other.order)
