"""GrammarMask: of a row with a grammar only tokens that its grammar allows can be chosen. See logits_processor.py.

Last in the chain, as nothing may bring back what the grammar forbids. Masks are made on the host while the device
computes, in parallel where several rows have one. P places, W words of 32 bits, V vocabulary.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import GRAMMAR_FAILED, RowSampling
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Ids, Reads, SampledRows
from tandem.workers.sampling.processors.row_edits import RowEdits
from tandem.workers.structured.grammar_store import GrammarStore
from tandem.workers.structured.masks import ALLOWED, Bits, MaskWriter, allow
from tandem.workers.structured.row_grammar import Position, RowGrammar

MISSING = f"{GRAMMAR_FAILED}the rank that samples does not have it"
OFF_TRACK = f"{GRAMMAR_FAILED}the text so far does not follow it"


class GrammarMask:
    """Per row its place in its grammar. errors: why rows whose grammar has failed end, by row."""

    reads = Reads.TOKENS_LATE

    def __init__(self, vocab_size: int, grammars: GrammarStore | None) -> None:
        self.errors: dict[int, str] = {}
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._rows: dict[int, RowGrammar] = {}

    @cached_property
    def _masks(self) -> MaskWriter:
        """Made for the first step with a grammar."""
        return MaskWriter()

    def bind(self, row: int, sampling: RowSampling) -> bool:
        if sampling.grammar is None:
            return False
        start = None if self._grammars is None else self._grammars.start(sampling.grammar)
        if start is None or self._grammars is None:
            self.errors[row] = MISSING
        else:
            self._rows[row] = RowGrammar(start, self._grammars.end_ids(sampling.stop_token_ids))
        return True

    def free(self, row: int) -> None:
        self._rows.pop(row, None)
        self.errors.pop(row, None)

    def edits(self, row: int) -> RowEdits:
        return RowEdits(has_grammar=True)

    def prepare(self, rows: SampledRows) -> Change | None:
        bits_PW, may_end = self.masks(rows)
        keep = rows.ops.prepare_keep(rows.places_P, bits_PW, rows.send)
        return self._allowing_ends(keep, rows, may_end) if may_end else keep

    def end_of(self, row: int) -> int:
        """Returns the token by which a row's text ends where nothing else may follow."""
        return min(self._rows[row].end_ids)

    def masks(self, rows: SampledRows) -> tuple[Bits, list[int]]:
        """Returns the masks of all places, and which of these may end."""
        bits_PW = np.full((len(rows.places_P), self._num_words), ALLOWED, np.uint32)
        may_end: list[int] = []
        alone: list[tuple[RowGrammar, int, int]] = []
        for row, first, last in _runs(rows.rows_P):
            grammar = self._rows.get(row)
            if grammar is None:
                continue
            position = self._move(grammar, rows, row, first)
            if position is Position.ENDED:
                may_end += _only_ends(bits_PW, grammar, first, last)
            elif position is Position.OFF:
                self.errors[row] = OFF_TRACK if grammar.error() is None else f"{GRAMMAR_FAILED}{grammar.error()}"
            elif last - first == 1:
                alone.append((grammar, row, first))
            else:
                may_end += self._fill_run(bits_PW, grammar, rows, row, first, last)
        self._masks.fill(bits_PW, [(grammar.matcher, place) for grammar, _, place in alone], torch.get_num_threads())
        for grammar, row, place in alone:
            if self._settle(bits_PW, grammar, row, place):
                may_end.append(place)
        return bits_PW, may_end

    # ---- inside ----

    @staticmethod
    def _move(grammar: RowGrammar, rows: SampledRows, row: int, place: int) -> Position:
        tokens, prompt_len = rows.history(row, int(rows.positions_P[place]))
        return grammar.move_to(tokens[prompt_len:])

    def _fill_run(
        self, bits_PW: Bits, grammar: RowGrammar, rows: SampledRows, row: int, first: int, last: int
    ) -> list[int]:
        """The masks of a row with drafts, place by place; returns where it may end. Behind a draft that the grammar
        forbids nothing is sampled that counts; behind one that ends the text something is, if it goes on all the same
        (ignore_eos)."""
        may_end: list[int] = []
        for place in range(first, last):
            position = self._move(grammar, rows, row, place) if place > first else Position.OPEN
            if position is Position.ENDED:
                return [*may_end, *_only_ends(bits_PW, grammar, place, last)]
            if position is Position.OFF:
                break
            self._masks.fill(bits_PW, [(grammar.matcher, place)], 1)
            if self._settle(bits_PW, grammar, row, place):
                may_end.append(place)
            if row in self.errors:
                break
        return may_end

    def _settle(self, bits_PW: Bits, grammar: RowGrammar, row: int, place: int) -> bool:
        """Notes an error in making a mask; returns whether the text may end here, which its mask then allows."""
        if (error := grammar.error()) is not None:
            self.errors[row] = f"{GRAMMAR_FAILED}{error}"
            return False
        if not grammar.matcher.is_accepting():
            return False
        allow(bits_PW[place], grammar.end_ids)
        return True

    def _allowing_ends(self, keep: Change, rows: SampledRows, may_end: list[int]) -> Change:
        """Allow a text's end where it may end and nothing is left to choose, whatever else forbids it."""
        ends = [self.end_of(int(rows.rows_P[place])) for place in may_end]
        at, ids = rows.send(rows.places_P[may_end]), rows.send(np.array(ends, np.int64))

        def change(logits_SV: torch.Tensor) -> None:
            keep(logits_SV)
            is_stuck = logits_SV[at()].amax(dim=1) == FORBIDDEN
            logits_SV[at(), ids()] = torch.where(is_stuck, 0.0, logits_SV[at(), ids()])

        return change


def _only_ends(bits_PW: Bits, grammar: RowGrammar, first: int, last: int) -> range:
    """Allows nothing but the end at these places; returns them."""
    bits_PW[first:last] = 0
    for place in range(first, last):
        allow(bits_PW[place], grammar.end_ids)
    return range(first, last)


def _runs(rows_P: Ids) -> Iterator[tuple[int, int, int]]:
    """Yields (row, first place, place behind its last) of each row."""
    borders = [0, *(np.flatnonzero(np.diff(rows_P)) + 1).tolist(), len(rows_P)]
    for first, last in pairwise(borders):
        yield int(rows_P[first]), first, last
