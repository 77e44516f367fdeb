"""StepRules: the rules of a step's places as numbers (kernels/sampling_rules.py), from what their rows ask.

Made by sampling_table.py before the step; the masks of grammars come later, when the tokens before are known. S places,
W words of a mask, I integers.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tandem.workers.kernels.sampling_rules import (
    END,
    HEADER,
    KEPT,
    MASK,
    NAMED,
    THINKING,
    TOP,
    WORDS,
    SamplingRules,
)
from tandem.workers.kernels.step_arrays import Array
from tandem.workers.sampling.processors.row_edits import RowEdits
from tandem.workers.structured.masks import ALLOWED, Bits

Ints = npt.NDArray[np.int64]
EVERYTHING: Final = np.array([ALLOWED], np.uint32).view(np.int32)


@dataclass(frozen=True, slots=True)
class AskedRow:
    """The rules of one row. edits: None without any; span: its numbers, where it thinks by a budget. num_top: how many
    best tokens it wants to know of, -1 without log probabilities; named_ids: whose it wants in their place."""

    edits: RowEdits | None
    span: list[int] | None
    num_top: int
    named_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class StepRules:
    """The numbers. wanted: by place, of those with log probabilities, how many best tokens or which ids. masks: by
    place, of those with a grammar, where its mask begins. num_kept: places that keep their logits."""

    begin_S: npt.NDArray[np.int32]
    numbers_I: npt.NDArray[np.int32]
    wanted: dict[int, int | list[int]]
    masks: dict[int, int]
    num_kept: int

    def mask(self, places: list[int], bits_PW: Bits, ends: dict[int, int]) -> None:
        """Adds the masks of grammars, of these places in order; ends: by place, the tokens by which texts may end."""
        for place, bits_W in zip(places, bits_PW.view(np.int32), strict=True):
            self.numbers_I[self.masks[place] :][: len(bits_W)] &= bits_W
            self.numbers_I[self.begin_S[place] + END] = ends.get(place, -1)

    @property
    def arrays(self) -> SamplingRules[Array]:
        return SamplingRules[Array](self.begin_S, self.numbers_I)


class _Numbers:
    """Integers one behind the other."""

    def __init__(self) -> None:
        self.parts: list[npt.NDArray[np.int32]] = []
        self.size = 0

    def add(self, part: npt.NDArray[np.int32]) -> int:
        """Returns where it begins."""
        self.parts.append(part)
        self.size += len(part)
        return self.size - len(part)


def step_rules(asked_S: list[AskedRow | None], rows_S: list[int], num_words: int) -> StepRules:
    """Returns the rules of a step's places; None: of a row without any. num_words: of a mask. A row's places share what
    does not change between them."""
    numbers, shared = _Numbers(), dict[int, list[int]]()
    begin_S, headers = np.full(len(asked_S), -1, np.int32), list[npt.NDArray[np.int32]]()
    wanted, masks, num_kept = dict[int, int | list[int]](), dict[int, int](), 0
    for place, (asked, row) in enumerate(zip(asked_S, rows_S, strict=True)):
        if asked is None:
            continue
        if row not in shared:
            shared[row] = _row_numbers(asked, numbers)
        header = np.array(shared[row], np.int32)
        edits = asked.edits
        if edits is not None and edits.has_grammar:
            own = np.repeat(EVERYTHING, num_words) if edits.allowed is None else edits.allowed.copy()
            header[MASK] = masks[place] = numbers.add(own)
        if asked.num_top >= 0:
            wanted[place] = asked.num_top if asked.named_ids is None else asked.named_ids
            if edits is not None:
                header[KEPT], num_kept = num_kept, num_kept + 1
        headers.append(header)
        begin_S[place] = HEADER * (len(headers) - 1)
    first = HEADER * len(headers)
    for header in headers:  # they stand before all others
        header[:TOP] += np.where(header[:TOP] >= 0, first, 0)
    masks = {place: begin + first for place, begin in masks.items()}
    return StepRules(begin_S, np.concatenate([*headers, *numbers.parts]), wanted, masks, num_kept)


def _row_numbers(asked: AskedRow, numbers: _Numbers) -> list[int]:
    """Returns a header of what all places of a row share, and adds what it refers to."""
    header, edits = [-1] * HEADER, asked.edits
    header[TOP] = asked.num_top
    if asked.named_ids is not None:
        header[NAMED] = numbers.add(np.array([len(asked.named_ids), *asked.named_ids], np.int32))
    if asked.span is not None:
        header[THINKING] = numbers.add(np.array(asked.span, np.int32))
    if edits is not None and edits.words is not None:
        count = np.array([len(edits.words)], np.int32)
        header[WORDS] = numbers.add(np.concatenate([count, edits.words.reshape(-1)]))
    if edits is not None and edits.allowed is not None and not edits.has_grammar:
        header[MASK] = numbers.add(edits.allowed)
    return header
