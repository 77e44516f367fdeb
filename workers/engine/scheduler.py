"""Scheduler: assigns tokens of the next step to sequences; continuous batching without phases over one block manager.

Every step gives tokens to sequences until their scheduled tokens catch up with the known ones (iteration-level
scheduling: Orca; paged blocks and preemption by recompute: vLLM; prefill chunks beside decodes: Sarathi-Serve).
Running rows come first: decodes (one token behind), then prefill chunks, then waiting sequences.

Row numbers are reused at once: every rank runs plans in submission order, so a plan that rebinds a row comes after all
earlier plans that name it, on each stage. Results are therefore attributed by step, never by row. Blocks become free
only when the last plan that names them has returned (BlockPool): the index and the tiers read them out of that order.

Adapters: a sequence whose adapter is not on the device is blocked; at most max_loras of them share a step
(max_loras.py). Between tenants the queue decides, by the tokens charged to each (fairness.py). A request that may have
ended a group has its steps to itself for a while (probation.py). Who may join those that run is --batching-policy
(batching_policy.py).

Called by the engine: enqueue, schedule, returned, finish. It has no clock, output or transport.
"""

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator

from tandem.configs.schema import SchedulerSettings
from tandem.workers.engine.base.blockers import Blocker, Event
from tandem.workers.engine.base.drafting import Drafting
from tandem.workers.engine.base.sequence import RequestState, Sequence, Status
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.chunk_limiter import ChunkLimiter
from tandem.workers.engine.first_blocks import find_prefix, share_prompt
from tandem.workers.engine.in_flight_step import InFlightStep
from tandem.workers.engine.probation import Probation
from tandem.workers.engine.step_limit import StepLimit
from tandem.workers.engine.transfers.lower_tiers import LowerTiers, NoTiers
from tandem.workers.engine.waiting.batching_policy import NEXT_BATCH, BatchingPolicy, ContinuousBatching
from tandem.workers.engine.waiting.grammar_cache import GrammarCache
from tandem.workers.engine.waiting.least_share import gives_way
from tandem.workers.engine.waiting.max_loras import MaxLorasGate
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.step import RowInit, RowWork, StepPlan


class Scheduler:
    """One group's rows and running order.

    relay (PP > 1): sampled tokens return to the ranks in plans, so a sequence waits for its sample; otherwise ranks
    append it themselves, and the next step may be planned before it is known. depth: plans that may be in flight.
    tiers: the tiers below the device; None: none. gate: None: no request has an adapter. drafting: None: no speculative
    decoding; it does not go with `relay`. batching: None: continuous. grammars: None: no request has one.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        manager: BlockManager,
        waiting: WaitingQueue,
        chunk_limiter: ChunkLimiter,
        *,
        relay: bool,
        depth: int,
        tiers: LowerTiers | None = None,
        gate: MaxLorasGate | None = None,
        drafting: Drafting | None = None,
        batching: BatchingPolicy | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        self.waiting = waiting
        self.num_preemptions = 0
        self.done_step = 0
        self._manager = manager
        self._tiers: LowerTiers = NoTiers() if tiers is None else tiers
        self._has_tiers = tiers is not None
        self._gate = MaxLorasGate(None, 1, waiting) if gate is None else gate
        self._batching: BatchingPolicy = ContinuousBatching() if batching is None else batching
        self._grammars = grammars
        self._chunk_limiter = chunk_limiter
        self._relay = relay
        self._drafting = drafting
        self._depth = depth
        self._budget = settings.max_num_batched_tokens
        num_rows = min(settings.max_num_seqs, self._budget)
        self._limits_prefill = settings.max_itl_ms is not None
        self._running: list[Sequence] = []
        self._any_finished = False
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._unsent_freed: set[int] = set()
        self._one_token = [RowWork(row=row, num_tokens=1, samples=True) for row in range(num_rows)]
        self._next_step = 1
        self._limit = StepLimit(self._budget)
        self._known_failure = 0
        self._lacks_blocks: Sequence | None = None
        self._undone: set[Sequence] = set()
        self._probation = Probation(waiting, 0 if drafting is None else drafting.most)

    # ---- queries ----

    @property
    def alone(self) -> RequestState | None:
        """The request that has its steps to itself, if any."""
        return self._probation.current

    def check_invariants(self) -> None:
        """Asserts the invariants of blocked sequences and of adapters in a step; for tests."""
        assert self.alone is not None or not self.waiting.keys_of(Blocker.ALONE), "a suspect waits for nobody"
        self._gate.check_invariants([seq for seq in self._running if seq.status is Status.RUNNING])

    # ---- commands ----

    def enqueue(self, seq: Sequence) -> None:
        """Queues a new sequence, or one that unblock() has returned; or blocks it while its adapter or KV of its prefix
        is loaded, or its grammar compiled. With no other sequence it runs at once, and the load overlaps with its
        first step."""
        if seq.adapter is not None and not self._gate.admit(seq):
            self.waiting.block(seq, Blocker.ADAPTER, seq.adapter)
        elif seq.grammar is not None and self._grammars is not None and not self._grammars.is_ready(seq.grammar):
            self.waiting.block(seq, Blocker.GRAMMAR, seq.grammar)
        elif not self._probation.may_run(seq.state):
            self._hold(seq, Event(Blocker.ALONE, seq.state))
        elif self._has_tiers and self._is_next(seq) and (ticket := self._tiers.load(seq, self._reserve)) is not None:
            self.waiting.block(seq, Blocker.KV, ticket)
        else:
            self._push(seq)

    def unblock(self, event: Event) -> None:
        """Enqueues the sequences that wait for this. failure: those that waited for KV compute it."""
        for seq in self.waiting.unblock(event):
            if event.failure is not None and event.blocker is Blocker.KV:
                self._tiers.forbid_loads(seq)
            self.enqueue(seq)

    def _push(self, seq: Sequence) -> None:
        """Queues a sequence that needs only a row and blocks; of a suspect, it has the turn from now on."""
        self._probation.begin(seq.state)
        self.waiting.push(seq)

    def _hold(self, seq: Sequence, until: Event) -> None:
        """Blocks a sequence that is not served soon. What was loaded for it may be evicted meanwhile."""
        self._release_loaded(seq)
        self.waiting.block(seq, until.blocker, until.key)

    def _is_next(self, seq: Sequence) -> bool:
        """Returns whether others run or wait, and one step may compute all tokens ahead of seq and begin with seq."""
        # KV loaded earlier is often evicted before it is used, and has evicted KV that requests ahead would have found.
        # A sequence that has run before leads the queue.
        behind = [other.num_known - other.num_scheduled for other in self._running if other.status is Status.RUNNING]
        queued = 0 if seq.bound_step else self.waiting.tenants.num_tokens
        return bool(behind or len(self.waiting)) and sum(behind) + queued < self._budget

    def withdraw(self, seq: Sequence) -> None:
        """Blocks a waiting sequence until its adapter is on the device again."""
        assert seq.status is Status.WAITING and seq.adapter is not None and not seq.bound_step, (
            "only a sequence that has not run waits for its adapter again"
        )
        self._tiers.drop(seq)
        self._gate.withdraw(seq)
        self.waiting.block(seq, Blocker.ADAPTER, seq.adapter)

    def charge_running(self) -> None:
        """Charges tenants for the tokens of running sequences since the last charge."""
        for seq in self._running:
            self._charge(seq)

    def schedule(self) -> tuple[InFlightStep, StepPlan] | None:
        """Returns the next plan, or None if no sequence can compute now; none while plans are in flight that were made
        before a failure was known."""
        if self.done_step < self._known_failure:
            return None
        if self._any_finished:
            self._running = [seq for seq in self._running if seq.status is Status.RUNNING]
            self._any_finished = False
        for event in self._probation.pass_turn():
            self.unblock(event)
        if self.alone is None and (planned := self._plan()) is not None:
            return planned  # without work a suspect may have taken the turn meanwhile
        if self.alone is None or self.done_step < self._next_step - 1:
            return None
        return self._plan() or self._plan()  # the first one is without work: it is the turn of the others

    def _plan(self) -> tuple[InFlightStep, StepPlan] | None:
        """Returns a plan for the running sequences that may share it and for those that wait; None without work."""
        self._probation.alternate()
        rolled_back = self._roll_back_rows() if self._undone else []
        if not self._free_rows or self._lacks_blocks is not None:
            self._make_way()
        step = InFlightStep(self._next_step)
        preemptions = self.num_preemptions
        prefills = self._schedule_decodes(step)
        budget = self._limit.tokens - step.num_decode - step.num_drafts
        if self._limits_prefill and step.num_decode and (prefills or len(self.waiting)):
            budget = min(budget, self._chunk_limiter.limit() - step.num_drafts)
        if prefills:
            budget = self._schedule_prefills(step, prefills, budget)
        if budget > 0 and self._free_rows and preemptions == self.num_preemptions:
            self._admit_waiting(step, budget)
        if not step.work:
            return None
        self._next_step += 1
        freed_rows = sorted(self._unsent_freed) if self._unsent_freed else []
        self._unsent_freed.clear()
        self._undone.clear()
        return step, step.plan(freed_rows, self._known_failure, rolled_back)

    def returned(self, step_id: int) -> None:
        """Notes that the result of step_id has come; results come in order, so earlier plans have returned too."""
        self.done_step = step_id
        self._limit.succeeded()
        self._manager.pool.retire(step_id)

    def undo(self, step: InFlightStep) -> Sequence | None:
        """Takes back a plan of which the ranks computed nothing: its rows stay bound, their tokens are planned again,
        fewer at once. Later plans in flight fail too; each is taken back when its result comes.

        Returns the sequence that cannot be computed: the only one of a step with one token.
        """
        self.done_step = step.step_id
        self._manager.pool.retire(step.step_id)
        is_first = step.step_id > self._known_failure  # those behind it were made before this was known
        if is_first:
            self._known_failure = self._next_step - 1
            self._limit.failed(step.num_tokens)
        for seq, work in zip(step.sequences, step.work, strict=True):
            if step.step_id <= seq.void_until or seq.status is Status.FINISHED:
                continue
            seq.num_known -= work.samples
            seq.num_drafts -= work.max_drafts
            if seq.status is Status.RUNNING:
                seq.num_scheduled -= work.num_tokens
                self._undone.add(seq)
        return step.sequences[0] if is_first and step.num_tokens == 1 else None

    def _roll_back_rows(self) -> list[tuple[int, int, int]]:
        """(row, known tokens, computed tokens) for the ranks, of the sequences that undo() left running."""
        running = (seq for seq in self._undone if seq.status is Status.RUNNING)
        return sorted((seq.row, seq.num_known, seq.num_scheduled) for seq in running)

    def forget(self, seq: Sequence) -> None:
        """Removes a failed sequence's KV from the index of every tier. finish() follows."""
        self._manager.forget(seq.table)
        self._tiers.forget(seq.table)

    def finish(self, seq: Sequence) -> None:
        """Removes a sequence in any state and releases all it holds. Its results in flight are discarded."""
        if seq.status is Status.WAITING:
            self._charge(seq)
            is_fork = self.waiting.blocker_of(seq) is Blocker.FORK
            if self.waiting.has(seq):  # else it failed on its way there
                self.waiting.remove(seq)
            if not is_fork:
                self._release_loaded(seq)
        elif seq.status is Status.RUNNING:
            self._any_finished = True
            self._tiers.store(seq.table)
            self._unbind(seq)
        seq.status = Status.FINISHED

    def _release_loaded(self, seq: Sequence) -> None:
        """Gives up what was loaded for a waiting sequence: its turn is not near, or it has ended."""
        self._tiers.drop(seq)
        if seq.adapter is not None:
            self._gate.drop(seq)

    # ---- running ----

    def _schedule_decodes(self, step: InFlightStep) -> list[Sequence]:
        """Schedules a token for each running row that is one token behind; returns those further behind (prefills)."""
        prefills: list[Sequence] = []
        running: Iterable[Sequence] = self._running
        if self._limit.is_reduced or self._probation.current is not None:
            running = self._some_running()
        one_token, step_id, relay, drafting = self._one_token, step.step_id, self._relay, self._drafting
        add_seq, add_work = step.sequences.append, step.work.append
        in_turns = relay and self.alone is None  # so that each stage has a step
        most = -(-len(self._running) // self._depth) if in_turns else len(self._running)
        for seq in running:
            known = seq.num_known
            if known - seq.num_scheduled != 1:
                prefills.append(seq)
                continue
            if known >= seq.max_len or (relay and (known != len(seq.tokens) or step.num_decode >= most)):
                continue
            table = seq.table
            num_drafts = 0 if drafting is None else self._num_drafts(step, seq)
            if num_drafts is None:
                continue
            if relay or known + seq.num_drafts > table.capacity or table.may_share or num_drafts:
                work = self._grow(step, seq, num_drafts)
                if work is None:
                    continue
                add_work(work)
            else:
                add_work(one_token[seq.row])
            add_seq(seq)
            seq.num_scheduled = known
            seq.num_known = known + 1
            seq.last_step = step_id
            step.num_decode += 1
        return prefills

    def _some_running(self) -> Iterator[Sequence]:
        """Yields the running sequences that may share the step, in their order, but for those that are preempted
        meanwhile; if they are too many, those that no step has served for longest."""
        some = [seq for seq in self._running if self._probation.shares_step(seq.state)]
        chosen = set(heapq.nsmallest(self._limit.tokens, some, key=lambda seq: seq.last_step))
        return (seq for seq in some if seq in chosen and seq.status is Status.RUNNING)

    def _num_drafts(self, step: InFlightStep, seq: Sequence) -> int | None:
        """Returns how many drafts seq may have in the step; None if the plans in flight may bring its last token."""
        assert self._drafting is not None
        room = seq.max_len - seq.num_known - seq.num_drafts
        if room <= 0:
            return None
        rows = len(self._running)
        if self._limit.is_reduced or room == 1 or seq.state is self.alone:
            return 0
        half = min(self._budget // 2 - rows, self._chunk_limiter.limit() // 2)  # the other one is left for prefills
        most = min(room - 1, half - step.num_drafts)
        return max(0, min(most, self._drafting.budget(seq.drafting, seq.num_known, rows)))

    def _grow(self, step: InFlightStep, seq: Sequence, num_drafts: int) -> RowWork | None:
        """Returns one token of work with drafts, new blocks or tokens that ranks lack; None if seq gets no blocks. For
        drafts alone nobody is preempted, and no block is taken that running sequences will need soon."""
        known = seq.num_known
        most = known + seq.num_drafts
        missing = self._manager.lacks(seq.table, most + num_drafts)
        if missing > max(0, self._manager.pool.num_allocatable - self._reserve):
            num_drafts = 0
        added = self._extend_or_preempt(seq, most + num_drafts)
        if added is None:
            return None
        replaced: list[tuple[int, int]] = []
        if seq.table.may_share:
            copies = self._manager.make_writable(seq.table, seq.num_scheduled, most + num_drafts, step.step_id)
            assert copies is not None, "forks leave no shared block to a running writer (see share_prompt)"
            step.block_copies.extend((copy.source, copy.destination) for copy in copies)
            replaced = [(copy.table_index, copy.destination) for copy in copies]
        lacking = seq.tokens[seq.num_sent :] if self._relay else []
        seq.num_sent = known
        seq.num_drafts += num_drafts
        step.num_drafts += num_drafts
        return RowWork(
            row=seq.row,
            num_tokens=1,
            samples=True,
            new_block_ids=added,
            token_ids=lacking,
            replaced_blocks=replaced,
            max_drafts=num_drafts,
        )

    def _extend_or_preempt(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Returns new blocks for num_tokens tokens of seq; preempts running sequences if the pool has too few.

        None if seq itself was preempted, or while plans in flight still name the blocks of preempted or ended
        sequences: seq then skips this step.
        """
        manager, pool = self._manager, self._manager.pool
        while (added := manager.extend(seq.table, num_tokens)) is None:
            missing = manager.lacks(seq.table, num_tokens)
            if pool.num_allocatable + pool.num_pending >= missing:
                return None
            for victim in self._giving_way(self._victim(seq), seq):
                self._running.remove(victim)
                self._preempt(victim)
            if seq.status is not Status.RUNNING:
                return None
        return added

    def _victim(self, seq: Sequence) -> Sequence:
        """Returns the sequence to preempt, of those that this step has not served yet, seq included: of the tenant
        served most, the one of lowest priority, then the latest."""
        # if it is seq itself, the sequence after it skips this step
        self.charge_running()
        unserved = self._running[self._running.index(seq) :]
        return max(unserved, key=lambda other: (self.waiting.tenants.counter(other), other.order))

    def _giving_way(self, victim: Sequence, seq: Sequence) -> list[Sequence]:
        """Returns the sequences to preempt for a victim: all running choices of its request, or the victim alone.

        The victim alone if it is a choice of seq's request (this plan may serve some choices already, and a request
        that fills the pool by itself must make progress), or without lower tiers, where each answer so far would be
        computed again. Otherwise all: shared blocks are free only when the last choice is gone.
        """
        if victim.state is seq.state or not self._has_tiers:
            return [victim]
        return [other for other in self._running if other.state is victim.state]

    def _preempt(self, seq: Sequence) -> None:
        """Returns a running sequence to the queue without blocks. Its samples in flight still count."""
        self._tiers.swap_out(seq.table)
        self._unbind(seq)
        seq.status = Status.WAITING
        seq.num_scheduled = seq.num_computed = seq.num_loads = 0
        self.num_preemptions += 1
        self.waiting.push(seq)

    def roll_back(self, seq: Sequence) -> None:
        """Returns a sequence to the queue after a failed load; its results in flight are discarded."""
        if seq.status is Status.RUNNING:
            self._any_finished = True
            self._unbind(seq)
            seq.status = Status.WAITING
            seq.num_scheduled = seq.num_computed = 0
            self.waiting.push(seq)
        if seq.status is not Status.FINISHED:
            seq.num_known, seq.num_drafts = len(seq.tokens), 0
            seq.void_until = self._next_step - 1

    def _make_way(self) -> None:
        """Preempts a sequence of another tenant if the first in the queue is of one that runs nothing and lacks a row,
        or blocks. Blocks come free when plans in flight return; until then no more are taken."""
        first, starved = self.waiting.peek(), self._lacks_blocks
        self._lacks_blocks = None
        if first is None or not self._batching.joins_running or self._limit.is_reduced or self.alone is not None:
            return
        if self._free_rows and (first is not starved or self._manager.pool.num_pending):
            return
        self.charge_running()
        victim = gives_way(first, self._running, self.waiting.tenants)
        if victim is not None:
            self._running.remove(victim)
            self._preempt(victim)

    def _unbind(self, seq: Sequence) -> None:
        self._charge(seq)
        if seq.adapter is not None:
            self._gate.unbind(seq)
        self._manager.release(seq.table, seq.last_step)
        self._free_rows.append(seq.row)
        self._unsent_freed.add(seq.row)
        seq.row = -1

    def _charge(self, seq: Sequence) -> None:
        num_tokens = len(seq.tokens)
        if num_tokens > seq.num_charged:
            self.waiting.tenants.charge(seq, output_tokens=num_tokens - seq.num_charged)
            seq.num_charged = num_tokens

    def _schedule_prefills(self, step: InFlightStep, prefills: list[Sequence], budget: int) -> int:
        """Schedules the next chunks of running prefills, earliest first. Their blocks are reserved since admission, but
        for those that take the place of others which a window has passed and which are shared: one that gets none is
        preempted, if it is not the first of all."""
        for seq in prefills:
            if seq.status is not Status.RUNNING or budget <= 0:
                continue
            if self._manager.can_take(seq.table, min(seq.num_known, seq.num_scheduled + budget)):
                budget -= self._give(step, seq, budget, [])
            elif seq is not self._running[0]:
                self._running.remove(seq)
                self._preempt(seq)
        return budget

    def _give(self, step: InFlightStep, seq: Sequence, budget: int, hits: list[int]) -> int:
        """Schedules up to `budget` of the tokens that seq lacks, and a sample if that reaches the last known token."""
        behind = seq.num_known - seq.num_scheduled
        num_tokens = min(behind, budget)
        samples = num_tokens == behind
        new_block_ids = hits + self._manager.take_reserved(seq.table, seq.num_scheduled + num_tokens)
        step.sequences.append(seq)
        num_scored = seq.num_scored(num_tokens)
        step.work.append(
            RowWork(
                row=seq.row,
                num_tokens=num_tokens,
                samples=samples,
                new_block_ids=new_block_ids,
                num_scored=num_scored,
            )
        )
        step.num_prefill_tokens += num_tokens
        seq.num_scheduled += num_tokens
        seq.num_known += samples
        seq.last_step = step.step_id
        return num_tokens

    # ---- waiting ----

    def _admit_waiting(self, step: InFlightStep, budget: int) -> None:
        """Admits the first in the queue while rows, blocks and tokens last. None overtakes it while it lacks those; for
        its adapter's place in the step see max_loras.py."""
        for event in self._gate.take_events():
            for freed in self.waiting.unblock(event):
                if self._probation.may_run(freed.state):
                    self._push(freed)
                else:
                    self._hold(freed, Event(Blocker.ALONE, freed.state))
        if self._batching.begins():
            self.unblock(NEXT_BATCH)
        if self.waiting.tenants.has_competing_tenants:
            self.charge_running()
        while budget > 0 and self._free_rows and (seq := self._probation.first_waiting()) is not None:
            if seq.last_step > self.done_step:
                return  # preempted, with samples still in flight
            if not self._batching.admits(seq):
                self._hold(seq, NEXT_BATCH)
                continue
            if seq.adapter is not None and not self._gate.may_run(seq):
                continue
            alone = not self._running and not step.work
            overlapped = self._tiers.load_overlapped(seq) if alone else None
            if overlapped is None and (ticket := self._tiers.load(seq, self._reserve)) is not None:
                self.waiting.block(seq, Blocker.KV, ticket)
                continue
            shared = share_prompt(self._manager, step, seq, self._reserve, self.done_step)
            if not shared and not find_prefix(self._manager, step, seq, self._reserve, overlapped):
                self._lacks_blocks = seq
                return
            self.waiting.remove(seq)
            if not seq.bound_step:
                step.admitted.append((seq, seq.num_scheduled))
                if not seq.state.request.begun:
                    self.waiting.tenants.charge(seq, prompt_tokens=len(seq.tokens) - seq.num_scheduled)
            self._bind(step, seq)
            budget -= self._give(step, seq, budget, list(seq.table.block_ids))

    @property
    def _reserve(self) -> int:
        """Blocks to leave for running sequences (each takes one of each group per block_size steps), so that a new one
        is not preempted in the next steps. 0 when none runs, so that a sequence that fits the empty pool is
        admitted."""
        return -(-len(self._running) * self._manager.groups.count // 4)

    def _bind(self, step: InFlightStep, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        self._unsent_freed.discard(seq.row)
        seq.status = Status.RUNNING
        seq.num_sent = len(seq.tokens)
        seq.bound_step = step.step_id
        slot = None if seq.adapter is None else self._gate.bind(seq)
        step.new_rows.append(
            RowInit(
                row=seq.row,
                token_ids=seq.tokens.copy(),
                prompt_len=seq.prompt_len,
                num_computed=seq.num_scheduled,
                sampling=seq.row_sampling(),
                adapter_slot=slot,
                pool=seq.state.request.pool,
            )
        )
        if not self._running or self._running[-1].order < seq.order:
            self._running.append(seq)
        else:
            insort(self._running, seq, key=lambda other: other.order)
