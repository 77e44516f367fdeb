"""Penalties: repetition, frequency and presence, of the tokens that a row has. See logits_processor.py.

Repetition: every token of prompt or output; positive logits are divided by the penalty, others multiplied (CTRL, Keskar
et al. 2019). Then every token of the output: minus frequency times its count, minus presence (OpenAI's definition).
"""

from typing import NamedTuple

import numpy as np
import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import SampledRows
from tandem.workers.sampling.processors.token_counts import TokenCounts


class _Row(NamedTuple):
    """The three penalties of a row, and its tokens."""

    repetition: float
    frequency: float
    presence: float
    counts: TokenCounts


class Penalties:
    """Per row its penalties and the counts of its tokens, which catch up with the row at each step."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        repetition, frequency = sampling.repetition_penalty, sampling.frequency_penalty
        if repetition == 1.0 and not frequency and not sampling.presence_penalty:
            return False
        counts = TokenCounts(with_prompt=repetition != 1.0)
        self._rows[row] = _Row(repetition, frequency, sampling.presence_penalty, counts)
        return True

    def apply(self, logits_SV: torch.Tensor, rows: SampledRows) -> None:
        penalties, columns, counted, last = [], [], [], -1
        for row, position in rows:
            own = self._rows[row]
            tokens, prompt_len = rows.history(row, position)
            ids, counts = own.counts.with_drafts(tokens) if row == last else own.counts.catch_up(tokens, prompt_len)
            penalties.append(own[:3])
            columns.append(ids)
            counted.append(counts)
            last = row
        lens = [len(ids) for ids in columns]
        if not sum(lens):
            return
        repetition, frequency, presence = np.array(penalties, np.float32).T.repeat(lens, axis=1)
        count = np.concatenate(counted)
        factor = rows.to_device(torch.from_numpy(repetition))
        less = rows.to_device(torch.from_numpy(frequency * count + presence * (count > 0)))
        at = rows.at(columns)
        values = logits_SV[at]
        logits_SV[at] = torch.where(values > 0, values / factor, values * factor) - less

    def free(self, row: int) -> None:
        del self._rows[row]
