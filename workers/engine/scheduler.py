"""Scheduler: assigns tokens of the next step to sequences; continuous batching without phases over one block manager.

Every step gives tokens to sequences until their scheduled tokens catch up with the known ones (iteration-level
scheduling: Orca; paged blocks and preemption by recompute: vLLM; prefill chunks beside decodes: Sarathi-Serve).
Running rows come first: decodes (one token behind), then prefill chunks, then waiting sequences.

Results are attributed by step, never by row, as rows are reused at once (running_rows.py). Blocks become free only when
the last plan that names them has returned (BlockPool): the index and the tiers read them out of that order.

Who may be queued, and have a row, say the rules of a list (admission_rule.py). Between tenants the queue decides, by
the tokens charged to each (fairness.py). A request that may have ended a group has its steps to itself for a while
(probation.py).

Called by the engine (schedule), ResultApplier (returned, take_back, finish, forget), RankAnswers (roll_back) and
LiveRequests (finish); the last three also move waiting sequences, through `admission`. It has no clock, output or
transport. Next: workers/executor/rank_group.py, which sends the plan.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from tandem.configs.schema import SchedulerSettings
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.base.step_limit import StepLimit
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.drafting.draft_places import NONE, draft_places
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.observers.chunk_limiter import ChunkLimiter
from tandem.workers.engine.row_admission import RowAdmission
from tandem.workers.engine.running_rows import RunningRows
from tandem.workers.engine.step_turns import StepTurns
from tandem.workers.engine.transfers.lower_tiers import LowerTiers
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.probation import Probation
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.step import RowWork, StepPlan


class Scheduler:
    """One group's rows and running order.

    relay (PP > 1): sampled tokens return to the ranks in plans, so a sequence waits for its sample; otherwise ranks
    append it themselves, and the next step may be planned before it is known. depth: plans that may be in flight.
    rules: who may be queued and have a row, in order; `probation` among them. turns: who shares a step. tiers: those
    below the device; None: none. drafting: None: no speculative decoding.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        manager: BlockManager,
        waiting: WaitingQueue,
        chunk_limiter: ChunkLimiter,
        rules: ListOf[AdmissionRule],
        probation: Probation,
        turns: StepTurns,
        *,
        relay: bool,
        depth: int,
        tiers: LowerTiers | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.waiting = waiting
        self.done_step = 0
        self._manager = manager
        self._tiers = tiers
        self._probation = probation
        self._turns = turns
        self._chunk_limiter = chunk_limiter
        self._relay = relay
        self._drafts = draft_places(drafting, relay=relay)
        self._depth = depth
        self._budget = settings.max_num_batched_tokens
        num_rows = min(settings.max_num_seqs, self._budget)
        self._limits_prefill = settings.max_itl_ms is not None
        waiting.tenants.share_rows(num_rows, self._budget)
        self.rows = RunningRows(num_rows, manager, waiting, tiers, rules)
        self.admission = RowAdmission(waiting, rules, probation, tiers, self.rows, self._budget)
        self._one_token = [RowWork(row=row, num_tokens=1, samples=True) for row in range(num_rows)]
        self._next_step = 1
        self._limit = StepLimit(self._budget)
        self._known_failure = 0
        self._lacks_blocks = False
        self._undone: set[Sequence] = set()

    # ---- queries ----

    @property
    def num_preemptions(self) -> int:
        """Preemptions from the start."""
        return self.rows.num_preemptions

    @property
    def alone(self) -> RequestState | None:
        """The request that has its steps to itself, if any."""
        return self._probation.current

    @property
    def has_reduced_steps(self) -> bool:
        """True for some time after the device ran out of memory."""
        return self._limit.is_reduced

    def check_invariants(self) -> None:
        """Asserts the invariants of all rules; for tests."""
        self.admission.check_invariants(self.rows.running())

    # ---- commands ----

    def charge_running(self) -> None:
        """Charges tenants for the tokens of running sequences since the last charge."""
        self.rows.charge_all()

    def schedule(self) -> tuple[InFlightStep, StepPlan] | None:
        """Returns the next plan, or None if no sequence can compute now; none while plans are in flight that were made
        before a failure was known."""
        if self.done_step < self._known_failure:
            return None
        self.rows.prune()
        for come in self._probation.pass_turn():
            self.admission.unblock(come)
        if self.alone is None and (planned := self._plan()) is not None:
            return planned  # without work a suspect may have taken the turn meanwhile
        if self.alone is None or self.done_step < self._next_step - 1:
            return None
        self._probation.switch_steps()
        return self._plan() or self._skip_turn()

    def _skip_turn(self) -> tuple[InFlightStep, StepPlan] | None:
        """Plans a step of the others: whose turn it is, the request on probation or they, has no work."""
        self._probation.switch_steps()
        return self._plan()

    def _plan(self, tries: int = 2) -> tuple[InFlightStep, StepPlan] | None:
        """Returns a plan for the running sequences whose turn it is, or if they have no work the others, and for those
        that wait; None without work."""
        rolled_back = self._roll_back_rows() if self._undone else []
        lacks_blocks = self._lacks_blocks
        if not self.rows.free or lacks_blocks:
            self._make_way()
        if self.admission.joins_running and self.alone is None:
            self.rows.pause(has_room=bool(self.rows.free) and not lacks_blocks)
        leaves_out = self._turns.begin_step(has_room=bool(self.rows.free))
        leaves_out |= self._limit.is_reduced
        step = InFlightStep(self._next_step)
        preemptions = self.rows.num_preemptions
        running = self.rows.some(self._turns.shares_step, self._limit.tokens) if leaves_out else self.rows.sequences
        prefills = self._schedule_decodes(step, running)
        budget = self._limit.tokens - step.num_decode - step.num_drafts
        if self._limits_prefill and step.num_decode and (prefills or len(self.waiting)):
            budget = min(budget, self._chunk_limiter.limit() - step.num_drafts)
        if prefills:
            budget = self._schedule_prefills(step, prefills, budget)
        if budget > 0 and self.rows.free and preemptions == self.rows.num_preemptions:
            self._admit_waiting(step, budget)
        if not step.work:
            return self._plan(tries - 1) if leaves_out and tries > 1 else None
        self._next_step += 1
        self._undone.clear()
        return step, step.plan(self.rows.take_freed(), self._known_failure, rolled_back)

    def returned(self, step_id: int) -> None:
        """Notes that the result of step_id has come; results come in order, so earlier plans have returned too."""
        self.done_step = step_id
        self._limit.succeeded()
        self._manager.pool.retire(step_id)

    def take_back(self, step: InFlightStep) -> Sequence | None:
        """Takes back a plan of which the ranks computed nothing: its rows stay bound, their tokens are planned again,
        fewer at once. Later plans in flight fail too; each is taken back when its result comes.

        Returns the sequence that cannot be computed: the only one of a step with one token.
        """
        self.done_step = step.step_id
        self._manager.pool.retire(step.step_id)
        self.rows.clear_kept()  # some of their tokens may not have been computed
        is_first = step.step_id > self._known_failure  # those behind it were made before this was known
        if is_first:
            self._known_failure = self._next_step - 1
            self._limit.failed(step.num_tokens)
        for seq, work in zip(step.sequences, step.work, strict=True):
            if step.step_id <= seq.void_until or seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_known -= work.samples
            seq.num_drafts -= work.max_drafts
            if seq.status is SequenceStatus.RUNNING:
                seq.num_scheduled -= work.num_tokens
                self._undone.add(seq)
        return step.sequences[0] if is_first and step.num_tokens == 1 else None

    def _roll_back_rows(self) -> list[tuple[int, int, int]]:
        """(row, known tokens, computed tokens) for the ranks, of the sequences that take_back() left running."""
        running = (seq for seq in self._undone if seq.status is SequenceStatus.RUNNING)
        return sorted((seq.row, seq.num_known, seq.num_scheduled) for seq in running)

    def forget(self, seq: Sequence) -> None:
        """Removes a failed sequence's KV from the index of every tier. finish() follows."""
        table = self.rows.table_of(seq)
        self._manager.forget(table)
        if self._tiers is not None:
            self._tiers.forget(table)
        self.rows.clear_kept()

    def finish(self, seq: Sequence) -> None:
        """Removes a sequence in any state and releases all it holds. Its results in flight are discarded."""
        if seq.status is SequenceStatus.WAITING:
            self.rows.charge(seq)
            self.admission.leave(seq)
            self.rows.drop_kept(seq)
        elif seq.status is SequenceStatus.RUNNING:
            if self._tiers is not None:
                self._tiers.store(seq.table)
            self.rows.end(seq)
        seq.status = SequenceStatus.FINISHED

    # ---- running ----

    def _schedule_decodes(self, step: InFlightStep, running: Iterable[Sequence]) -> list[Sequence]:
        """Schedules a token for each running row that is one token behind; returns those further behind (prefills)."""
        prefills: list[Sequence] = []
        one_token, step_id, relay = self._one_token, step.step_id, self._relay
        add_seq, add_work = step.sequences.append, step.work.append
        in_turns = relay and self.alone is None  # so that each stage has a step
        num_rows = len(self.rows.sequences)
        most = -(-num_rows // self._depth) if in_turns else num_rows
        most_drafts = self._most_drafts(most)
        for seq in running:
            known = seq.num_known
            if known - seq.num_scheduled != 1:
                prefills.append(seq)
                continue
            if known + seq.num_drafts >= seq.max_len:  # plans in flight may bring its last token
                continue
            if relay and (known != len(seq.tokens) or step.num_decode >= most):
                continue
            table = seq.table
            drafts = self._drafts_of(seq, most_drafts - step.num_drafts) if most_drafts else NONE
            if relay or known + seq.num_drafts > table.capacity or table.may_share or drafts[0]:
                work = self._grow(step, seq, *drafts)
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

    def _most_drafts(self, most_rows: int) -> int:
        """Returns how many drafts the next step may have in all; the other half of a step is left for prefills.
        most_rows: that decode in it."""
        if self._drafts is None:
            return 0
        most = min(self._budget // 2 - len(self.rows.sequences), self._chunk_limiter.limit() // 2)
        if most <= 0 or self._limit.is_reduced:
            return 0
        num_decode = sum(seq.num_known - seq.num_scheduled == 1 for seq in self.rows.sequences)
        return most if self._drafts.begin_step(min(num_decode, most_rows)) else 0

    def _drafts_of(self, seq: Sequence, most: int) -> tuple[int, int]:
        """Returns as DraftPlaces.of() does; a request that is alone has none."""
        assert self._drafts is not None
        return NONE if seq.state is self.alone else self._drafts.of(seq, most)

    def _grow(self, step: InFlightStep, seq: Sequence, num_drafts: int, num_guesses: int) -> RowWork | None:
        """Returns one token of work with drafts, new blocks or tokens that ranks lack; None if seq gets no blocks. For
        drafts alone nobody is preempted, and no block is taken that running sequences will need soon."""
        known = seq.num_known
        most = known + seq.num_drafts
        missing = self._manager.lacks(seq.table, most + num_drafts + num_guesses)
        if missing > max(0, self._manager.pool.num_allocatable - self.rows.reserve):
            num_drafts = num_guesses = 0
        end = most + num_drafts + num_guesses  # a draft model has KV of guesses
        added = self._extend_or_preempt(seq, end)
        if added is None:
            return None
        replaced: list[tuple[int, int]] = []
        if seq.table.may_share:
            copies = self._manager.make_writable(seq.table, seq.num_scheduled, end, step.step_id)
            assert copies is not None, "forks leave no shared block to a running writer (see share_prompt)"
            step.block_copies.extend((copy.source, copy.destination) for copy in copies)
            replaced = [(copy.table_index, copy.destination) for copy in copies]
        lacking = seq.tokens[seq.num_sent :] if self._relay else []
        seq.num_sent = known
        seq.num_drafts += num_drafts
        step.num_drafts += num_drafts
        step.most_drafts = max(step.most_drafts, num_drafts)
        step.num_guesses += num_guesses
        return RowWork(
            row=seq.row,
            num_tokens=1,
            samples=True,
            new_block_ids=added,
            token_ids=lacking,
            replaced_blocks=replaced,
            max_drafts=num_drafts,
            draft_ids=seq.guesses[:num_drafts] if self._relay else [],
            num_guesses=num_guesses,
        )

    def _extend_or_preempt(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Returns new blocks for num_tokens tokens of seq; preempts running sequences if the pool has too few.

        None if seq itself was preempted, or while plans in flight still name the blocks of preempted or ended
        sequences: seq then skips this step.
        """
        manager, pool = self._manager, self._manager.pool
        while (added := manager.extend(seq.table, num_tokens)) is None:
            if self.rows.clear_kept():
                continue
            missing = manager.lacks(seq.table, num_tokens)
            if pool.num_allocatable + pool.num_pending >= missing:
                return None
            self.rows.preempt_for(seq)
            if seq.status is not SequenceStatus.RUNNING:
                return None
        return added

    def roll_back(self, seq: Sequence) -> None:
        """Returns a sequence to the queue after a failed load; its results in flight are discarded."""
        self.rows.clear_kept()
        if seq.status is SequenceStatus.RUNNING:
            self.rows.end(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_scheduled = seq.num_computed = 0
            self.waiting.push(seq)
        if seq.status is not SequenceStatus.FINISHED:
            seq.num_known, seq.num_drafts = len(seq.tokens), 0
            seq.void_until = self._next_step - 1

    def _make_way(self) -> None:
        """Preempts sequences of tenants that have more than their share if others lack rows, or the first in the queue
        blocks. Blocks come free when plans in flight return."""
        first = self.waiting.peek()
        self._lacks_blocks = False
        if first is None or not self.admission.joins_running or self._limit.is_reduced or self.alone is not None:
            return
        if not self.rows.free:
            self.rows.make_way()
        if self.rows.free:
            self.rows.free_blocks(first)

    def _schedule_prefills(self, step: InFlightStep, prefills: list[Sequence], budget: int) -> int:
        """Schedules the next chunks of running prefills, earliest first. Their blocks are reserved since admission, but
        for those that take the place of others which a window has passed and which are shared: one that gets none is
        preempted, if it is not the first of all."""
        for seq in prefills:
            if seq.status is not SequenceStatus.RUNNING or budget <= 0:
                continue
            most = min(seq.num_known, seq.num_scheduled + budget)
            if not self._manager.can_take(seq.table, most):
                self.rows.clear_kept()
            if self._manager.can_take(seq.table, most):
                budget -= self._give(step, seq, budget, [])
            elif seq is not self.rows.sequences[0]:
                self.rows.preempt(seq)
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
        """Admits the first in the queue while rows, blocks and tokens last. None overtakes it while it lacks those; the
        rules may have it wait elsewhere."""
        self.admission.take_arrived()
        if self.waiting.tenants.has_competing_tenants:
            self.charge_running()
        while budget > 0 and self.rows.free and (seq := self._probation.first_waiting()) is not None:
            if seq.last_step > self.done_step:
                return  # preempted, with samples still in flight
            if self.admission.must_wait(seq):
                continue
            if not self._turns.shares_step(seq):
                return
            found = self.admission.find_blocks(self._manager, step, seq, self.done_step)
            if found is False and not self.rows.clear_kept():
                self._lacks_blocks = True
                return
            if not found:
                continue
            self.waiting.remove(seq)
            if not seq.bound_step:
                step.admitted.append((seq, seq.num_scheduled))
                if not seq.state.request.begun:
                    self.waiting.tenants.charge(seq, prompt_tokens=len(seq.tokens) - seq.num_scheduled)
            step.new_rows.append(self.rows.bind(seq, step.step_id))
            budget -= self._give(step, seq, budget, list(seq.table.block_ids))
