"""ThinkingBudgets: once a row has thought for as many tokens as it may, its end mark is preferred to anything else.

The preference is a finite bias: where a grammar behind it forbids the mark, as in the middle of a character, what the
grammar allows is chosen as ever, and the mark comes next. See logits_processor.py.
"""

from typing import Final

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget, ThinkingSpan
from tandem.workers.sampling.processors.logits_processor import Ids, Reads, SampledRows, Tokens

PREFERENCE: Final = 1e9
NOTHING: Final[Ids] = np.empty(0, np.int64)


class ThinkingBudgets:
    """Per row its budget, and what is known of its thinking: of tokens that no longer can be rejected."""

    reads = Reads.TOKENS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[ThinkingBudget, ThinkingSpan]] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        budget = sampling.thinking_budget
        if budget is None or not budget.start or not budget.end or max(budget.end) >= self._vocab_size:
            return False
        self._rows[row] = budget, _new_span(budget)
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        columns: list[Ids] = []
        last_row, span = -1, None
        for row, position in rows:
            tokens, prompt_len = rows.history(row, position)
            if row != last_row or span is None:
                span = self._caught_up(row, tokens[prompt_len:])
            else:  # a place behind a draft
                span = span.copy()
                span.add(tokens[prompt_len + span.seen :].tolist())
            last_row = row
            columns.append(_preferred(self._rows[row][0], span))
        if not any(map(len, columns)):
            return None
        at = rows.at(columns)

        def change(logits_SV: torch.Tensor) -> None:
            logits_SV[at()] += PREFERENCE

        return change

    def free(self, row: int) -> None:
        del self._rows[row]

    def _caught_up(self, row: int, output: Tokens) -> ThinkingSpan:
        """Fewer tokens than were seen mean that the last ones were taken back."""
        budget, span = self._rows[row]
        if len(output) < span.seen:
            span = _new_span(budget)
            self._rows[row] = budget, span
        span.add(output[span.seen :].tolist())
        return span


def _new_span(budget: ThinkingBudget) -> ThinkingSpan:
    return ThinkingSpan(budget.start, budget.end, inside=budget.inside)


def _preferred(budget: ThinkingBudget, span: ThinkingSpan) -> Ids:
    """The next token of the end mark, if the thinking is over its budget. Tokens of a mark that has begun are none of
    the thinking."""
    if not span.is_inside:
        return NOTHING
    begun, token_id = span.next_of_end()
    return np.array([token_id], np.int64) if span.tokens - begun >= budget.tokens else NOTHING
