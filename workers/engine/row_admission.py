"""RowAdmission: the way of a sequence from its arrival to a row: what it waits for, and what is loaded for it.

    enqueue -> every rule's before_queue -> KV of its prefix from lower tiers -> queue -> every rule's before_row -> row
                     `-- blocked ---------------`-- blocked ---- unblock <------------------ blocked --'

Called by the scheduler, which gives the rows and blocks, and by who has news for blocked sequences.
"""

from collections.abc import Sequence as ListOf

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.running_rows import RunningRows
from tandem.workers.engine.transfers.lower_tiers import LowerTiers
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.first_blocks import find_prefix, share_prompt
from tandem.workers.engine.waiting.probation import Probation
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue


class RowAdmission:
    """The waiting sequences of one scheduler, and the rules that they wait for, in order; `probation` is one of them.
    tiers: the tiers below the device; None: none. budget: tokens of a step."""

    def __init__(
        self,
        waiting: WaitingQueue,
        rules: ListOf[AdmissionRule],
        probation: Probation,
        tiers: LowerTiers | None,
        rows: RunningRows,
        budget: int,
    ) -> None:
        self.joins_running = all(rule.joins_running for rule in rules)  # those that run may be preempted for others
        self._waiting = waiting
        self._rules = rules
        # asked in each step that has room: most rules never answer
        self._arriving = [rule for rule in rules if type(rule).arrived is not AdmissionRule.arrived]
        self._probation = probation
        self._tiers = tiers
        self._rows = rows
        self._budget = budget

    def enqueue(self, seq: Sequence) -> None:
        """Queues a new sequence, or one that unblock() has returned; or blocks it while a rule forbids that, or KV of
        its prefix is loaded. With no other sequence it runs at once, and the load overlaps with its first step."""
        for rule in self._rules:
            if (awaited := rule.before_queue(seq)) is not None:
                self._block(seq, awaited, rule)
                return
        ticket = None
        if self._tiers is not None and not self._rows.has_kept(seq) and self._is_next(seq):
            ticket = self._tiers.load(seq, self._rows.reserve)
        if ticket is not None:
            self._waiting.block(seq, Blocker.KV, ticket)
        else:
            self._push(seq)

    def unblock(self, come: Awaited) -> None:
        """Enqueues the sequences that wait for this. failure: those that waited for KV compute it."""
        for seq in self._waiting.unblock(come):
            if self._tiers is not None and come.failure is not None and come.blocker is Blocker.KV:
                self._tiers.forbid_loads(seq)
            self.enqueue(seq)

    def withdraw(self, seq: Sequence) -> None:
        """Gives up what was kept for a queued sequence that waits for its adapter again."""
        assert seq.status is SequenceStatus.WAITING, "it was queued"
        self._release_loaded(seq)

    def leave(self, seq: Sequence) -> None:
        """Removes a waiting sequence that has ended."""
        is_fork = self._waiting.blocker_of(seq) is Blocker.FORK
        if self._waiting.has(seq):  # else it failed on its way there
            self._waiting.remove(seq)
        if not is_fork:
            self._release_loaded(seq)

    def take_arrived(self) -> None:
        """Queues the sequences for which what their rules waited for has come. Called before rows are given."""
        for rule in self._arriving:
            for come in rule.arrived():
                if rule.keeps_loaded:
                    self._queue_again(come)
                else:
                    self.unblock(come)

    def must_wait(self, seq: Sequence) -> bool:
        """Returns whether a rule forbids that the first in the queue has a row; it is blocked then."""
        for rule in self._rules:
            if (awaited := rule.before_row(seq)) is not None:
                self._block(seq, awaited, rule)
                return True
        return False

    def find_blocks(self, manager: BlockManager, step: InFlightStep, seq: Sequence, done_step: int) -> bool | None:
        """Gives the first in the queue the blocks that are there for it, and reserves the others that it needs. None if
        it waits for KV now, False if blocks lack."""
        if self._rows.take_kept(seq):
            return True
        overlapped = ticket = None
        reserve = self._rows.reserve
        if self._tiers is not None:
            alone = not self._rows.sequences and not step.work
            overlapped = self._tiers.load_overlapped(seq) if alone else None
            ticket = self._tiers.load(seq, reserve) if overlapped is None else None
        if ticket is not None:
            self._waiting.block(seq, Blocker.KV, ticket)
            return None
        shared = share_prompt(manager, step, seq, reserve, done_step)
        return shared or find_prefix(manager, step, seq, reserve, overlapped)

    def check_invariants(self, running: list[Sequence]) -> None:
        """Asserts the invariants of all rules; for tests."""
        for rule in self._rules:
            rule.check_invariants(running)

    # ---- inside ----

    def _push(self, seq: Sequence) -> None:
        """Queues a sequence that needs only a row and blocks; of a suspect, it has the turn from now on."""
        self._probation.begin(seq.state)
        self._waiting.push(seq)

    def _queue_again(self, come: Awaited) -> None:
        """Queues sequences for which all that they need is still there, but for the turn of a suspect."""
        for seq in self._waiting.unblock(come):
            if (awaited := self._probation.before_queue(seq)) is not None:
                self._block(seq, awaited, self._probation)
            else:
                self._push(seq)

    def _block(self, seq: Sequence, until: Awaited, rule: AdmissionRule) -> None:
        """Blocks a sequence as a rule demands. What was loaded for it may be evicted meanwhile, unless it stays."""
        if not rule.keeps_loaded:
            self._release_loaded(seq)
        self._waiting.block(seq, until.blocker, until.key)

    def _release_loaded(self, seq: Sequence) -> None:
        """Gives up what was loaded for a waiting sequence: its turn is not near, or it has ended."""
        if self._tiers is not None:
            self._tiers.drop(seq)
        for rule in self._rules:
            rule.left(seq)

    def _is_next(self, seq: Sequence) -> bool:
        """Returns whether others run or wait, and one step may compute all tokens ahead of seq and begin with seq."""
        # KV loaded earlier is often evicted before it is used, and has evicted KV that requests ahead would have found.
        # A sequence that has run before leads the queue.
        behind = [other.num_known - other.num_scheduled for other in self._rows.running()]
        queued = 0 if seq.bound_step else self._waiting.tenants.num_tokens
        return bool(behind or len(self._waiting)) and sum(behind) + queued < self._budget
