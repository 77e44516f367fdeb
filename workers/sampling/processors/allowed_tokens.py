"""AllowedTokens: of a row with allowed_token_ids no other token can be chosen. See logits_processor.py."""

import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, SampledRows, known_ids


class AllowedTokens:
    """Per row a mask of the vocabulary, True where a token is forbidden: it is on the logits' device after its first
    step."""

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

    def apply(self, logits_SV: torch.Tensor, rows: SampledRows) -> None:
        for place, (row, _) in zip(rows.places_P.tolist(), rows, strict=True):
            if row not in self._on_device:
                self._rows[row] = rows.to_device(self._rows[row])
                self._on_device.add(row)
            logits_SV[place].masked_fill_(self._rows[row], FORBIDDEN)

    def free(self, row: int) -> None:
        del self._rows[row]
        self._on_device.discard(row)
