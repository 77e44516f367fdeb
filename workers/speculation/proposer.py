"""Proposer: guesses the next tokens of a row, which the model then checks in one step. Their list: proposers.py.

Called by workers/rank/drafts.py on every TP rank before a step's forward pass. A Guess does the same on the device.
Leviathan et al., "Fast inference from transformers via speculative decoding" (2023); the engine decides how many drafts
a row may have (drafting.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.platforms.device_rows import DeviceRows


class ProposalRow(NamedTuple):
    """A row that may have drafts. token_ids: int32 [L], its prompt and output so far; read only. max_drafts: the most
    drafts that it may have, at least 1."""

    row: int
    token_ids: npt.NDArray[np.int32]
    max_drafts: int


class Proposer(Protocol):
    """One way to guess. All TP ranks must guess the same: a guess is a function of the rows' tokens, or one rank tells
    the others."""

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        """Returns the drafts of each row, in the order of `rows`: 0 to max_drafts ids of the vocabulary, the next
        tokens in order. An empty list costs nothing."""
        ...


class GuessRow(NamedTuple):
    """A row that may have drafts, some of whose tokens the host may not have read. max_drafts: as of ProposalRow."""

    row: int
    max_drafts: int


@runtime_checkable
class GuessesAhead(Proposer, Protocol):
    """A proposer that also guesses on a device whose rows may be ahead of the host, reading nothing back. It gets the
    same calls on all TP ranks, and all of them get the same guesses."""

    def guess(self, rows: Sequence[GuessRow]) -> torch.Tensor:
        """Returns guesses of each row behind the tokens that the device knows, int64 [Q, D] there: the next tokens in
        order, D the most drafts of any row; NO_DRAFT from the first place on for which nothing is guessed."""
        ...


class EndedRow(NamedTuple):
    """A row that has ended. token_ids: int32 [L], its prompt and output, read only; prompt_len: those of the prompt."""

    token_ids: npt.NDArray[np.int32]
    prompt_len: int


@runtime_checkable
class LearnsOutputs(Proposer, Protocol):
    """A proposer that guesses by what other rows have said. All TP ranks tell it the same, in the same order."""

    def learn(self, rows: Sequence[EndedRow]) -> None:
        """Takes rows that have ended, or pause and will be bound again with what they have said."""
        ...


MakeProposer = Callable[[DeviceRows], Proposer]
"""Makes a rank's proposer over its rows."""
