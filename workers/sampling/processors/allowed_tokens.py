"""AllowedTokens: of a row with allowed_token_ids no other token can be chosen. See logits_processor.py."""

import torch

from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Ids, SampledRows, known_ids


class AllowedTokens:
    """Per row its allowed ids."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, Ids] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        if sampling.allowed_token_ids is None:
            return False
        self._rows[row] = known_ids(sampling.allowed_token_ids, self._vocab_size)
        return True

    def apply(self, logits_SV: torch.Tensor, rows: SampledRows) -> None:
        at = rows.at([self._rows[row] for row, _ in rows])
        kept = logits_SV[at]
        logits_SV.index_fill_(0, rows.to_device(torch.from_numpy(rows.places_P)), FORBIDDEN)
        logits_SV[at] = kept

    def free(self, row: int) -> None:
        del self._rows[row]
