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
    """Per row its place in its grammar. errors: why rows whose grammar has failed end, by row. behind_drafts: why it
    has failed behind drafts of the step, by place of it: that ends the row only if they are accepted."""

    reads = Reads.TOKENS_LATE

    def __init__(self, vocab_size: int, grammars: GrammarStore | None) -> None:
        self.errors: dict[int, str] = {}
        self.behind_drafts: dict[int, str] = {}
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
        own = None if self._grammars is None else self._grammars.row(sampling.grammar, sampling.stop_token_ids)
        if own is None:
            self.errors[row] = MISSING
        else:
            self._rows[row] = own
        return True

    def free(self, row: int) -> None:
        self._rows.pop(row, None)
        self.errors.pop(row, None)

    def take_behind_drafts(self) -> dict[int, str]:
        """Returns behind_drafts of the step that was prepared last, once."""
        taken, self.behind_drafts = self.behind_drafts, {}
        return taken

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
        self.behind_drafts = {}
        bits_PW = np.full((len(rows.places_P), self._num_words), ALLOWED, np.uint32)
        may_end: list[int] = []
        alone: list[tuple[RowGrammar, int, int]] = []
        for row, first, last in _runs(rows.rows_P):
            grammar = self._rows.get(row)
            if grammar is None:
                continue
            position = self._move(grammar, rows, row, first, follows=True)
            if position is Position.ENDED:
                may_end += _only_ends(bits_PW, grammar, first, last)
            elif position is Position.OFF:
                self.errors[row] = _why(grammar)
            elif last - first == 1:
                alone.append((grammar, row, first))
            else:
                may_end += self._fill_run(bits_PW, grammar, rows, row, first, last)
        self._masks.fill(bits_PW, [(grammar.matcher, place) for grammar, _, place in alone], torch.get_num_threads())
        for grammar, row, place in alone:
            if not self._is_filled(bits_PW, grammar, rows, row, place):
                self.errors[row] = _why(grammar)
            elif _allow_ends(bits_PW, grammar, place):
                may_end.append(place)
        return bits_PW, may_end

    # ---- inside ----

    @staticmethod
    def _move(grammar: RowGrammar, rows: SampledRows, row: int, place: int, *, follows: bool) -> Position:
        """Takes a row's grammar to a place. follows: what it shares may be at a limit if the text is none of its."""
        tokens, prompt_len = rows.history(row, int(rows.positions_P[place]))
        position = grammar.move_to(tokens[prompt_len:])
        if follows and position is Position.OFF:
            grammar.renew()
            position = grammar.move_to(tokens[prompt_len:])
        return position

    def _fill_run(
        self, bits_PW: Bits, grammar: RowGrammar, rows: SampledRows, row: int, first: int, last: int
    ) -> list[int]:
        """The masks of a row with drafts, place by place; returns where it may end. Behind a draft that the grammar
        forbids nothing is sampled that counts; behind one that ends the text something is, if it goes on all the same
        (ignore_eos). Where it fails behind drafts nothing can be chosen."""
        may_end: list[int] = []
        for place in range(first, last):
            position = Position.OPEN
            if place > first:
                follows = _is_allowed(bits_PW[place - 1], rows, row, place)
                position = self._move(grammar, rows, row, place, follows=follows)
                if position is Position.ENDED:
                    return [*may_end, *_only_ends(bits_PW, grammar, place, last)]
                if not follows:
                    break
            is_open = position is Position.OPEN
            if is_open:
                self._masks.fill(bits_PW, [(grammar.matcher, place)], 1)
            if not (is_open and self._is_filled(bits_PW, grammar, rows, row, place)):
                self._fail(bits_PW, grammar, rows, row, place, is_first=place == first)
                break
            if _allow_ends(bits_PW, grammar, place):
                may_end.append(place)
        return may_end

    def _is_filled(self, bits_PW: Bits, grammar: RowGrammar, rows: SampledRows, row: int, place: int) -> bool:
        """Returns whether the mask that was made for a place is right, if need be after making it again by a matcher
        that shares nothing."""
        if grammar.is_at_limit:
            grammar.renew()
            if self._move(grammar, rows, row, place, follows=False) is Position.OPEN:
                self._masks.fill(bits_PW, [(grammar.matcher, place)], 1)
        return grammar.error() is None

    def _fail(
        self, bits_PW: Bits, grammar: RowGrammar, rows: SampledRows, row: int, place: int, *, is_first: bool
    ) -> None:
        """Notes why a row fails at a place, its first one or one behind drafts."""
        if is_first:
            self.errors[row] = _why(grammar)
        else:
            bits_PW[place] = 0
            self.behind_drafts[int(rows.places_P[place])] = _why(grammar)

    def _allowing_ends(self, keep: Change, rows: SampledRows, may_end: list[int]) -> Change:
        """Allow a text's end where it may end and nothing is left to choose, whatever else forbids it."""
        ends = [self.end_of(int(rows.rows_P[place])) for place in may_end]
        at, ids = rows.send(rows.places_P[may_end]), rows.send(np.array(ends, np.int64))

        def change(logits_SV: torch.Tensor) -> None:
            keep(logits_SV)
            is_stuck = logits_SV[at()].amax(dim=1) == FORBIDDEN
            logits_SV[at(), ids()] = torch.where(is_stuck, 0.0, logits_SV[at(), ids()])

        return change


def _why(grammar: RowGrammar) -> str:
    error = grammar.error()
    return OFF_TRACK if error is None else f"{GRAMMAR_FAILED}{error}"


def _is_allowed(bits_W: Bits, rows: SampledRows, row: int, place: int) -> bool:
    """Returns whether a mask allows the draft ahead of a place."""
    tokens, _ = rows.history(row, int(rows.positions_P[place]))
    token = int(tokens[-1])
    return bool(bits_W[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def _allow_ends(bits_PW: Bits, grammar: RowGrammar, place: int) -> bool:
    """Returns whether the text may end at a place, which its mask then allows."""
    if grammar.matcher.is_accepting():
        allow(bits_PW[place], grammar.end_ids)
        return True
    return False


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
