"""Penalties: repetition, frequency and presence, of the tokens that a row has. See logits_processor.py.

Repetition: every token of prompt or output; positive logits are divided by the penalty, others multiplied (CTRL, Keskar
et al. 2019). Then every token of the output: minus frequency times its count, minus presence (OpenAI's definition).
"""

from typing import NamedTuple

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import Reads, SampledRows
from tandem.workers.sampling.processors.token_counts import TokenCounts


class _Row(NamedTuple):
    """The three penalties of a row, and its tokens."""

    repetition: float
    frequency: float
    presence: float
    counts: TokenCounts


class Penalties:
    """Per row its penalties and the counts of its tokens, which catch up with the row at each step."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        repetition, frequency = sampling.repetition_penalty, sampling.frequency_penalty
        if repetition == 1.0 and not frequency and not sampling.presence_penalty:
            return False
        counts = TokenCounts(with_prompt=repetition != 1.0)
        self._rows[row] = _Row(repetition, frequency, sampling.presence_penalty, counts)
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
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
            return None
        repetition, frequency, presence = np.array(penalties, np.float32).T.repeat(lens, axis=1)
        count = np.concatenate(counted)
        factor = rows.send(repetition)
        less = rows.send(frequency * count + presence * (count > 0))
        at = rows.at(columns)

        def change(logits_SV: torch.Tensor) -> None:
            values = logits_SV[at()]
            logits_SV[at()] = torch.where(values > 0, values / factor(), values * factor()) - less()

        return change

    def free(self, row: int) -> None:
        del self._rows[row]
