"""GuessDraw: draws guesses from a draft's logits as the model's tokens will be drawn at the same positions.

By each row's own parameters, and by the same noise (kernels/gumbel_noise.py): for the host, which waits for them, or on
a device that is ahead of it. A drafter that runs out of device memory (unless_full) says nothing in that step, and the
step goes on without it. Q rows with a guess, V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NO_DRAFT, Columns, PassedRows
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.processors.logits_processor import Tokens
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.sampling.sampling_table import READS_TOKENS, SamplingTable
from tandem.workers.speculation.proposer import GuessRow

Ints = npt.NDArray[np.int64]
Said = TypeVar("Said")
log = logging.getLogger(__name__)


def unless_full(call: Callable[[], Said], nothing: Said) -> Said:
    """Returns what the call does; `nothing`, with a warning, where the device is out of memory. Peers wait for it."""
    try:
        return call()
    except torch.OutOfMemoryError as error:
        log.warning("no drafts in this step: %s", error)
    return nothing


class DraftRows(Columns, Protocol):
    """The rows of a rank (workers/rank/row_table.py), as a drafter reads them. num_computed: tokens of each that the
    model has computed."""

    sampling: SamplingTable
    num_computed: Ints
    prompt_len: Ints
    max_accepted: Ints

    def history(self, row: int, position: int) -> tuple[Tokens, int]: ...

    def draft(self, row: int, token_ids: Sequence[int]) -> None: ...


class GuessRoom:
    """Memory of the device for what ranks say in place of guesses, or tell each other of them, held from the start on:
    a step without memory for guesses has none for these either, and its peers wait. rows, most: rows, and drafts of
    each, at most. What a call returns lasts until the next one."""

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self._ids = torch.zeros(rows * (1 + most), dtype=torch.int64, device=device)

    def filled(self, rows: Sequence[GuessRow], token: int) -> torch.Tensor:
        """Returns that token in place of all guesses of rows [Q, D], as GuessesAhead.guess() does."""
        return self._of((len(rows), max(row.max_drafts for row in rows))).fill_(token)

    def copied(self, host: torch.Tensor) -> torch.Tensor:
        """Returns what is on the host, int64, on the device."""
        return self._of(host.shape).copy_(host)

    def _of(self, shape: Sequence[int]) -> torch.Tensor:
        count = math.prod(shape)
        if count > len(self._ids):
            self._ids = self._ids.new_zeros(count)  # rows beyond the settings' are rare
        return self._ids[:count].view(*shape)


class DraftBlocks(Protocol):
    """The cache of a rank (workers/rank/kv_cache.py): the planes of its draft, and how many tokens of each block that
    has read."""

    @property
    def draft(self) -> KVTensors: ...

    @property
    def drafted(self) -> npt.NDArray[np.int32]: ...


class GuessDraw:
    """The draws of one rank. table: its rows."""

    def __init__(self, table: DraftRows, platform: Platform) -> None:
        self._table, self._platform, self._ops = table, platform, platform.sampling_ops()

    def prepare(self, rows_Q: Ints, positions_Q: Ints, arrays: StepArrays) -> Sampling:
        """Returns the choice of one guess for each row. positions_Q: the guesses' indices in their rows, whose tokens
        ahead of these are known or guessed; arrays: of the pass, which the choice adds to."""
        table = self._table
        sampling = Sampling(rows_Q, positions_Q, table.sampling, table.history, self._ops, arrays.send, reports=False)
        if sampling.prepares_late:
            errors = table.sampling.grammars.errors
            known = dict(errors)
            sampling.prepare_late(arrays.send)
            errors.clear()  # a grammar that fails behind a guess has not failed the row
            errors.update(known)
        return sampling

    def prepare_ahead(self, rows_Q: Ints, place: int, arrays: StepArrays) -> Sampling:
        """Returns the same for a device that is ahead of the host, so many places behind each row's known tokens. No
        row has a logits processor that reads tokens on the host."""
        table, tokens = self._table, None
        least_Q = table.num_known[rows_Q] + place
        if (table.sampling.flags[rows_Q] & READS_TOKENS).any():
            read_Q = table.num_known[rows_Q] - table.num_unread[rows_Q]
            tokens = DeviceTokens(table.prompt_len[rows_Q], read_Q, least_Q + table.max_accepted[rows_Q])
        given = (rows_Q, least_Q, table.sampling, table.history, self._ops, arrays.send)
        return Sampling(*given, is_ahead=True, tokens=tokens, reports=False)

    def draw(self, sampling: Sampling, logits_QV: torch.Tensor) -> list[int | None]:
        """Returns the guesses, None where nothing can be chosen: logits are not finite, or all is forbidden. Waits for
        the device. logits_QV: float32, overwritten."""
        drawn = sampling.draw(logits_QV, self._platform.accelerator)
        self._platform.accelerator.event().wait()
        is_finite = np.isfinite(drawn.best_S.numpy()).tolist()
        return [token if is_one else None for token, is_one in zip(drawn.host_ids_S.tolist(), is_finite, strict=True)]


class AheadGuesses:
    """The guesses of a step on a device that is ahead of the host, of A asked rows with D drafts at most: ids_AD,
    int64, NO_DRAFT from the first place on for which there is none. rows: where guesses are noted behind the known
    tokens, so that the next pass and the logits processors find them."""

    def __init__(self, rows: PassedRows, num_rows: int, most: int) -> None:
        self._rows = rows
        self.ids_AD = rows.tokens.new_full((num_rows, most), NO_DRAFT, dtype=torch.int64)

    def draw(
        self,
        sampling: Sampling,
        logits_QV: torch.Tensor,
        positions_Q: torch.Tensor,
        place: int,
        rows_Q: torch.Tensor,
        at_Q: torch.Tensor,
    ) -> torch.Tensor:
        """Draws those at a place, none behind none and where nothing can be chosen, as logits are not finite or all is
        forbidden; returns them. logits_QV: float32, overwritten; positions_Q: of the guesses in their rows; at_Q: the
        rows among those that were asked."""
        best_Q, ids_Q = sampling.choose(logits_QV, positions_Q, self._rows.tokens)
        ids_Q = torch.where(torch.isfinite(best_Q), ids_Q, NO_DRAFT)
        if place:
            ids_Q = torch.where(self.ids_AD[at_Q, place - 1] < 0, NO_DRAFT, ids_Q)
        self.ids_AD[at_Q, place] = ids_Q
        self._rows.note_guesses(rows_Q, place, ids_Q)
        return ids_Q
