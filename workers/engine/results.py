"""Applies a step's result: tokens to sequences, computed blocks to the index, ends, deltas, latency counts.

Called by the engine once per returned step. A result whose sequence has ended in
the meantime is discarded (its row overran); one whose sequence was preempted still counts, only its KV is gone.
"""

from tandem.workers.engine.base.blockers import Blocker, Event
from tandem.workers.engine.base.drafting import Drafting
from tandem.workers.engine.base.sequence import RequestState, Sequence, Status
from tandem.workers.engine.base.stats import Collector, Histogram
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.in_flight_step import InFlightStep
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.messages.request import FinishReason, PromptLogprobs, TokenDelta, Usage
from tandem.workers.messages.step import RowResult, RowWork, StepResult


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
        if self._rows:
            self._histogram.observe(self._now_s - self._since_s, self._rows)
            self._rows = 0


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
        self._scheduler = scheduler
        self._manager = manager
        self._collector = collector
        self._eos = eos_token_ids
        self._drafting = drafting

    def apply(
        self, step: InFlightStep, result: StepResult, now_s: float
    ) -> tuple[list[TokenDelta], list[RequestState]]:
        """All deltas of the step in plan order, and the requests that it ended (each has its last delta among them)."""
        assert result.step_id == step.step_id, "results come in the order of their plans"
        self._scheduler.returned(step.step_id)
        deltas: list[TokenDelta] = []
        ended: list[RequestState] = []
        gaps = TokenGaps(self._collector.inter_token_latency_s, now_s)
        rows = iter(result.rows)
        running = Status.RUNNING
        for seq, work in zip(step.sequences, step.work, strict=True):
            row = next(rows) if work.samples or work.num_scored else None
            if step.step_id <= seq.void_until:
                self._collector.wasted_tokens += len(row.token_ids) if row is not None else 0
                continue
            if seq.status is running:
                seq.num_computed += work.num_tokens
            elif seq.status is Status.FINISHED:
                if row is not None:
                    self._collector.wasted_tokens += len(row.token_ids)
                continue
            if work.max_drafts:
                self._return_drafts(seq, work, row)
            if row is not None and row.prompt_logprobs is not None:
                self._pass_on(seq, row.prompt_logprobs, deltas)
            if row is None or not (work.samples or row.error):
                self._after_chunk(seq)
            elif row.embedding is not None:
                self._end_of_prompt(seq, "stop", row.embedding, deltas, ended)
            elif row.error is not None or not row.token_ids:
                if row.token_ids:  # behind accepted drafts something went wrong
                    self._accept(seq, row, deltas, ended, gaps, now_s)
                if seq.finish_reason is None:
                    self._fail(seq.state, row.error or "the ranks returned no token", deltas, ended)
            elif not seq.state.request.sampling.max_tokens:
                self._collector.wasted_tokens += len(row.token_ids)
                self._end_of_prompt(seq, "length", None, deltas, ended)
            else:
                self._accept(seq, row, deltas, ended, gaps, now_s)
        assert next(rows, None) is None, "one RowResult per RowWork that has one"
        gaps.flush()
        return deltas, ended

    def undo(self, step: InFlightStep, failure: str) -> tuple[list[TokenDelta], list[RequestState]]:
        """As apply(), for a step that the ranks have not computed. What is alone in it and still too large ends."""
        deltas: list[TokenDelta] = []
        ended: list[RequestState] = []
        alone = self._scheduler.undo(step)
        if alone is not None and alone.status is not Status.FINISHED:
            self._fail(alone.state, failure, deltas, ended)
        return deltas, ended

    def finish(self, seq: Sequence, reason: FinishReason) -> bool:
        """Ends one choice and releases what it holds; True when it was the request's last."""
        state = seq.state
        self._scheduler.finish(seq)
        seq.finish_reason = reason
        self._collector.finished[reason] += 1
        state.num_live -= 1
        forks = self._scheduler.waiting.blocked_by(Blocker.FORK, state)
        if forks and len(forks) == state.num_live:  # nobody computes the prompt for them
            first = next(iter(forks))
            self._scheduler.waiting.remove(first)
            self._scheduler.enqueue(first)
        return state.num_live == 0

    # ---- inside ----

    def _accept(
        self,
        seq: Sequence,
        row: RowResult,
        deltas: list[TokenDelta],
        ended: list[RequestState],
        gaps: TokenGaps,
        now_s: float,
    ) -> None:
        """Takes the sampled token of one row, and those behind its accepted drafts."""
        tokens, request = seq.tokens, seq.state.request
        position = len(tokens) - seq.prompt_len
        drafts: tuple[int, int] | None = None
        if row.num_drafts:
            drafts = row.num_drafts, len(row.token_ids) - 1
            row = self._accept_drafts(seq, row)
        tokens += row.token_ids
        token = tokens[-1]
        self._collector.generation_tokens += len(row.token_ids)
        if seq.last_token_s is None:
            self._first_token(seq, now_s)
        else:
            gaps.add(seq.last_token_s, len(row.token_ids))
        seq.last_token_s = now_s
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
        stop_reason, usage = (None, None) if reason is None else self._end(seq, token, reason, ended)
        deltas.append(
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
            )
        )

    def _return_drafts(self, seq: Sequence, work: RowWork, row: RowResult | None) -> None:
        """Notes that a plan with drafts has returned; nothing may have been guessed."""
        seq.num_drafts -= work.max_drafts
        if self._drafting is not None and row is not None and not row.num_drafts:
            self._drafting.observe_none(seq.drafting, len(seq.tokens))

    def _accept_drafts(self, seq: Sequence, row: RowResult) -> RowResult:
        """Counts a row's accepted drafts as known and computed; returns the row without tokens behind its end."""
        assert self._drafting is not None
        num_accepted = len(row.token_ids) - 1
        self._drafting.observe(seq.drafting, row.num_drafts, num_accepted)
        num_tokens = self._num_until_end(seq, row.token_ids)
        if num_tokens <= num_accepted:
            self._collector.wasted_tokens += num_accepted + 1 - num_tokens
            logprobs = None if row.logprobs is None else row.logprobs[:num_tokens]
            row = RowResult(row=row.row, token_ids=row.token_ids[:num_tokens], logprobs=logprobs)
        seq.num_known += num_tokens - 1
        if seq.status is Status.RUNNING:
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

    def _pass_on(self, seq: Sequence, got: PromptLogprobs, deltas: list[TokenDelta]) -> None:
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
        deltas.append(
            TokenDelta(
                request_id=state.request.request_id,
                attempt=state.request.attempt,
                choice=seq.choice,
                first_position=seq.num_output,
                token_ids=[],
                prompt_logprobs=PromptLogprobs(first, entries),
            )
        )

    def _end_of_prompt(
        self,
        seq: Sequence,
        reason: FinishReason,
        embedding: bytes | None,
        deltas: list[TokenDelta],
        ended: list[RequestState],
    ) -> None:
        """Ends a choice that has no tokens: its prompt is embedded, or max_tokens is 0."""
        self._after_chunk(seq)
        last = self.finish(seq, reason)
        if last:
            ended.append(seq.state)
        deltas.append(
            TokenDelta(
                request_id=seq.state.request.request_id,
                attempt=seq.state.request.attempt,
                choice=seq.choice,
                first_position=0,
                token_ids=[],
                finish_reason=reason,
                usage=seq.state.usage() if last else None,
                embedding=embedding,
            )
        )

    def _end(
        self, seq: Sequence, token: int, reason: FinishReason, ended: list[RequestState]
    ) -> tuple[int | None, Usage | None]:
        """Ends a choice with its last token; returns the stop token id to name, and the bill if it was the last."""
        is_last = self.finish(seq, reason)
        if is_last:
            ended.append(seq.state)
        named = token if reason == "stop" and not self._is_eos(seq, token) else None
        return named, seq.state.usage() if is_last else None

    def _is_eos(self, seq: Sequence, token: int) -> bool:
        return token in self._eos and not seq.state.request.sampling.ignore_eos

    def _after_chunk(self, seq: Sequence) -> None:
        """A part of a prompt is computed; nothing was sampled."""
        if seq.num_computed >= seq.table.next_commit:  # a preempted one has no blocks: NEVER
            self._manager.commit(seq.table, seq.tokens, seq.num_computed)
        if len(seq.state.sequences) > 1:
            self._release_forks(seq)

    def _release_forks(self, seq: Sequence) -> None:
        """Enqueues the other choices once the whole prompt of one is computed: they share its blocks."""
        if seq.num_computed >= seq.prompt_len:
            self._scheduler.unblock(Event(Blocker.FORK, seq.state))

    def _first_token(self, seq: Sequence, now_s: float) -> None:
        if seq.choice == 0 and not any(seq.state.request.resume_token_ids):
            self._collector.time_to_first_token_s.observe(now_s - seq.state.arrival_s)

    def _fail(self, state: RequestState, error: str, deltas: list[TokenDelta], ended: list[RequestState]) -> None:
        """Ends the request of a row that failed on the ranks, and removes its blocks from the index."""
        for seq in state.sequences:
            if seq.status is Status.FINISHED:
                continue
            self._scheduler.forget(seq)
            position = seq.num_billed
            last = self.finish(seq, "error")
            deltas.append(
                TokenDelta(
                    request_id=state.request.request_id,
                    attempt=state.request.attempt,
                    choice=seq.choice,
                    first_position=position,
                    token_ids=[],
                    finish_reason="error",
                    usage=state.usage() if last else None,
                    error=error,
                )
            )
        ended.append(state)
