"""AllowedTokens: of a row with allowed_token_ids no other token can be chosen. See logits_processor.py."""

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.kernels.step_arrays import Sent
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Reads, SampledRows, known_ids
from tandem.workers.sampling.processors.row_edits import RowEdits


class AllowedTokens:
    """Per row a mask of the vocabulary, True where a token is forbidden: it is on the logits' device after its first
    step, and on the host until then."""

    reads = Reads.NOTHING

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, torch.Tensor] = {}
        self._on_device: set[int] = set()

    def bind(self, row: int, sampling: RowSampling) -> bool:
        if sampling.allowed_token_ids is None:
            return False
        mask_V = torch.ones(self._vocab_size, dtype=torch.bool)
        mask_V[torch.from_numpy(known_ids(sampling.allowed_token_ids, self._vocab_size))] = False
        self._rows[row] = mask_V
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        numbers, places = rows.rows_P.tolist(), rows.places_P.tolist()
        unsent = sorted(set(numbers) - self._on_device)
        new = {row: rows.send(self._rows[row].numpy().view(np.uint8)) for row in unsent}

        def change(logits_SV: torch.Tensor) -> None:
            self._take(new)
            for place, row in zip(places, numbers, strict=True):
                logits_SV[place].masked_fill_(self._rows[row], FORBIDDEN)

        return change

    def edits(self, row: int) -> RowEdits:
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        allowed[: self._vocab_size] = ~self._rows[row].numpy()
        return RowEdits(allowed=np.packbits(allowed, bitorder="little").view(np.int32))

    def free(self, row: int) -> None:
        del self._rows[row]
        self._on_device.discard(row)

    def _take(self, new: dict[int, Sent]) -> None:
        """Keeps the masks that have come with this step."""
        for row, mask in new.items():
            self._rows[row] = mask().bool()
            self._on_device.add(row)
