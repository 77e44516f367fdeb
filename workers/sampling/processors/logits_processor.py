"""LogitsProcessor, the Protocol of what changes logits before a token is chosen, and SampledRows, what it is given.

Called by chain.py. P places of a step whose row needs the processor, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.sampling_ops import Change, SamplingOps
from tandem.workers.kernels.step_arrays import Send
from tandem.workers.messages.step import RowSampling

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
History = Callable[[int, int], tuple[Tokens, int]]
"""(row, position) to the row's tokens before that position, prompt first, and the length of the prompt."""
FORBIDDEN: Final = float("-inf")
"""The logit of a token that cannot be chosen."""
At = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives indices into logits [S, V], int64 on their device, once the step's arrays have arrived."""


class Reads(IntEnum):
    """The tokens that a processor reads of a row, and so when it prepares its part of a step that is launched while the
    one before is computed. NOTHING: parameters alone, so it waits for nothing. TOKENS: the row's tokens, on the device
    if it can (ReadsOnDevice in device_tokens.py); else the step before is read first. TOKENS_LATE: the same behind the
    forward pass, which is given to the device meanwhile: what it prepares takes long, and goes to the device in a copy
    of its own."""

    NOTHING = 0
    TOKENS = 1
    TOKENS_LATE = 2


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The places of a step that a processor changes, int64 [P]. A row with drafts has several consecutive places,
    positions ascending; what history() gives for those after the first ends with drafts, which may be rejected."""

    places_P: Ids  # rows of the logits
    rows_P: Ids  # rows of the row table
    positions_P: Ids  # index, in its sequence, of the token to choose
    history: History
    send: Send  # puts an array of the host among those that the step's one copy takes to the logits' device
    ops: SamplingOps  # that device's operations

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Gives (row, position) for each place."""
        return zip(self.rows_P.tolist(), self.positions_P.tolist(), strict=True)

    def at(self, columns: Sequence[Ids]) -> At:
        """Sends indices into the logits [S, V] of one group of token ids per place."""
        places = self.send(self.places_P.repeat([len(ids) for ids in columns]))
        ids = self.send(np.concatenate(columns))
        return lambda: (places(), ids())

    def forbid(self, columns: Sequence[Ids]) -> Change | None:
        """Returns what makes token ids, one group per place, impossible to choose."""
        if not any(map(len, columns)):
            return None
        at = self.at(columns)

        def change(logits_SV: torch.Tensor) -> None:
            logits_SV[at()] = FORBIDDEN

        return change


class LogitsProcessor(Protocol):
    """One kind of change of the logits, for all rows that ask for it. Keeps what it needs per row between bind and
    free; other rows cost nothing. reads: what of a row's state its prepare() looks at."""

    reads: Reads

    def bind(self, row: int, sampling: RowSampling) -> bool:
        """Returns whether this row needs the processor. The row is free."""
        ...

    def prepare(self, rows: SampledRows) -> Change | None:
        """Returns what changes the logits of rows whose bind returned True, None for nothing. It runs on the host
        before there are logits, and sends what the change needs. What becomes of a place is a function of that row's
        parameters and history alone."""
        ...

    def free(self, row: int) -> None:
        """Forgets a row whose bind returned True."""
        ...


def known_ids(token_ids: Sequence[int], vocab_size: int) -> Ids:
    """Returns the ids that the vocabulary holds, each once, ascending; others must not end the step."""
    ids = np.unique(np.asarray(token_ids, np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)]
