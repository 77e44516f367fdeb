"""LogitsProcessor, the Protocol of what changes logits before a token is chosen, and SampledRows, what it is given.

Called by chain.py. P places of a step whose row needs the processor, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.messages.step import RowSampling

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
History = Callable[[int, int], tuple[Tokens, int]]
"""(row, position) to the row's tokens before that position, prompt first, and the length of the prompt."""
ToDevice = Callable[[torch.Tensor], torch.Tensor]
FORBIDDEN: Final = float("-inf")
"""The logit of a token that cannot be chosen."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The places of a step that a processor changes, int64 [P].

    places_P: rows of the logits. rows_P: rows of the row table. positions_P: index, in its sequence, of the token to
    choose. A row with drafts has several consecutive places, positions ascending; what history() gives for those after
    the first ends with drafts, which may be rejected. to_device copies a host tensor to the logits' device, ops are
    that device's operations.
    """

    places_P: Ids
    rows_P: Ids
    positions_P: Ids
    history: History
    to_device: ToDevice
    ops: SamplingOps

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Gives (row, position) for each place."""
        return zip(self.rows_P.tolist(), self.positions_P.tolist(), strict=True)

    def at(self, columns: Sequence[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns indices into the logits [S, V] of one group of token ids per place: int64, on the device."""
        places = self.places_P.repeat([len(ids) for ids in columns])
        return self.to_device(torch.from_numpy(places)), self.to_device(torch.from_numpy(np.concatenate(columns)))

    def forbid(self, logits_SV: torch.Tensor, columns: Sequence[Ids]) -> None:
        """Makes token ids, one group per place, impossible to choose."""
        if any(map(len, columns)):
            logits_SV[self.at(columns)] = FORBIDDEN


class LogitsProcessor(Protocol):
    """One kind of change of the logits, for all rows that ask for it. Keeps what it needs per row between bind and
    free; other rows cost nothing."""

    def bind(self, row: int, sampling: RowSampling) -> bool:
        """Returns whether this row needs the processor. The row is free."""
        ...

    def apply(self, logits_SV: torch.Tensor, rows: SampledRows) -> None:
        """Changes logits_SV (float32) in place, for rows whose bind returned True. What it does at a place is a
        function of that row's parameters and history alone."""
        ...

    def free(self, row: int) -> None:
        """Forgets a row whose bind returned True."""
        ...


def known_ids(token_ids: Sequence[int], vocab_size: int) -> Ids:
    """Returns the ids that the vocabulary holds, each once, ascending; others must not end the step."""
    ids = np.unique(np.asarray(token_ids, np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)]
