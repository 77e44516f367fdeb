"""Applies a step's result: tokens to sequences, computed blocks to the index, ends, deltas, latency counts.

Called by the engine once per returned step, and by LiveRequests, which ends choices (finish). A result whose sequence
has ended in the meantime is discarded (its row overran); one whose sequence was preempted still counts, only its KV is
gone. Next: the deltas go through engine_thread.py to the gateway's generation/part.py.
"""

from dataclasses import dataclass, field

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus, is_idle_work
from tandem.workers.engine.base.stats import Collector
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.observers.request_course import mark, take_course
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.messages.course import Course
from tandem.workers.messages.request import FinishReason, PromptLogprobs, TokenDelta, Usage
from tandem.workers.messages.step import RowResult, RowWork, StepResult

NO_END: tuple[None, None, None] = None, None, None
"""Stop reason, bill and course of a token that ends nothing."""


class TokenGaps:
    """Groups equal gaps before they are counted: the rows of one step nearly always share the step before it."""

    def __init__(self, histogram: Histogram, now_s: float) -> None:
        self._histogram = histogram
        self._now_s = now_s
        self._since_s = now_s
        self._rows = 0

    def add(self, since_s: float, num_tokens: int = 1) -> None:
        """Counts a row's gap; several tokens share it."""
        if num_tokens > 1:
            self._histogram.observe((self._now_s - since_s) / num_tokens, num_tokens)
            return
        if since_s != self._since_s:
            self.flush()
            self._since_s = since_s
        self._rows += 1

    def flush(self) -> None:
        """Counts what is grouped."""
        if self._rows:
            self._histogram.observe(self._now_s - self._since_s, self._rows)
            self._rows = 0


@dataclass(slots=True, eq=False)
class StepOutcome:
    """News of a step for those outside, added to row by row."""

    gaps: TokenGaps
    now_s: float
    deltas: list[TokenDelta] = field(default_factory=list)  # in plan order
    ended: list[RequestState] = field(default_factory=list)  # requests; each has its last delta among them


class ResultApplier:
    """Turns (InFlightStep, StepResult) into deltas and ended requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: BlockManager,
        collector: Collector,
        eos_token_ids: frozenset[int],
        drafting: Drafting | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._manager = manager
        self.collector = collector
        self._eos = eos_token_ids
        self._drafting = drafting

    def apply(self, step: InFlightStep, result: StepResult, now_s: float) -> StepOutcome:
        """Returns all deltas of the step, and the requests that it ended."""
        assert result.step_id == step.step_id, "results come in the order of their plans"
        self.scheduler.returned(step.step_id)
        out = StepOutcome(TokenGaps(self.collector.inter_token_latency_s, now_s), now_s)
        rows = iter(result.rows)
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        for seq, work in zip(step.sequences, step.work, strict=True):
            row = next(rows) if work.samples or work.num_scored else None
            if step.step_id <= seq.void_until or seq.status is finished:
                self.collector.wasted_tokens += 0 if row is None else len(row.token_ids)
                continue
            if seq.status is running:
                seq.num_computed += work.num_tokens
            if work.max_drafts or work.num_guesses:
                self._return_drafts(seq, work, row)
            if row is not None and row.prompt_logprobs is not None:
                self._pass_on(seq, row.prompt_logprobs, out)
            if row is None:
                self._after_chunk(seq)
            elif row.token_ids and row.error is None and seq.state.request.sampling.max_tokens:
                self._accept(seq, row, out)
            else:
                self._end_otherwise(seq, work, row, out)
        assert next(rows, None) is None, "one RowResult per RowWork that has one"
        out.gaps.flush()
        return out

    def fail(self, step: InFlightStep, failure: str, now_s: float) -> StepOutcome:
        """Returns the same for a step that the ranks could not compute: it is planned again. What is alone in it and
        still too large ends."""
        out = StepOutcome(TokenGaps(self.collector.inter_token_latency_s, now_s), now_s)
        alone = self.scheduler.take_back(step)
        if alone is not None and alone.status is not SequenceStatus.FINISHED:
            self._fail_request(alone.state, failure, out)
        return out

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """Ends one choice and releases what it holds; True when it was the request's last."""
        state = seq.state
        self.scheduler.finish(seq)
        seq.finish_reason = reason
        self.collector.finished[reason] += 1
        state.num_live -= 1
        forks = self.scheduler.waiting.blocked_by(Blocker.FORK, state)
        if forks and len(forks) == state.num_live:  # nobody computes the prompt for them
            first = next(iter(forks))
            self.scheduler.waiting.remove(first)
            self.scheduler.admission.enqueue(first)
        return state.num_live == 0

    # ---- inside ----

    def _end_otherwise(self, seq: Sequence, work: RowWork, row: RowResult, out: StepOutcome) -> None:
        """Takes a row that brings no ordinary token: scores of the prompt, an embedding, an error, or no answer at
        all, as none is wanted."""
        if not (work.samples or row.error):
            self._after_chunk(seq)
        elif row.embedding is not None:
            self._end_of_prompt(seq, "stop", row.embedding, out)
        elif row.error is not None or not row.token_ids:
            if row.token_ids:  # behind accepted drafts something went wrong
                self._accept(seq, row, out)
            if seq.finish_reason is None:
                self._fail_request(seq.state, row.error or "the ranks returned no token", out)
        else:
            self.collector.wasted_tokens += len(row.token_ids)
            self._end_of_prompt(seq, "length", None, out)

    def _accept(self, seq: Sequence, row: RowResult, out: StepOutcome) -> None:
        """Takes the sampled token of one row, and those behind its accepted drafts."""
        tokens, request = seq.tokens, seq.state.request
        position = len(tokens) - seq.prompt_len
        drafts: tuple[int, int] | None = None
        if row.num_drafts:
            drafts = row.num_drafts, len(row.token_ids) - 1
            row = self._accept_drafts(seq, row)
        tokens += row.token_ids
        seq.guesses = row.draft_ids
        token = tokens[-1]
        self.collector.generation_tokens += len(row.token_ids)
        if seq.last_token_s is None:
            self._first_token(seq, out.now_s)
        else:
            out.gaps.add(seq.last_token_s, len(row.token_ids))
        seq.last_token_s = out.now_s
        if seq.num_computed >= seq.table.next_commit:
            self._manager.commit(seq.table, tokens, seq.num_computed)
        if len(seq.state.sequences) > 1:
            self._release_forks(seq)
        reason: FinishReason | None = None
        if len(tokens) >= seq.max_len or token in seq.stop_ids:
            if token in seq.stop_ids and len(tokens) >= seq.min_len:
                reason = "stop"
            elif len(tokens) >= seq.max_len:
                reason = "length"
        stop_reason, usage, course = NO_END if reason is None else self._end(seq, token, reason, out)
        out.deltas.append(
            TokenDelta(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=seq.choice,
                first_position=position,
                token_ids=row.token_ids,
                logprobs=row.logprobs,
                finish_reason=reason,
                stop_reason=stop_reason,
                usage=usage,
                drafts=drafts,
                course=course,
            )
        )

    def _return_drafts(self, seq: Sequence, work: RowWork, row: RowResult | None) -> None:
        """Notes that a plan with drafts, or guesses for the next one, has returned; nothing may have been guessed."""
        seq.num_drafts -= work.max_drafts
        if self._drafting is None or row is None:
            return
        if not (row.draft_ids if work.num_guesses else row.num_drafts):
            self._drafting.observe_none(seq.drafting, len(seq.tokens))

    def _accept_drafts(self, seq: Sequence, row: RowResult) -> RowResult:
        """Counts a row's accepted drafts as known and computed; returns the row without tokens behind its end."""
        assert self._drafting is not None
        num_accepted = len(row.token_ids) - 1
        self._drafting.observe(seq.drafting, row.num_drafts, num_accepted)
        num_tokens = self._num_until_end(seq, row.token_ids)
        if num_tokens <= num_accepted:
            self.collector.wasted_tokens += num_accepted + 1 - num_tokens
            logprobs = None if row.logprobs is None else row.logprobs[:num_tokens]
            row = RowResult(row=row.row, token_ids=row.token_ids[:num_tokens], logprobs=logprobs)  # it has ended
        seq.num_known += num_tokens - 1
        if seq.status is SequenceStatus.RUNNING:
            seq.num_scheduled += num_tokens - 1
            seq.num_computed += num_tokens - 1
        return row

    def _num_until_end(self, seq: Sequence, token_ids: list[int]) -> int:
        """Returns how many of the new tokens there are up to the one that ends the sequence, or all."""
        length = len(seq.tokens)
        for count, token in enumerate(token_ids, 1):
            if length + count >= seq.max_len or (token in seq.stop_ids and length + count >= seq.min_len):
                return count
        return len(token_ids)

    def _pass_on(self, seq: Sequence, got: PromptLogprobs, out: StepOutcome) -> None:
        """Delivers the log probabilities of a part of the prompt, without those that a row before a preemption had."""
        state = seq.state
        first = state.num_prompt_logprobs + 1
        assert got.first_position <= first, f"log probabilities from {got.first_position} on, not from {first}"
        entries = got.entries[first - got.first_position :]
        if not entries:
            return
        state.num_prompt_logprobs += len(entries)
        if not state.wants_prompt_logprobs:
            for other in state.sequences:
                other.table.finds_prefix = True  # should it be computed again
        out.deltas.append(
            TokenDelta(
                request_id=state.request.request_id,
                attempt=state.request.attempt,
                choice=seq.choice,
                first_position=seq.num_output,
                token_ids=[],
                prompt_logprobs=PromptLogprobs(first, entries),
            )
        )

    def _end_of_prompt(self, seq: Sequence, reason: FinishReason, embedding: bytes | None, out: StepOutcome) -> None:
        """Ends a choice that has no tokens: its prompt is embedded, or max_tokens is 0."""
        self._after_chunk(seq)
        last = self.finish(seq, reason)
        if last:
            out.ended.append(seq.state)
        out.deltas.append(
            TokenDelta(
                request_id=seq.state.request.request_id,
                attempt=seq.state.request.attempt,
                choice=seq.choice,
                first_position=0,
                token_ids=[],
                finish_reason=reason,
                usage=seq.state.usage() if last else None,
                embedding=embedding,
                course=take_course(seq.state, self.collector, out.now_s) if last else None,
            )
        )

    def _end(
        self, seq: Sequence, token: int, reason: FinishReason, out: StepOutcome
    ) -> tuple[int | None, Usage | None, Course | None]:
        """Ends a choice with its last token; returns the stop token id to name, and the bill and the course if it was
        the last."""
        is_last = self.finish(seq, reason)
        if is_last:
            out.ended.append(seq.state)
        named = token if reason == "stop" and not self._is_eos(seq, token) else None
        if not is_last:
            return named, None, None
        return named, seq.state.usage(), take_course(seq.state, self.collector, out.now_s)

    def _is_eos(self, seq: Sequence, token: int) -> bool:
        return token in self._eos and not seq.state.request.sampling.ignore_eos

    def _after_chunk(self, seq: Sequence) -> None:
        """Notes that a part of a prompt is computed; nothing was sampled."""
        if seq.num_computed >= seq.table.next_commit:  # a preempted one has no blocks: NEVER
            self._manager.commit(seq.table, seq.tokens, seq.num_computed)
        if len(seq.state.sequences) > 1:
            self._release_forks(seq)

    def _release_forks(self, seq: Sequence) -> None:
        """Enqueues the other choices once the whole prompt of one is computed: they share its blocks."""
        if seq.num_computed >= seq.prompt_len:
            self.scheduler.admission.unblock(Awaited(Blocker.FORK, seq.state))

    def _first_token(self, seq: Sequence, now_s: float) -> None:
        if seq.state.first_token_s is None:
            seq.state.first_token_s, seq.state.first_token = now_s, mark(self.collector)
        if seq.choice == 0 and not any(seq.state.request.resume_token_ids):
            seconds = now_s - seq.state.arrival_s
            self.collector.time_to_first_token_s.observe(seconds)
            if is_idle_work(seq):
                self.collector.idle.first_tokens.observe(seconds)

    def _fail_request(self, state: RequestState, error: str, out: StepOutcome) -> None:
        """Ends the request of a row that failed on the ranks, and removes its blocks from the index."""
        for seq in state.sequences:
            if seq.status is SequenceStatus.FINISHED:
                continue
            self.scheduler.forget(seq)
            position = seq.num_billed
            last = self.finish(seq, "error")
            out.deltas.append(
                TokenDelta(
                    request_id=state.request.request_id,
                    attempt=state.request.attempt,
                    choice=seq.choice,
                    first_position=position,
                    token_ids=[],
                    finish_reason="error",
                    usage=state.usage() if last else None,
                    error=error,
                    course=take_course(state, self.collector, out.now_s) if last else None,
                )
            )
        out.ended.append(state)
