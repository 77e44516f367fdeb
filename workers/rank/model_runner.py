"""ModelRunner.launch: one StepPlan on one rank, given to the device. Its outcome: launched_steps.py.

Called by rank_server.py; every rank of a group launches every plan, in order. In a plan: roll back and free rows, bind
rows, extend tables, clean new blocks, copy blocks, propose drafts, forward, sample, agree with TP peers. It has no
plans, requests or transport of its own. Next, back in the engine: workers/engine/results.py. S rows that sample, T
tokens, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import DeviceEvent
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.graphs.graph_runner import StartGraphs
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.messages.handshake import CaptureReport
from tandem.workers.messages.step import StepPlan
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.step_tensors import Heard
from tandem.workers.planning.graph_room import CaptureSize
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NOT_FINITE_ID, Guess
from tandem.workers.rank.batch import StepBatch, build_batch, preparing
from tandem.workers.rank.captured.framed_step import ReplayOutcome, clean_rejected
from tandem.workers.rank.captured.guess_replays import CapturesPasses
from tandem.workers.rank.captured.replays import Replays, SampledPlaces
from tandem.workers.rank.captured.ruled_draw import RuledSampling
from tandem.workers.rank.drafters.draft_rank import LoadedDraft
from tandem.workers.rank.drafters.shared_drafts import SharedDrafts
from tandem.workers.rank.drafters.step_record import DecodedStep, ReadsSteps
from tandem.workers.rank.drafts import Drafts, NextDrafts, learn_ended, propose
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.launched_steps import OUT_OF_MEMORY, LaunchedSteps, StepHandle, StepTokens, StepWork
from tandem.workers.rank.pooler import Pooled, Pooler
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.start.captures import capture_steps
from tandem.workers.rank.start.guess_captures import GuessOrder
from tandem.workers.rank.step_exchanges import StepExchanges, StepVerdict
from tandem.workers.sampling.prompt_logprobs import PromptScorer, Scored, ScoredRows
from tandem.workers.sampling.sampler import Drawn, Sampling
from tandem.workers.sampling.sampling_table import EDITS, READS_LATE, READS_ON_HOST
from tandem.workers.speculation.proposer import GuessesAhead, GuessRow, MakeProposer

if TYPE_CHECKING:
    from tandem.parallel.pipeline import StageLink, StageOutput
    from tandem.workers.rank.transfers.load_gate import LoadGate

log = logging.getLogger(__name__)


class ModelRunner:
    """One rank's shard, its KV tensors and its row table. `link` is None when the pipeline has one stage,
    `make_proposer` without speculative decoding; guess: its form for devices, where there is one. scored_rows: as in
    EngineSettings. draft: what `make_proposer` runs, which close() closes. _on_device: the device has the
    tokens of the step launched last, so that the next one need not wait for them."""

    def __init__(
        self,
        model: Decoder,
        context: ParallelContext,
        kv: KVCache,
        table: RowTable,
        platform: Platform,
        link: "StageLink | None" = None,
        make_proposer: MakeProposer | None = None,
        guess: Guess | None = None,
        scored_rows: str | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self.kv = kv
        self.gate: LoadGate | None = None
        self.captures: CaptureReport | None = None
        self.draft: LoadedDraft | None = None
        self._table = table
        self._samples = context.is_last_stage and context.tp_rank == 0
        self._rows = platform.rows(table, guess, keeps_tokens=self._samples)
        self._on_device = True
        self._platform = platform
        self._proposer = None if make_proposer is None else make_proposer(self._rows)
        self._reader = self._proposer if isinstance(self._proposer, ReadsSteps) else None  # slow to ask in each step
        ahead = self._proposer if self._rows.is_ahead else None
        self._guesser = ahead if isinstance(ahead, GuessesAhead) else None
        self._scored_rows = scored_rows
        self._exchanges = StepExchanges(context, link, platform)
        ops = self._ops = platform.sampling_ops() if self._samples else None  # compiled now, not in the first step
        self._prepare = None if ops is None else preparing(table, ops, is_ahead=self._rows.is_ahead)
        self._appends = context.pp_size == 1
        is_next = self._samples and not self._appends
        self._next = NextDrafts(self._proposer, table, self.record) if is_next and self._proposer else None
        self._steps = LaunchedSteps(table, kv, samples=self._samples, record=self.record)
        self._replays = Replays(self._samples)
        self._awaits: list[int] = []
        self._guessing: tuple[DeviceEvent, DeviceEvent] | None = None
        self._owed: list[int] = []  # of steps before, which this rank has not computed

    @cached_property
    def _pooler(self) -> Pooler:
        """Made for the first row with a Pool."""
        return Pooler(self._platform.accelerator, steps_in_flight=max(2, self._context.pp_size))

    @cached_property
    def _scorer(self) -> PromptScorer:
        """Made for the first prompt that is scored."""
        return PromptScorer(self._platform.accelerator, reads=self._samples, file=self._scored_rows)

    def make_captures(self, sizes: Sequence[CaptureSize], max_drafts: int) -> None:
        """Captures steps, in step with all ranks of the stage, where the platform does so before the first one."""
        kv, parts = self.kv, (self._context, self._platform, sizes, self._ops, max_drafts, self._guess_order())
        made = capture_steps(self._model, kv.tensors, kv.clear_on_device, self._rows, *parts)
        self.captures, self._replays.draws_of = made.report, made.draws_of
        self._replays.graphs = self._model.graphs if isinstance(self._model.graphs, StartGraphs) else None

    def _guess_order(self) -> GuessOrder | None:
        """Returns what is captured of the drafter of this rank; None without one whose passes a graph may hold."""
        guesser, table = self._guesser, self._table
        drafter: object = guesser.own if isinstance(guesser, SharedDrafts) else guesser
        if self.draft is None or not self._appends or not isinstance(drafter, CapturesPasses):
            return None
        max_blocks = table.block_ids.shape[1] // len(table.windows)
        return GuessOrder(drafter, self.draft.method, table, len(table.lives), max_blocks)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Does a plan's work on the host and gives the device its own, without waiting for it. No fault of a single row
        raises.

        On CPU the step is computed when it returns. On a device nothing is read back before, drafts included, but for a
        row with a grammar or another logits processor that reads tokens on the host alone (Reads), and drafts of such a
        row or of a proposer that has no form for devices.

        A rank that runs out of device memory takes part in the rest of the step's exchanges with zeros, and the step
        counts for nothing in the whole group: StepResult.failure. So does each plan made before the engine knew. Rows
        stay bound and count as though they had been computed, until a plan rolls them back. Blocks are cleaned and
        copied in any case: once the answer is out they may be given to others. Raises torch.OutOfMemoryError, which
        ends the group, when there is no memory for those copies or for the exchanges either.
        """
        self._platform.accelerator.activate()
        self._platform.begin_step()
        began = self.record()
        if plan.rolled_back or not self._on_device:
            self._steps.settle_all()
        self._on_device = True
        self.kv.clear_slots(self._table.roll_back(plan.rolled_back))
        learn_ended(self._proposer, plan, self._table, self._steps.settle_all)
        if not self._appends:
            self.kv.clear_slots(self._table.take_told(plan))
        self.kv.clear(self._table.apply(plan))
        self.kv.copy(plan.block_copies)
        if not self._appends and plan.new_rows:
            self.kv.clear_slots(self._table.tails(plan))
        self._awaits += plan.awaits
        computed, failure = self._compute_or_fail(plan) if plan.work else (None, None)
        step = self._steps.add(plan, began, computed, failure)
        if self._next is not None and self._next.is_due(plan):
            self._steps.amend(step, partial(self._next.added, plan))
        return step

    def close(self) -> None:
        """No plan may follow. Idempotent."""
        self._steps.clear()
        self._model.close()
        if self.draft is not None:
            self.draft.close()

    def record(self) -> DeviceEvent:
        """Returns a timed event behind the work given so far."""
        return self._platform.accelerator.event(timed=True)

    # ---- launch ----

    def _compute_or_fail(self, plan: StepPlan) -> tuple[StepWork | None, str | None]:
        """Returns the step's work, or why this rank has not done it."""
        drafts = self._propose(plan)
        num_scored = sum(work.num_scored for work in plan.work) if self._table.scored else 0
        total = 0 if drafts is None else drafts.total
        self._replays.choose(
            partial(self._shape, plan, drafts), lambda shape: self._model.replay_key(shape, self.kv.tensors)
        )
        self._exchanges.begin(plan.work, total, self._table.pooled, num_scored, self._replays.now)
        failure = self._steps.void(plan.step_id, plan.known_failure)
        if failure is None:
            try:
                return self._compute(plan, drafts), None
            except torch.OutOfMemoryError as error:
                failure = f"{OUT_OF_MEMORY} in step {plan.step_id}: {error}"
            log.warning("%s", failure)
            self._steps.fail(plan.step_id)
        self._owed += self._awaits
        self._awaits.clear()
        try:  # outside of the handler above, whose exception keeps the step's memory
            self._exchanges.make_up()
        except Exception as error:
            raise torch.OutOfMemoryError(f"{failure}; its peers cannot go on: {error}") from error
        return None, failure

    def _shape(self, plan: StepPlan, drafts: Drafts | None) -> StepShape:
        """Reads nothing that ranks learn of at different times, such as the drafts that were accepted."""
        table, rows_R = self._table, [work.row for work in plan.work]
        queries_R = np.fromiter((work.num_tokens for work in plan.work), np.int64, len(rows_R))
        if drafts is not None:
            queries_R += drafts.counts_R
        return StepShape(
            int(queries_R.sum()),
            int(queries_R.max()),
            int(table.num_blocks[rows_R].max()),
            has_adapters=bool((table.adapter_slots[rows_R] >= 0).any()),
            is_loaded=not self._awaits,
            by_shards=self._model.has_shards and not self._needs_whole_logits(plan),
        )

    def _needs_whole_logits(self, plan: StepPlan) -> bool:
        """True if some row of the step samples as only the whole vocabulary says."""
        rows = [work.row for work in plan.work if work.samples]
        return self._table.sampling.needs_whole(np.array(rows, np.int64))

    def _propose(self, plan: StepPlan) -> Drafts | None:
        """Returns the step's drafts, which are guessed from all tokens sampled so far. Of a plan that counts for
        nothing the host proposes none, as all ranks know by then; the device would have guessed as many as for any
        other."""
        self._guessing = None
        if not self._appends:
            return Drafts.of_plan(plan, self._table)
        if self._proposer is None:
            return None
        if not any(work.max_drafts for work in plan.work):
            if self._reader is not None:
                if self._guesser is None:
                    self._steps.settle_all()
                began = self.record()
                self._reader.catch_up()
                self._guessing = began, self.record()
                self._recall()
            return None
        with_drafts = [work.row for work in plan.work if work.max_drafts]
        if not (self._flags_of(with_drafts) & (READS_LATE | READS_ON_HOST)).any():
            if self._rows.guesses:
                return Drafts.on_device(plan)
            if self._guesser is not None:
                began = self.record()
                asked = [GuessRow(work.row, work.max_drafts) for work in plan.work if work.max_drafts]
                guesses_QD = self._guesser.guess(asked)
                self._guessing = began, self.record()
                self._recall()
                return Drafts.on_device(plan, guesses_QD)
        self._steps.settle_all()
        if self._steps.void(plan.step_id, plan.known_failure) is not None:
            return None
        began = self.record()
        drafts = propose(self._proposer, plan, self._table)
        self._guessing = began, self.record()
        return drafts

    def _recall(self) -> None:
        """Reads the steps ahead where the device has run out of memory over its rows, which it then gets anew."""
        if self._rows.has_forgotten:
            self._steps.settle_all()

    def _compute(self, plan: StepPlan, drafts: Drafts | None) -> StepWork:
        if self._samples and self._waits_for_tokens(plan):
            self._steps.settle_all()
        replays = self._replays
        batch = build_batch(plan, self._table, self._rows, drafts, self._prepare, replays.step, replays.ruled)
        computed = self._run(plan, batch, drafts, self._tensors())
        self._wait_for_draft()
        self._awaits.clear()
        return computed

    def _waits_for_tokens(self, plan: StepPlan) -> bool:
        """True if logits processors of some row read its tokens on the host, ahead of the forward pass, or behind it
        where drafts in flight leave its positions open."""
        rows_S = [work.row for work in plan.work if work.samples]
        flags_S = self._flags_of(rows_S)
        is_open_S = self._table.max_accepted[rows_S] > 0
        return bool(((flags_S & READS_ON_HOST > 0) | (flags_S & READS_LATE > 0) & is_open_S).any())

    def _flags_of(self, rows: list[int]) -> npt.NDArray[np.uint8]:
        """The rows' sampling flags."""
        return self._table.sampling.flags[rows]

    def _tensors(self) -> KVTensors:
        """The cache; with an overlapped load, layer by layer as it arrives. What a failed step should have waited for
        is waited for here, so that this step is as the peers' is."""
        tensors = self.kv.tensors
        if not self._awaits and not self._owed:
            return tensors
        assert self.gate is not None, "an overlapped load without a memory lane"
        while self._owed:
            for page in (*self.kv.page_of, *self.kv.draft_pages):
                self.gate.wait(self._owed[-1], page)
            self._owed.pop()
        if not self._awaits:
            return tensors
        return replace(tensors, layers=self.gate.in_turn(tensors.layers, tuple(self._awaits), self.kv.page_of))

    def _wait_for_draft(self) -> None:
        """Waits for the loaded KV of a draft model, which a later step reads."""
        if self.gate is not None:
            for page in self.kv.draft_pages:
                for ticket in self._awaits:
                    self.gate.wait(ticket, page)

    def _run(self, plan: StepPlan, batch: StepBatch, drafts: Drafts | None, kv: KVTensors) -> StepWork:
        """Forward, sampling and pooling."""
        before, received = None, None
        if not self._context.is_first_stage:
            began = self.record()
            before = self._exchanges.receive()
            received = began, self.record()
        output, pooled, scored = self._forward(plan, batch, kv, before)
        if self._reader is not None and self._model.heard is not None:
            self._reader.read(self._decoded(batch, drafts, self._model.heard))
        self._exchanges.end_layers()
        if not self._context.is_last_stage:
            heard = self._model.heard
            kept = () if heard is None else tuple(tap_TH[: len(output)] for tap_TH in heard.taps)
            self._exchanges.send(output, kept)
            return StepWork(batch, received=received)
        count, has_drafts = len(batch.sample_rows_S), drafts is not None
        if self._replays.now is None:
            places = SampledPlaces(batch.drafts_S, batch.forward)
        else:
            places = self._replays.places(count, has_drafts=has_drafts)
        drawn, host_drafts_S, to_host = None, None, self._platform.accelerator.to_host
        if self._is_drawn(batch) and places.outcome is not None:
            host_XS = to_host(places.outcome.sampled_XS)
            edited_S = self._table.sampling.flags[batch.sample_rows_S] & EDITS > 0
            drawn = Drawn.captured(places.outcome.sampled_XS, host_XS, edited_S)
        elif batch.ruled is not None and places.outcome is not None:
            drawn = self._draw_ruled(batch.ruled, places.outcome)
        elif batch.sampling is not None:
            drawn = self._draw(batch.sampling, places, output)
            if has_drafts:
                drawn = drawn.marked(NOT_FINITE_ID, to_host)
        if places.drafts_S is not None:
            told_S = None if drawn is None else drawn.host_drafts_S
            host_drafts_S = to_host(places.drafts_S) if told_S is None else told_S
        verdict = self._exchanges.agree(None if drawn is None else drawn.ids_S)  # from here on nothing may fail
        tokens = self._tokens(batch, places, host_drafts_S, drawn, verdict) if self._appends and count else None
        errors = {**self._table.sampling.grammars.errors, **self._table.errors}
        is_replayed = self._replays.now is not None
        work = StepWork(batch, drafts, drawn, tokens, received, errors, verdict, is_replayed, pooled, scored)
        behind_drafts = self._table.sampling.grammars.take_behind_drafts()
        return replace(work, guessing=self._guessing, host_drafts_S=host_drafts_S, behind_drafts=behind_drafts)

    def _decoded(self, batch: StepBatch, drafts: Drafts | None, heard: Heard) -> DecodedStep:
        step = batch.rows_R, batch.begin_R, batch.starts, heard
        if self._guesser is None:
            return DecodedStep(*step)
        now = self._replays.now
        positions_T = batch.forward.positions_T if now is None else ReplayOutcome(*now.outputs).positions_T
        return DecodedStep(*step, positions_T, np.zeros_like(batch.rows_R) if drafts is None else drafts.counts_R)

    def _draw_ruled(self, sampling: RuledSampling, outcome: ReplayOutcome) -> Drawn:
        """Draws by a capture behind the step's."""
        if sampling.prepares_late:
            self._steps.settle_all()
            arrays = StepArrays()
            sampling.prepare(arrays.send)
            self._rows.send_late(arrays)
        drawn = sampling.draw(outcome, self._platform.accelerator.to_host)
        if self._adds:
            self._rows.append(None)
        return drawn

    def _draw(self, sampling: Sampling, places: SampledPlaces, logits_SV: torch.Tensor) -> Drawn:
        if sampling.prepares_late:
            self._steps.settle_all()
            arrays = StepArrays()
            sampling.prepare_late(arrays.send)
            self._rows.send_late(arrays)
        positions_S = tokens_NL = None
        if sampling.reads_positions and self._rows.is_ahead:
            positions_S = places.positions_S()
            tokens_NL = None if sampling.read_rows is None else self._rows.tokens
        return sampling.draw(logits_SV, self._platform.accelerator, positions_S, tokens_NL)

    def _forward(
        self, plan: StepPlan, batch: StepBatch, kv: KVTensors, before: "StageOutput | None"
    ) -> tuple[torch.Tensor, Pooled | None, Scored | None]:
        """The model's output and, where this rank pools rows of the step or scores prompts, the outcome of that.
        before: the previous stage's."""
        table, step, scored = self._table, None, None
        if table.pooled and self._samples:
            step = self._pooler.begin(plan.work, batch.begin_R, batch.starts, table.pooled)
        if table.scored and self._context.is_last_stage:
            rows = ScoredRows(batch.begin_R, batch.starts, table.token_ids, table.adapter_slots, table.sampling.of)
            scored = self._scorer.begin(plan.work, rows)
        wanted = [each.rows_P for each in (step, scored) if each is not None]
        output, hidden_PH = self._modelled(batch, kv, before, torch.cat(wanted) if wanted else None)
        if hidden_PH is None:
            return output, None, None
        num_pooled = 0 if step is None else len(step.rows_P)
        pooled = None if step is None else self._pooler.pool(step, hidden_PH[:num_pooled])
        if scored is None:
            return output, pooled, None
        return output, pooled, self._scorer.score(scored, hidden_PH[num_pooled:], self._model.logits)

    def _modelled(
        self, batch: StepBatch, kv: KVTensors, before: "StageOutput | None", rows_P: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of forward() and, for rows_P, what forward_and_pool() adds; by a replay where there is a
        capture."""
        model, step = self._model, self._replays.step
        hidden_TH, kept = (None, ()) if before is None else before
        if step is None:
            if rows_P is None:
                return model.forward(batch.forward, kv, hidden_TH, kept), None
            return model.forward_and_pool(batch.forward, kv, hidden_TH, rows_P, kept)
        self._replays.run(step, hidden_TH)
        if self._adds and self._is_drawn(batch):
            self._rows.append(None)
        residual_TH, branch_TH, logits_SV, _ = step.room
        model.hear(step.room, kept)
        if not self._context.is_last_stage:
            return branch_TH[: int(batch.starts[-1])], None
        hidden_PH = None if rows_P is None else model.normed(branch_TH, residual_TH, rows_P)
        return logits_SV[: len(batch.sample_rows_S)], hidden_PH

    def _is_drawn(self, batch: StepBatch) -> bool:
        """Returns whether the replay has drawn the step's tokens."""
        behind = batch.sampling is not None or batch.ruled is not None
        return self._replays.draws(len(batch.sample_rows_S), behind=behind)

    @property
    def _adds(self) -> bool:
        """True if captures add the tokens that they draw to their rows."""
        return self._replays.step is not None and self._replays.step.adds

    # ---- behind the model ----

    def _tokens(
        self,
        batch: StepBatch,
        places: SampledPlaces,
        host_drafts_S: torch.Tensor | None,
        drawn: Drawn | None,
        verdict: StepVerdict | None,
    ) -> StepTokens:
        """One stage: every TP rank appends what tp0 sampled. A failed row gets some token too, so that a plan made
        before its failure was known still finds what it counts on."""
        if verdict is None:
            assert drawn is not None
            ids_S, host_ids_S = drawn.ids_S, drawn.host_ids_S
        else:
            ids_S, host_ids_S = verdict.ids_S, verdict.host_ids_S
        table, rows, is_clean = self._table, batch.sample_rows_S, True
        is_added = self._adds and (self._is_drawn(batch) or batch.ruled is not None)
        if places.drafts_S is not None:
            rows = rows[np.diff(rows, prepend=-1) != 0]  # once each
            is_clean = is_added or self._clean_rejected(places, ids_S, places.drafts_S)
        self._on_device = is_added or (is_clean and self._rows.append(ids_S))
        table.reserve(rows)
        return StepTokens(rows, table.lives[rows], ids_S, host_ids_S, host_drafts_S, is_clean)

    def _clean_rejected(self, places: SampledPlaces, ids_S: torch.Tensor, drafts_S: torch.Tensor) -> bool:
        """Zeroes what rejected drafts may have left. Returns False where the host has to do it, before any later
        step."""
        if self.kv.tensors.scratch_block < 0:
            return False
        try:
            clean_rejected(self.kv.clear_on_device, places.slots_GS(), ids_S, drafts_S, self.kv.tensors)
        except torch.OutOfMemoryError:
            return False
        return True
