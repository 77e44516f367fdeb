"""ModelRunner.launch: one StepPlan on one rank, given to the device; StepHandle.result: its outcome.

Called by rank_server.py; every rank of a group launches every plan, in order. In a plan: roll back and free rows, bind
rows, extend tables, clean new blocks, copy blocks, propose drafts, forward, sample, agree with TP peers. It has no
plans, requests or transport of its own. Next, back in the engine: workers/engine/results.py. S rows that sample, T
tokens, V vocabulary.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.models.decoder import Decoder
from tandem.workers.planning.graph_room import CaptureSize
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NOT_FINITE_ID, Guess
from tandem.workers.rank.batch import StepBatch, build_batch, preparing
from tandem.workers.rank.captured.framed_step import ReplayOutcome, clean_rejected
from tandem.workers.rank.captured.replays import Replays, SampledPlaces
from tandem.workers.rank.captured.ruled_draw import RuledSampling
from tandem.workers.rank.drafts import Accepted, Drafts, accept, propose
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.pooler import Pooled, Pooler
from tandem.workers.rank.row_results import row_results
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.start.captures import capture_steps
from tandem.workers.rank.step_exchanges import StepExchanges, StepVerdict
from tandem.workers.sampling.prompt_logprobs import PromptScorer, Scored, ScoredRows
from tandem.workers.sampling.sampler import Drawn, Sampling
from tandem.workers.sampling.sampling_table import EDITS, READS_LATE, READS_ON_HOST
from tandem.workers.speculation.proposer import Proposer

if TYPE_CHECKING:
    from tandem.parallel.pipeline import StageLink
    from tandem.workers.rank.transfers.load_gate import LoadGate

Ints = npt.NDArray[np.int64]
OUT_OF_MEMORY = "device out of memory"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The sampled tokens of a step on the way to the row table: the rows that sample and those rows' lives; the ids on
    the device; where they and the drafts behind them arrive on the host. is_clean: what rejected drafts have left in
    the cache harms nobody."""

    rows: Ints
    lives: Ints
    ids_S: torch.Tensor
    host_ids_S: torch.Tensor
    host_drafts_S: torch.Tensor | None
    is_clean: bool = False


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step's work on the device."""

    batch: StepBatch
    drafts: Drafts | None = None
    drawn: Drawn | None = None
    tokens: _Tokens | None = None
    # events around the wait for hidden states, where there was one
    received: tuple[DeviceEvent, DeviceEvent] | None = None
    errors: dict[int, str] = field(default_factory=dict)  # of its rows, by row
    verdict: StepVerdict | None = None  # of all ranks, on the last stage of several
    is_replayed: bool = False
    pooled: Pooled | None = None  # its embeddings
    scored: Scored | None = None  # the log probabilities of its prompts


class StepHandle:
    """A step that was launched. Made by ModelRunner."""

    __slots__ = (
        "_runner",
        "began",
        "computed",
        "done",
        "failure",
        "known_failure",
        "settled",
        "step_id",
        "step_result",
    )

    def __init__(
        self, runner: "ModelRunner", plan: StepPlan, began: DeviceEvent, computed: _Computed | None, failure: str | None
    ) -> None:
        self._runner = runner
        self.step_id = plan.step_id
        self.known_failure = plan.known_failure
        self.began = began
        self.computed = computed
        self.failure = failure
        self.done = runner.record()
        self.settled = False
        self.step_result: StepResult | None = None

    def is_done(self) -> bool:
        """Returns whether `result` would not wait."""
        return self.settled or self.done.is_done()

    def result(self) -> StepResult | None:
        """Waits until the device has run the step, sampled or not; None where this rank does not sample."""
        if not self.settled:
            self._runner.settle(self)
        return self.step_result


class ModelRunner:
    """One rank's shard, its KV tensors and its row table. `link` is None when the pipeline has one stage, `proposer`
    without speculative decoding; guess: its form for devices, where there is one. _on_device: the device has the tokens
    of the step launched last, so that the next one need not wait for them."""

    def __init__(
        self,
        model: Decoder,
        context: ParallelContext,
        kv: KVCache,
        table: RowTable,
        platform: Platform,
        link: "StageLink | None" = None,
        proposer: Proposer | None = None,
        guess: Guess | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self.kv = kv
        self.gate: LoadGate | None = None
        self.captures: CaptureReport | None = None
        self._table = table
        self._samples = context.is_last_stage and context.tp_rank == 0
        self._rows = platform.rows(table, guess, keeps_tokens=self._samples)
        self._on_device = True
        self._platform = platform
        self._proposer = proposer
        self._exchanges = StepExchanges(context, link, platform)
        ops = self._ops = platform.sampling_ops() if self._samples else None  # compiled now, not in the first step
        self._prepare = None if ops is None else preparing(table, ops, is_ahead=self._rows.is_ahead)
        self._appends = context.pp_size == 1
        self._steps: deque[StepHandle] = deque()  # whose tokens the row table lacks
        self._replays = Replays(self._samples)
        self._awaits: list[int] = []
        self._owed: list[int] = []  # of steps before, which this rank has not computed
        self._failed_step = -1
        self._last_done = self.record()

    @cached_property
    def _pooler(self) -> Pooler:
        """Made for the first row with a Pool."""
        return Pooler(self._platform.accelerator, steps_in_flight=max(2, self._context.pp_size))

    @cached_property
    def _scorer(self) -> PromptScorer:
        """Made for the first prompt that is scored."""
        return PromptScorer(self._platform.accelerator, reads=self._samples)

    def make_captures(self, sizes: Sequence[CaptureSize], max_drafts: int) -> None:
        """Captures steps, in step with all ranks of the stage, where the platform does so before the first one."""
        kv, parts = self.kv, (self._context, self._platform, sizes, self._ops, max_drafts)
        made = capture_steps(self._model, kv.tensors, kv.clear_on_device, self._rows, *parts)
        self.captures, self._replays.draws_of = made.report, made.draws_of
        self._replays.graphs = self._model.graphs if isinstance(self._model.graphs, StartGraphs) else None

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
        if self._steps and (plan.rolled_back or not self._on_device):
            self.settle(self._steps[-1])
        self._on_device = True
        self.kv.clear_slots(self._table.roll_back(plan.rolled_back))
        self.kv.clear(self._table.apply(plan))
        self.kv.copy(plan.block_copies)
        self._awaits += plan.awaits
        computed, failure = self._compute_or_fail(plan) if plan.work else (None, None)
        step = StepHandle(self, plan, began, computed, failure)
        self._steps.append(step)
        if step.done.is_done():
            self.settle(step)
        return step

    def settle(self, last: StepHandle) -> None:
        """Waits for all steps up to `last`, enters their tokens into the row table and makes their results."""
        while not last.settled:
            step = self._steps[0]
            step.done.wait()
            self._steps.popleft()
            step.settled = True
            self._settle_one(step)

    def close(self) -> None:
        """No plan may follow. Idempotent."""
        self._steps.clear()
        self._model.close()

    def record(self) -> DeviceEvent:
        """Returns a timed event behind the work given so far."""
        return self._platform.accelerator.event(timed=True)

    # ---- launch ----

    def _compute_or_fail(self, plan: StepPlan) -> tuple[_Computed | None, str | None]:
        """Returns the step's work, or why this rank has not done it."""
        drafts = self._propose(plan)
        num_scored = sum(work.num_scored for work in plan.work) if self._table.scored else 0
        total = 0 if drafts is None else drafts.total
        self._replays.choose(
            partial(self._shape, plan, drafts), lambda shape: self._model.replay_key(shape, self.kv.tensors)
        )
        self._exchanges.begin(plan.work, total, self._table.pooled, num_scored, self._replays.now)
        failure = self._void(plan.step_id, plan.known_failure)
        if failure is None:
            try:
                return self._compute(plan, drafts), None
            except torch.OutOfMemoryError as error:
                failure = f"{OUT_OF_MEMORY} in step {plan.step_id}: {error}"
            log.warning("%s", failure)
            self._failed_step = plan.step_id
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
        if self._proposer is None or not any(work.max_drafts for work in plan.work):
            return None
        with_drafts = [work.row for work in plan.work if work.max_drafts]
        if self._rows.guesses and not (self._flags_of(with_drafts) & (READS_LATE | READS_ON_HOST)).any():
            return Drafts.on_device(plan)
        if self._steps:
            self.settle(self._steps[-1])
        if self._void(plan.step_id, plan.known_failure) is not None:
            return None
        return propose(self._proposer, plan, self._table)

    def _void(self, step_id: int, known_failure: int) -> str | None:
        """Returns why a plan counts for nothing: it was made before the engine knew of a failed step ahead of it."""
        if not known_failure < self._failed_step < step_id:
            return None
        return f"planned before the failure of step {self._failed_step} was known"

    def _compute(self, plan: StepPlan, drafts: Drafts | None) -> _Computed:
        if self._steps and self._samples and self._waits_for_tokens(plan):
            self.settle(self._steps[-1])
        replays = self._replays
        batch = build_batch(plan, self._table, self._rows, drafts, self._prepare, replays.step, replays.ruled)
        computed = self._run(plan, batch, drafts, self._tensors())
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
            for page in self.kv.page_of:
                self.gate.wait(self._owed[-1], page)
            self._owed.pop()
        if not self._awaits:
            return tensors
        return replace(tensors, layers=self.gate.in_turn(tensors.layers, tuple(self._awaits), self.kv.page_of))

    def _run(self, plan: StepPlan, batch: StepBatch, drafts: Drafts | None, kv: KVTensors) -> _Computed:
        """Forward, sampling and pooling."""
        hidden_TH, received = None, None
        if not self._context.is_first_stage:
            before = self.record()
            hidden_TH = self._exchanges.receive()
            received = before, self.record()
        output, pooled, scored = self._forward(plan, batch, kv, hidden_TH)
        self._exchanges.end_layers()
        if not self._context.is_last_stage:
            self._exchanges.send(output)
            return _Computed(batch, received=received)
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
        return _Computed(batch, drafts, drawn, tokens, received, errors, verdict, is_replayed, pooled, scored)

    def _draw_ruled(self, sampling: RuledSampling, outcome: ReplayOutcome) -> Drawn:
        """Draws by a capture behind the step's."""
        if sampling.prepares_late:
            if self._steps:
                self.settle(self._steps[-1])
            arrays = StepArrays()
            sampling.prepare(arrays.send)
            self._rows.send_late(arrays)
        drawn = sampling.draw(outcome, self._platform.accelerator.to_host)
        if self._adds:
            self._rows.append(None)
        return drawn

    def _draw(self, sampling: Sampling, places: SampledPlaces, logits_SV: torch.Tensor) -> Drawn:
        if sampling.prepares_late:
            if self._steps:
                self.settle(self._steps[-1])
            arrays = StepArrays()
            sampling.prepare_late(arrays.send)
            self._rows.send_late(arrays)
        positions_S = tokens_NL = None
        if sampling.reads_positions and self._rows.is_ahead:
            positions_S = places.positions_S()
            tokens_NL = None if sampling.read_rows is None else self._rows.tokens
        return sampling.draw(logits_SV, self._platform.accelerator, positions_S, tokens_NL)

    def _forward(
        self, plan: StepPlan, batch: StepBatch, kv: KVTensors, hidden_TH: torch.Tensor | None
    ) -> tuple[torch.Tensor, Pooled | None, Scored | None]:
        """The model's output and, where this rank pools rows of the step or scores prompts, the outcome of that."""
        table, step, scored = self._table, None, None
        if table.pooled and self._samples:
            step = self._pooler.begin(plan.work, batch.begin_R, batch.starts, table.pooled)
        if table.scored and self._context.is_last_stage:
            rows = ScoredRows(batch.begin_R, batch.starts, table.token_ids, table.adapter_slots, table.sampling.of)
            scored = self._scorer.begin(plan.work, rows)
        wanted = [each.rows_P for each in (step, scored) if each is not None]
        output, hidden_PH = self._modelled(batch, kv, hidden_TH, torch.cat(wanted) if wanted else None)
        if hidden_PH is None:
            return output, None, None
        num_pooled = 0 if step is None else len(step.rows_P)
        pooled = None if step is None else self._pooler.pool(step, hidden_PH[:num_pooled])
        if scored is None:
            return output, pooled, None
        return output, pooled, self._scorer.score(scored, hidden_PH[num_pooled:], self._model.logits)

    def _modelled(
        self, batch: StepBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, rows_P: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of forward() and, for rows_P, what forward_and_pool() adds; by a replay where there is a
        capture."""
        model, step = self._model, self._replays.step
        if step is None:
            if rows_P is None:
                return model.forward(batch.forward, kv, hidden_TH), None
            return model.forward_and_pool(batch.forward, kv, hidden_TH, rows_P)
        self._replays.run(step, hidden_TH)
        if self._adds and self._is_drawn(batch):
            self._rows.append(None)
        residual_TH, branch_TH, logits_SV = step.room
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
    ) -> _Tokens:
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
        return _Tokens(rows, table.lives[rows], ids_S, host_ids_S, host_drafts_S, is_clean)

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

    # ---- results ----

    def _settle_one(self, step: StepHandle) -> None:
        computed, step.computed = step.computed, None
        received_s, num_unguessed, is_replayed = 0.0, 0, False
        rows: list[RowResult] = []
        if computed is not None:
            step.failure, is_replayed = self._failure_of(step, computed), computed.is_replayed
            if step.failure is None:
                rows = self._take(computed)
                if computed.drafts is not None:
                    num_unguessed = computed.drafts.total - sum(row.num_drafts for row in rows)
                if computed.pooled is not None:
                    rows = computed.pooled.merged(rows, computed.errors)
                if computed.scored is not None:
                    rows = computed.scored.merged(rows)
            if computed.received is not None:
                received_s = computed.received[1].seconds_since(computed.received[0])
        if self._samples:
            step.step_result = StepResult(
                step_id=step.step_id,
                rows=rows,
                failure=step.failure,
                num_unguessed=num_unguessed,
                is_replayed=is_replayed,
                device_s=step.done.seconds_since(step.began) - received_s,
                wait_s=max(0.0, step.began.seconds_since(self._last_done)) + received_s,
            )
        self._last_done = step.done

    def _failure_of(self, step: StepHandle, computed: _Computed) -> str | None:
        """Return why a step that this rank has computed counts for nothing, as far as it can know: a peer has failed,
        or the step was planned before an earlier one's failure was known."""
        failure = self._void(step.step_id, step.known_failure)
        if failure is None and computed.verdict is not None and computed.verdict.is_failed:
            self._failed_step = step.step_id
            failure = f"{OUT_OF_MEMORY} in step {step.step_id}, on another rank of the group"
        return failure

    def _take(self, computed: _Computed) -> list[RowResult]:
        """Enters a step's tokens into the row table; returns the rows' results where this rank samples."""
        rows_S, accepted, tokens = computed.batch.sample_rows_S, None, computed.tokens
        if tokens is not None:
            if tokens.host_drafts_S is None:
                self._fill(tokens)
            else:
                accepted = accept(rows_S, tokens.host_ids_S.numpy(), tokens.host_drafts_S.numpy())
                self._fill_accepted(tokens, accepted)
        if computed.drawn is None:
            return []
        return row_results(rows_S.tolist(), computed.drawn.collect(), computed.errors, accepted)

    def _fill(self, tokens: _Tokens) -> None:
        """Enters a step's tokens, but for rows that meanwhile belong to other sequences."""
        ids = np.maximum(tokens.host_ids_S.numpy(), 0)  # of a failed row -1 in a capture with drafts
        live = np.flatnonzero(self._table.lives[tokens.rows] == tokens.lives)
        self._table.fill(tokens.rows[live], ids[live])

    def _fill_accepted(self, tokens: _Tokens, accepted: list[Accepted]) -> None:
        """Fill the result of a step with drafts."""
        ids = tokens.host_ids_S.tolist()
        is_live = (self._table.lives[tokens.rows] == tokens.lives).tolist()
        for row, live in zip(accepted, is_live, strict=True):
            if not live:
                continue
            own = ids[row.first : row.first + row.count]
            rejected = self._table.accept(row.row, [max(0, token) for token in own], row.num_places)
            if not tokens.is_clean and NOT_FINITE_ID in ids[row.first : row.first + row.num_places + 1]:
                self.kv.clear_slots(rejected)  # attention may read what it then weighs with 0
