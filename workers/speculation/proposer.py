"""Proposer: guesses the next tokens of a row, which the model then checks in one step. PROPOSERS is their list.

Called by workers/rank/drafts.py on every TP rank before a step's forward pass. A Guess does the same on the device.
Leviathan et al., "Fast inference from transformers via speculative decoding" (2023); the engine decides how many drafts
a row may have (drafting.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.platforms.device_rows import DeviceRows, Guess
from tandem.workers.speculation.ngram import find_continuation


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


class NgramProposer:
    """Prompt lookup (Saxena 2023; vLLM's method "ngram"): the tokens that followed the last time that the row's last
    few tokens occurred in its prompt or output."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        self._shortest, self._longest = settings.lookup_range

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return [find_continuation(row.token_ids, self._shortest, self._longest, row.max_drafts) for row in rows]


MakeProposer = Callable[[DeviceRows], Proposer]
"""Makes a rank's proposer over its rows."""
PROPOSERS: dict[str, Callable[[SpeculativeSettings], Proposer]] = {"ngram": NgramProposer}
"""Proposers by the `method` of --speculative-config; those with a model are made by workers/rank/drafters."""


def _ngram_on_device(settings: SpeculativeSettings) -> Guess:
    from tandem.workers.speculation.ngram_on_device import NgramOnDevice

    return NgramOnDevice(settings)


GUESSES: dict[str, Callable[[SpeculativeSettings], Guess]] = {"ngram": _ngram_on_device}
"""The same on a device with memory of its own, for those methods that need not wait there for the step before."""


def make_guess(settings: SpeculativeSettings | None) -> Guess | None:
    """Returns the form of the proposer that runs on a device; None where there is none: then the host proposes."""
    make = None if settings is None else GUESSES.get(settings.method)
    return None if settings is None or make is None else make(settings)


def make_proposer(settings: SpeculativeSettings | None) -> Proposer | None:
    """Returns the proposer of --speculative-config where it needs no model; None without one."""
    return None if settings is None else PROPOSERS[settings.method](settings)
