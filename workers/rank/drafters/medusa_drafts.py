"""MedusaDrafts: guesses of Medusa's heads, all places of a row from what the model has behind its last computed token.

The heads keep nothing of a row: one whose last token the step before has not computed has no guesses in this one.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.decoder import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows
from tandem.workers.rank.drafters.guess_draw import DraftRows, GuessDraw
from tandem.workers.rank.drafters.medusa_heads import MedusaHeads
from tandem.workers.rank.drafters.no_memory import unless_full
from tandem.workers.rank.drafters.step_record import DecodedStep, StepRecord
from tandem.workers.speculation.proposer import ProposalRow

Normed = Callable[[Heard, torch.Tensor], torch.Tensor]
"""Returns the hidden states [S, H] after the model's final norm at indices S of a step's tokens."""


class MedusaDrafts:
    """A Proposer that ReadsSteps. table, rows: of the model's runner; most: heads."""

    def __init__(
        self, heads: MedusaHeads, most: int, normed: Normed, table: DraftRows, rows: DeviceRows, platform: Platform
    ) -> None:
        self._heads, self._most, self._normed = heads, most, normed
        self._table, self._rows, self._platform = table, rows, platform
        self._draw, self._record = GuessDraw(table, platform), StepRecord(table)

    def read(self, step: DecodedStep) -> None:
        self._record.keep(step)

    def catch_up(self) -> None:
        """There is nothing to keep up with."""

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return unless_full(lambda: self._guesses(rows), [()] * len(rows))

    # ---- inside ----

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        drafts: dict[int, list[int]] = {row.row: [] for row in rows}
        kept = self._record.take()
        if kept is None:
            return [()] * len(rows)
        computed, heard = kept
        ends = dict(zip(computed.rows_R.tolist(), computed.end_R.tolist(), strict=True))
        own = [row for row in rows if ends.get(row.row) == len(row.token_ids) - 1]
        last = dict(
            zip(
                computed.rows_R.tolist(),
                (computed.first_R + computed.end_R - computed.begin_R - 1).tolist(),
                strict=True,
            )
        )
        at_S = torch.tensor([last[row.row] for row in own], dtype=torch.int64)
        hidden_SH = self._normed(heard, self._platform.accelerator.to_device(at_S))
        going = list(range(len(own)))
        for place in range(self._most):
            going = [at for at in going if own[at].max_drafts > place]
            if not going:
                break
            going = self._guess(place, [own[at] for at in going], going, hidden_SH, drafts)
        return [drafts[row.row] for row in rows]

    def _guess(
        self, place: int, rows: list[ProposalRow], at: list[int], hidden_SH: torch.Tensor, drafts: dict[int, list[int]]
    ) -> list[int]:
        """Adds a guess to the drafts of rows; returns those of `at`, the rows' places in hidden_SH, that have got
        one."""
        arrays = StepArrays()
        numbers = np.array([row.row for row in rows], np.int64)
        positions = np.array([len(row.token_ids) + place for row in rows], np.int64)
        sampling = self._draw.prepare(numbers, positions, arrays)
        self._rows.send_late(arrays)
        found = self._draw.draw(sampling, self._heads.logits(hidden_SH[at], place))
        got = []
        for index, row, token in zip(at, rows, found, strict=True):
            if token is not None:
                drafts[row.row].append(token)
                self._table.draft(row.row, drafts[row.row])
                got.append(index)
        return got
