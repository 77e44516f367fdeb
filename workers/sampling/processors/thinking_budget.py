"""ThinkingBudgets: once a row has thought for as many tokens as it may, its end mark is preferred to anything else.

The preference is a finite bias: where a grammar behind it forbids the mark, as in the middle of a character, what the
grammar allows is chosen as ever, and the mark comes next. See logits_processor.py.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.kernels.sampling_rules import MARK_TOKENS, PREFERENCE
from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget, ThinkingSpan
from tandem.workers.sampling.processors.device_tokens import DeviceTokens, PlaceTokens
from tandem.workers.sampling.processors.logits_processor import Ids, Reads, SampledRows, Tokens
from tandem.workers.sampling.processors.row_edits import RowEdits

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

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        """The host reads up to where it has tokens, the device reads on."""
        own, spans = PlaceTokens(rows, tokens), []
        for row, prompt_len, read in zip(
            rows.rows_P.tolist(), own.prompt_len_P.tolist(), own.read_P.tolist(), strict=True
        ):
            known, _ = rows.history(row, read)
            spans.append((self._rows[row][0], self._caught_up(row, known[prompt_len:]), read))
        sent = rows.send(np.array([_numbers(*span, _longest(spans)) for span in spans], np.int64))

        def change(logits_SV: torch.Tensor) -> None:
            places_P = torch.arange(len(own.prompt_len_P), device=logits_SV.device)
            most = own.width - 1
            reader = DeviceSpans(lambda at_PM: own.at(places_P, at_PM.clamp(max=most)), own.positions_P, sent())
            for _ in range(own.most_unread):
                reader.read_on()
            is_over_P, ids_P = reader.preferred()
            at = own.places_P, ids_P
            values_P = logits_SV[at]
            logits_SV[at] = torch.where(is_over_P, values_P + PREFERENCE, values_P)

        return change

    def edits(self, row: int) -> RowEdits | None:
        """The span is a step's: span_of()."""
        budget, _ = self._rows[row]
        return RowEdits(thinks=True) if max(len(budget.start), len(budget.end)) <= MARK_TOKENS else None

    def span_of(self, row: int, output: Tokens, read: int) -> list[int]:
        """Returns the numbers of a row's thinking, as in sampling_rules.py. output: what the host has read of it, up to
        index `read` of the row's tokens."""
        return _numbers(self._rows[row][0], self._caught_up(row, output), read, MARK_TOKENS)

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


class DeviceSpans:
    """ThinkingSpan on a device, for P places at once, each from what the host has read of it. tokens_at: gives the
    tokens at indices of rows [P, M]. M tokens of the longest mark."""

    def __init__(
        self,
        tokens_at: Callable[[torch.Tensor], torch.Tensor],
        positions_P: torch.Tensor,
        numbers_PC: torch.Tensor,
    ) -> None:
        self._tokens_at = tokens_at
        columns_C = numbers_PC.T
        self._is_inside_P = columns_C[0] > 0
        self._tokens_P, self._open_P, self._budget_P, self._next_P, self._start_len_P, self._end_len_P = columns_C[1:7]
        self._starts_PM, self._ends_PM = numbers_PC[:, 7:].chunk(2, 1)
        self._positions_P = positions_P
        self._place_M = torch.arange(self._ends_PM.shape[1], device=numbers_PC.device)

    def read_on(self) -> None:
        """Reads the next token of each place that has one more."""
        is_more_P = self._next_P < self._positions_P
        self._next_P = self._next_P + is_more_P
        self._open_P = self._open_P + is_more_P
        self._tokens_P = self._tokens_P + (is_more_P & self._is_inside_P)
        mark_PM = torch.where(self._is_inside_P[:, None], self._ends_PM, self._starts_PM)
        len_P = torch.where(self._is_inside_P, self._end_len_P, self._start_len_P)
        is_mark_P = is_more_P & (self._open_P >= len_P) & self._ends_with(mark_PM, len_P)
        self._tokens_P = self._tokens_P - torch.where(is_mark_P & self._is_inside_P, self._end_len_P, 0)
        self._is_inside_P = self._is_inside_P ^ is_mark_P
        self._open_P = self._open_P.masked_fill(is_mark_P, 0)

    def preferred(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns whether the thinking is over its budget, and the next token of its end mark."""
        begun_P = torch.zeros_like(self._tokens_P)
        for size in range(1, self._ends_PM.shape[1]):
            size_P = torch.full_like(begun_P, size)
            fits_P = (size_P <= self._open_P) & (size_P < self._end_len_P)
            begun_P = torch.where(fits_P & self._ends_with(self._ends_PM, size_P), size_P, begun_P)
        is_over_P = self._is_inside_P & (self._tokens_P - begun_P >= self._budget_P)
        return is_over_P, self._ends_PM.gather(1, begun_P[:, None])[:, 0]

    def _ends_with(self, mark_PM: torch.Tensor, len_P: torch.Tensor) -> torch.Tensor:
        """Returns whether the tokens read so far end with the first ones of a mark; bool [P]."""
        columns_PM = (self._next_P - len_P)[:, None] + self._place_M
        found_PM = self._tokens_at(columns_PM)
        return ((found_PM == mark_PM) | (self._place_M >= len_P[:, None])).all(1)


def _longest(spans: list[tuple[ThinkingBudget, ThinkingSpan, int]]) -> int:
    return max(max(len(budget.start), len(budget.end)) for budget, _, _ in spans)


def _numbers(budget: ThinkingBudget, span: ThinkingSpan, read: int, longest: int) -> list[int]:
    """A row of DeviceSpans' numbers: what the host knows of a place, and the marks, as long as the longest of all."""
    marks = [[*mark, *[0] * (longest - len(mark))] for mark in (budget.start, budget.end)]
    known = (span.is_inside, span.tokens, span.num_open, budget.tokens, read, len(budget.start), len(budget.end))
    return [*map(int, known), *marks[0], *marks[1]]


def _new_span(budget: ThinkingBudget) -> ThinkingSpan:
    return ThinkingSpan(budget.start, budget.end, inside=budget.inside)


def _preferred(budget: ThinkingBudget, span: ThinkingSpan) -> Ids:
    """The next token of the end mark, if the thinking is over its budget. Tokens of a mark that has begun are none of
    the thinking."""
    if not span.is_inside:
        return NOTHING
    begun, token_id = span.next_of_end()
    return np.array([token_id], np.int64) if span.tokens - begun >= budget.tokens else NOTHING
