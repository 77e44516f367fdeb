"""LogitBias: a number added to the logits of the tokens that a row names. See logits_processor.py."""

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import Ids, Reads, SampledRows
from tandem.workers.sampling.processors.row_edits import RowEdits, TokenEdit


class LogitBias:
    """Per row its ids and what is added to each."""

    reads = Reads.NOTHING

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[Ids, npt.NDArray[np.float32]]] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        bias = {i: value for i, value in sampling.logit_bias if 0 <= i < self._vocab_size}
        if not bias:
            return False
        self._rows[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        held = [self._rows[row] for row, _ in rows]
        values = rows.send(np.concatenate([values for _, values in held]))
        at = rows.at([ids for ids, _ in held])

        def change(logits_SV: torch.Tensor) -> None:
            logits_SV[at()] = logits_SV[at()] + values()

        return change

    def edits(self, row: int) -> RowEdits:
        ids, values = self._rows[row]
        return RowEdits({token: TokenEdit(added) for token, added in zip(ids.tolist(), values.tolist(), strict=True)})

    def free(self, row: int) -> None:
        del self._rows[row]
