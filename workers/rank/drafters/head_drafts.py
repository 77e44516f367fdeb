"""HeadDrafts: guesses of an EAGLE head or an MTP layer, token after token, from what the model has computed of rows.

The head has KV for each token that it has read, in the model's blocks. It reads the tokens of a step at the beginning
of the next one, when the tokens behind them are known, whether or not a row has drafts in it; else it would miss what
only that step has. Where no row has had drafts for some steps it rests, and rows that it has missed something of have
no guesses. R rows of a pass, Q of them with a guess.
"""

from collections.abc import Collection, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.decoder import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows, StepRows
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows, GuessDraw
from tandem.workers.rank.drafters.no_memory import unless_full
from tandem.workers.rank.drafters.step_record import Computed, DecodedStep, StepRecord
from tandem.workers.speculation.proposer import ProposalRow

Ints = npt.NDArray[np.int64]
REST_AFTER: Final = 64
"""Steps without drafts behind which the head reads no more, until a row has some."""
MISSED: Final = -1


class VectorHead(Protocol):
    """A head that goes from vector to vector: EagleHead, StreamHead, whose methods say more."""

    def vectors(self, heard: Heard, at: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self, ids_T: torch.Tensor, vectors_TH: torch.Tensor, batch: ForwardBatch, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class HeadDrafts:
    """A Proposer that ReadsSteps. ids: the model's id of each id of the head, int64; None: the same. max_len: positions
    that the head has. kv, table, rows: of the model's runner."""

    def __init__(
        self,
        head: VectorHead,
        ids: torch.Tensor | None,
        vocab_size: int,
        max_len: int,
        kv: DraftBlocks,
        table: DraftRows,
        rows: DeviceRows,
        platform: Platform,
    ) -> None:
        self._head, self._ids, self._vocab_size, self._max_len = head, ids, vocab_size, max_len
        self._kv, self._table, self._rows, self._platform = kv, table, rows, platform
        self._draw, self._record = GuessDraw(table, platform), StepRecord(table)
        self._read = np.zeros(len(table.lives), np.int64)  # tokens of a row that the head has KV of, or MISSED
        self._lives = np.full_like(self._read, -1)
        self._idle = 0

    def read(self, step: DecodedStep) -> None:
        if self._idle < REST_AFTER:
            self._record.keep(step)
        else:
            self._know(step.rows_R)
            self._read[step.rows_R] = MISSED

    def catch_up(self) -> None:
        self._idle += 1
        unless_full(lambda: self._absorb((), {}), None)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        self._idle = 0
        return unless_full(lambda: self._guesses(rows), [()] * len(rows))

    # ---- inside ----

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        asked = {row.row: row for row in rows if len(row.token_ids) + row.max_drafts <= self._max_len}
        drafts: dict[int, list[int]] = {}
        numbers, vectors_QH = self._absorb(asked.keys(), drafts)
        while True:
            goes_on = [at for at, row in enumerate(numbers) if len(drafts[row]) < asked[row].max_drafts]
            if not goes_on:
                return [drafts.get(row.row, ()) for row in rows]
            own = [numbers[at] for at in goes_on]
            # the vector behind the i-th guess of a row of L tokens stands at L - 2 + i
            begin = np.array([len(asked[row].token_ids) - 2 + len(drafts[row]) for row in own], np.int64)
            step = Computed(np.array(own, np.int64), begin, begin + 1, np.arange(len(own)))
            last = torch.tensor([drafts[row][-1] for row in own])
            numbers, vectors_QH = self._pass(step, last, vectors_QH[goes_on], step.first_R, drafts)

    def _absorb(self, asked: Collection[int], drafts: dict[int, list[int]]) -> tuple[list[int], torch.Tensor]:
        """Reads the last step, and guesses a token of each row that asks for it and of which nothing was missed.
        Returns as _pass() does."""
        kept = self._record.take()
        computed = None if kept is None else self._follow(kept[0])
        if kept is None or computed is None or not len(computed.rows_R):
            return [], torch.empty(0)
        self._read[computed.rows_R] = MISSED  # if there is no memory for the pass
        lens_R = computed.end_R - computed.begin_R
        row_T = np.repeat(np.arange(len(lens_R)), lens_R)
        inside_T = np.arange(len(row_T)) - np.repeat(np.cumsum(lens_R) - lens_R, lens_R)
        behind_T = computed.begin_R[row_T] + inside_T + 1
        ids_T = self._table.token_ids[computed.rows_R[row_T], behind_T].astype(np.int64)
        at_T = torch.from_numpy(computed.first_R[row_T] + inside_T)
        vectors_TH = self._head.vectors(kept[1], self._platform.accelerator.to_device(at_T))
        asks = np.flatnonzero([row in asked for row in computed.rows_R.tolist()])
        guessed = self._pass(computed, torch.from_numpy(ids_T), vectors_TH, asks, drafts)
        self._read[computed.rows_R] = computed.end_R
        return guessed

    def _follow(self, computed: Computed) -> Computed:
        """Returns the rows of which the head has read all that comes before, and notes those that it has missed
        something of."""
        rows_R = computed.rows_R
        is_whole = self._know(rows_R) | (self._read[rows_R] == computed.begin_R)
        self._read[rows_R[~is_whole]] = MISSED
        keeps = is_whole & (self._table.num_known[rows_R] > computed.end_R)
        return Computed(*(column[keeps] for column in computed))

    def _know(self, rows_R: Ints) -> npt.NDArray[np.bool_]:
        """Notes whose rows these are; returns which of them are new here."""
        lives = self._table.lives
        if len(self._read) < len(lives):
            more = len(lives) - len(self._read)
            self._read = np.append(self._read, np.zeros(more, np.int64))
            self._lives = np.append(self._lives, np.full(more, -1, np.int64))
        is_new: npt.NDArray[np.bool_] = self._lives[rows_R] != lives[rows_R]
        self._lives[rows_R] = lives[rows_R]
        return is_new

    def _pass(
        self, step: Computed, ids_T: torch.Tensor, vectors_TH: torch.Tensor, asks: Ints, drafts: dict[int, list[int]]
    ) -> tuple[list[int], torch.Tensor]:
        """Runs the head over vectors, and adds a guess to the drafts of each row of the step at `asks`, where the next
        pass finds it. Returns the rows that have got one, and the vectors behind them."""
        rows_R, begin_R, end_R = step.rows_R, step.begin_R, step.end_R
        lens_R = end_R - begin_R
        starts = np.zeros(len(rows_R) + 1, np.int64)
        np.cumsum(lens_R, out=starts[1:])
        rows_Q, arrays = rows_R[asks], StepArrays()
        sampling = self._draw.prepare(rows_Q, end_R[asks] + 1, arrays) if len(asks) else None
        wanted = starts[1:][asks] - 1
        step_rows = StepRows(rows_R, begin_R, end_R, starts, lens_R, wanted, rows_Q, None, None)
        tensors = self._rows.step(step_rows, arrays)
        batch = tensors.batch(lens_R.tolist(), end_R.tolist(), self._table.block_size)
        ids_T = self._platform.accelerator.to_device(ids_T)
        logits_QV, next_QH = self._head.forward(ids_T, vectors_TH, batch, self._kv.draft)
        if sampling is None:
            return [], next_QH
        got: dict[int, int] = {}
        for at, (row, token) in enumerate(
            zip(rows_Q.tolist(), self._draw.draw(sampling, self._of_model(logits_QV)), strict=True)
        ):
            if token is not None:
                drafts.setdefault(row, []).append(token)
                self._table.draft(row, drafts[row])
                got[row] = at
        return [*got], next_QH[[*got.values()]]

    def _of_model(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """Returns logits over the model's vocabulary; ids that the head does not know cannot be chosen."""
        if self._ids is None:
            return logits_QV
        whole_QV = logits_QV.new_full((len(logits_QV), self._vocab_size), float("-inf"))
        whole_QV[:, self._ids] = logits_QV
        return whole_QV
