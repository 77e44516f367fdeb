"""Penalties: repetition, frequency and presence, of the tokens that a row has. See logits_processor.py.

Repetition: every token of prompt or output; positive logits are divided by the penalty, others multiplied (CTRL, Keskar
et al. 2019). Then every token of the output: minus frequency times its count, minus presence (OpenAI's definition).
"""

from typing import Final, NamedTuple

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.device_tokens import DeviceTokens, PlaceTokens
from tandem.workers.sampling.processors.logits_processor import Reads, SampledRows
from tandem.workers.sampling.processors.row_edits import RowEdits
from tandem.workers.sampling.processors.token_counts import TokenCounts

PART: Final = 16
"""Places whose tokens are counted at once on a device, which bounds the memory: each takes some 33 bytes for a token of
the vocabulary, and 19 for one of its context."""


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

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        """Counts of all tokens are made anew in each step, from the tokens: a count that was kept would have to be
        taken back with rejected drafts, steps that fail and rows that are preempted."""
        penalties_3P = np.array([self._rows[row][:3] for row in rows.rows_P.tolist()], np.float32).T
        own, sent = PlaceTokens(rows, tokens), rows.send(np.ascontiguousarray(penalties_3P))
        repeats = bool((penalties_3P[0] != 1.0).any())

        def change(logits_SV: torch.Tensor) -> None:
            for start in range(0, len(rows.places_P), PART):
                part = slice(start, start + PART)
                _penalize(logits_SV, own, sent()[:, part, None], part, repeats=repeats)

        return change

    def edits(self, row: int) -> RowEdits:
        return RowEdits(penalties=self._rows[row][:3])

    def free(self, row: int) -> None:
        del self._rows[row]


def _penalize(
    logits_SV: torch.Tensor, own: PlaceTokens, penalties_3P1: torch.Tensor, part: slice, *, repeats: bool
) -> None:
    """Changes the logits of some places. repeats: some of them have a repetition penalty."""
    places_P, tokens_PL = own.places_P[part], own.tokens_PL(part).long()
    values_PV, ends = logits_SV[places_P], (own.prompts_P[part, None], own.positions_P[part, None])
    logits_SV[places_P] = penalize(values_PV, tokens_PL, *ends, *penalties_3P1, repeats=repeats)


def penalize(
    logits_PV: torch.Tensor,
    tokens_PL: torch.Tensor,
    prompts_P1: torch.Tensor,
    positions_P1: torch.Tensor,
    repetition_P1: torch.Tensor,
    frequency_P1: torch.Tensor,
    presence_P1: torch.Tensor,
    *,
    repeats: bool = True,
) -> torch.Tensor:
    """Changes logits in place, and returns them. tokens_PL: int64, prompt first, of which those before the position
    count."""
    count_PV = _counted(tokens_PL, prompts_P1, positions_P1, logits_PV.shape[1])
    if repeats:
        is_there_PV = _counted(tokens_PL, torch.zeros_like(prompts_P1), positions_P1, logits_PV.shape[1]) > 0
        factor_PV = torch.where(is_there_PV, repetition_P1, 1.0)
        logits_PV.copy_(torch.where(logits_PV > 0, logits_PV / factor_PV, logits_PV * factor_PV))
    less_PV = frequency_P1 * count_PV
    less_PV += presence_P1 * (count_PV > 0)
    return logits_PV.sub_(less_PV)


def _counted(tokens_PL: torch.Tensor, first_P1: torch.Tensor, end_P1: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns how often each token of the vocabulary occurs from index `first` to before `end`, float32 [P, V]."""
    place_L = torch.arange(tokens_PL.shape[1], device=tokens_PL.device)
    inside_PL = (place_L >= first_P1) & (place_L < end_P1)
    count_PV = torch.zeros(len(tokens_PL), vocab_size, device=tokens_PL.device)
    return count_PV.scatter_add_(1, tokens_PL, inside_PL.float())
