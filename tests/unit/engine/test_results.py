"""ResultApplier by itself: which tokens count, which are waste, who ends and why, what the latencies say."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from builders import EOS, filled, request

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.request_figures import RequestFigures
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.base.stats import Collector
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.results import ResultApplier, TokenGaps
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.request import TokenDelta, TokenLogprobs
from tandem.workers.messages.step import RowResult, RowWork, StepResult

STOP, NOW_S = 7, 50.0


@dataclass
class Told:
    """Stands in for the scheduler: what it was told."""

    manager: BlockManager
    returned_steps: list[int] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
    forgotten: list[Sequence] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)

    @property
    def admission(self) -> "Told":
        return self

    def returned(self, step_id: int) -> None:
        self.returned_steps.append(step_id)

    def enqueue(self, seq: Sequence) -> None:
        self.added.append(seq)
        seq.status = SequenceStatus.WAITING

    def unblock(self, event: Awaited) -> None:
        for seq in self.waiting.unblock(event):
            self.enqueue(seq)

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)

    def finish(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self.manager.release(seq.table, 0)
        elif self.waiting.blocker_of(seq) is not None:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED


class Rig:
    """One request of some choices, a prompt of 4, all running, blocks of 2."""

    def __init__(self, n: int = 1, **sampling: Any) -> None:
        self.manager = BlockManager(32, 2, model_revision="m", kv_dtype="d")
        self.scheduler, self.collector = Told(self.manager), Collector(requests=RequestFigures.for_contexts(64))
        self.applier = ResultApplier(self.scheduler, self.manager, self.collector, frozenset({EOS}))  # type: ignore[arg-type]
        self.state = RequestState(request("r", 4, 6, n=n, **sampling), arrival_s=40.0, num_live=n, admitted=True)
        for choice in range(n):
            table = self.manager.new_table(None, "")
            assert filled(self.manager, table, 10)
            tokens = list(self.state.request.prompt_token_ids)
            stops = frozenset({EOS, STOP})
            seq = Sequence(
                self.state, choice, tokens, 4, 10, 6, stops, (0, 0, choice), table, status=SequenceStatus.RUNNING
            )
            self.state.sequences.append(seq)
        self.step_id = 0

    def fork(self, choices: list[Sequence]) -> None:
        """They wait until the prompt is computed."""
        for seq in choices:
            self.scheduler.waiting.block(seq, Blocker.FORK, self.state)

    def forks(self) -> list[Sequence]:
        return list(self.scheduler.waiting.blocked_by(Blocker.FORK, self.state))

    def apply(self, *parts: tuple[Sequence, int, RowResult | None], now_s: float = NOW_S) -> list[TokenDelta]:
        """(sequence, tokens of its work, its row's result if it sampled)"""
        self.step_id += 1
        work = [RowWork(row=i, num_tokens=count, samples=row is not None) for i, (_, count, row) in enumerate(parts)]
        rows = [row for _, _, row in parts if row is not None]
        in_flight = InFlightStep(self.step_id, [seq for seq, _, _ in parts], work)
        outcome = self.applier.apply(in_flight, StepResult(step_id=self.step_id, rows=rows), now_s)
        self.ended = outcome.ended
        return outcome.deltas


def row(*tokens: int, **more: Any) -> RowResult:
    return RowResult(row=0, token_ids=list(tokens), **more)


def test_a_token_is_told_of_with_its_position_and_logprobs():
    r = Rig()
    (seq,) = r.state.sequences
    entry = [TokenLogprobs(9, -1.0)]
    (delta,) = r.apply((seq, 4, row(9, logprobs=entry)))
    assert (delta.token_ids, delta.first_position, delta.logprobs, delta.finish_reason) == ([9], 0, entry, None)
    (delta,) = r.apply((seq, 1, row(8)))
    assert (delta.token_ids, delta.first_position) == ([8], 1)
    assert seq.tokens[4:] == [9, 8] and seq.num_computed == 5 and r.collector.generation_tokens == 2
    assert r.scheduler.returned_steps == [1, 2] and r.ended == []


@pytest.mark.parametrize(
    ("token", "before", "reason", "told"),
    [
        (STOP, 0, None, None),
        (STOP, 1, "stop", STOP),
        (EOS, 1, "stop", EOS),
        (9, 4, None, None),
        (9, 5, "length", None),
        (STOP, 5, "stop", STOP),
    ],
)
def test_an_end_by_a_stop_token_needs_min_tokens_and_goes_before_an_end_by_length(token, before, reason, told):
    """Two output tokens are asked for at least, six at most. A request that ignores the model's own end but names it
    as a stop token is told of it."""
    r = Rig()
    (seq,) = r.state.sequences
    seq.tokens += [9] * before
    (delta,) = r.apply((seq, 1, row(token)))
    assert (delta.finish_reason, delta.stop_reason) == (reason, told)
    assert bool(r.ended) == (delta.usage is not None) == (reason is not None)
    if reason is not None:
        assert seq.status is SequenceStatus.FINISHED and r.collector.finished[reason] == 1 and r.state.num_live == 0


def test_the_models_own_end_is_no_stop_reason():
    r = Rig(ignore_eos=False)
    (seq,) = r.state.sequences
    seq.tokens += [9]
    assert r.apply((seq, 1, row(EOS)))[0].stop_reason is None


def test_the_request_ends_with_its_last_choice():
    r = Rig(n=2)
    for seq, others in zip(r.state.sequences, ([], [r.state]), strict=True):
        seq.tokens += [9]
        (delta,) = r.apply((seq, 1, row(STOP)))
        assert r.ended == others and (delta.usage is not None) == bool(others)
    assert delta.usage is not None and delta.usage.completion_tokens == 4


def test_a_row_that_failed_ends_its_request_and_is_found_no_more():
    for result, error in ((row(error="broken"), "broken"), (row(), "the ranks returned no token")):
        r = Rig(n=3)
        over, first, second = r.state.sequences
        assert not r.applier.finish(over, "abort")
        first.tokens += [9, 9]
        deltas = r.apply((first, 1, row(8)), (second, 1, result))
        assert [(d.choice, d.first_position, d.token_ids, d.error) for d in deltas[1:]] == [
            (1, 3, [], error),
            (2, 0, [], error),
        ]
        assert [d.usage is not None for d in deltas] == [False, False, True]
        assert r.ended == [r.state] and r.scheduler.forgotten == [first, second]
        assert r.collector.finished["error"] == 2 and r.collector.wasted_tokens == 0


def test_results_of_a_choice_that_has_ended_or_lost_its_kv_are_waste():
    r = Rig(n=3)
    ended, failed_loads, running = r.state.sequences
    r.scheduler.finish(ended)
    failed_loads.void_until = 1
    deltas = r.apply((ended, 1, row(9)), (failed_loads, 1, row(9)), (running, 4, row(9)))
    assert [delta.choice for delta in deltas] == [2] and r.collector.wasted_tokens == 2
    assert failed_loads.num_computed == ended.num_computed == 0 and len(failed_loads.tokens) == len(ended.tokens) == 4
    assert r.apply((ended, 1, None), (failed_loads, 4, None)) == [] and r.collector.wasted_tokens == 2
    assert failed_loads.num_computed == 4, "plan 2 is its own again"


def test_a_token_of_a_preempted_choice_counts_and_its_kv_does_not():
    r = Rig()
    (seq,) = r.state.sequences
    r.manager.release(seq.table, 0)
    seq.status, seq.num_computed = SequenceStatus.WAITING, 0
    (delta,) = r.apply((seq, 1, row(9)))
    assert delta.token_ids == [9] and seq.num_computed == 0
    assert r.apply((seq, 2, None)) == [] and seq.table.num_committed == 0


def test_choices_that_wait_for_the_prompt_come_in_when_it_is_computed():
    """Also by a chunk that ends just there, in a request that comes with an answer begun elsewhere."""
    for samples, parts in ((True, (3, 1)), (False, (3, 1)), (False, (3, 2))):
        r = Rig(n=3)
        first, *others = r.state.sequences
        first.tokens += [9, 9]
        r.fork(others)
        r.apply((first, parts[0], None))
        assert r.scheduler.added == [] and r.forks() == others
        r.apply((first, parts[1], row(9) if samples else None))
        assert r.scheduler.added == others and r.forks() == []


def test_when_all_that_run_have_ended_one_that_waits_computes_the_prompt():
    r = Rig(n=3)
    first, second, third = r.state.sequences
    second.status = third.status = SequenceStatus.WAITING
    r.fork([second, third])
    first.tokens += [9]
    r.apply((first, 1, row(STOP)))
    assert r.scheduler.added == [second] and r.forks() == [third]
    assert not r.applier.finish(third, "abort") and r.forks() == []
    assert r.applier.finish(second, "abort") and r.collector.finished == {
        "stop": 1,
        "length": 0,
        "abort": 2,
        "error": 0,
    }


def test_blocks_are_published_when_the_token_after_them_is_known():
    r = Rig()
    (seq,) = r.state.sequences
    r.apply((seq, 2, None))
    assert seq.table.num_committed == 1
    r.apply((seq, 2, row(9)))
    assert seq.table.num_committed == 2


def test_the_first_token_is_timed_from_arrival_and_the_others_from_the_one_before():
    r = Rig(n=2)
    first, second = r.state.sequences
    r.apply((first, 4, row(9)), (second, 1, row(9)), now_s=42.0)
    assert r.collector.time_to_first_token_s.snapshot().count == 1, "one prompt, one wait for it"
    assert r.collector.time_to_first_token_s.snapshot().total == 2.0
    r.apply((first, 1, row(9)), now_s=43.0)
    r.apply((first, 1, row(9)), (second, 1, row(9)), now_s=45.0)
    gaps = r.collector.inter_token_latency_s.snapshot()
    assert (gaps.count, gaps.total) == (3, 1.0 + 2.0 + 3.0)


def test_gaps_are_counted_by_what_they_were():
    histogram = Histogram((1.0, 2.0, 3.0))
    gaps = TokenGaps(histogram, now_s=10.0)
    for since_s in (9.0, 9.0, 8.0, 9.0, 7.0):
        gaps.add(since_s)
    gaps.flush()
    gaps.flush()
    assert histogram.snapshot().counts == [3, 1, 1, 0] and histogram.snapshot().total == 3 * 1.0 + 2.0 + 3.0
