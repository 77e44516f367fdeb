"""GuessDraw: draws guesses from a draft's logits as the model's tokens will be drawn at the same positions.

By each row's own parameters, and by the same noise (kernels/gumbel_noise.py). Q rows with a guess, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import Columns
from tandem.workers.sampling.processors.logits_processor import Tokens
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.sampling.sampling_table import SamplingTable

Ints = npt.NDArray[np.int64]


class DraftRows(Columns, Protocol):
    """The rows of a rank (workers/rank/row_table.py), as a drafter reads them. num_computed: tokens of each that the
    model has computed."""

    sampling: SamplingTable
    num_computed: Ints

    def history(self, row: int, position: int) -> tuple[Tokens, int]: ...

    def draft(self, row: int, token_ids: Sequence[int]) -> None: ...


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

    def draw(self, sampling: Sampling, logits_QV: torch.Tensor) -> list[int | None]:
        """Returns the guesses, None where nothing can be chosen: logits are not finite, or all is forbidden. Waits for
        the device. logits_QV: float32, overwritten."""
        drawn = sampling.draw(logits_QV, self._platform.accelerator)
        self._platform.accelerator.event().wait()
        is_finite = np.isfinite(drawn.best_S.numpy()).tolist()
        return [token if is_one else None for token, is_one in zip(drawn.host_ids_S.tolist(), is_finite, strict=True)]
