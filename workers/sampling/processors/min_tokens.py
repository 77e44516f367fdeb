"""MinTokens: stop tokens cannot be chosen while fewer than min_tokens are out. See logits_processor.py."""

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Ids, Reads, SampledRows, known_ids
from tandem.workers.sampling.processors.row_edits import RowEdits, TokenEdit


class MinTokens:
    """Per row the least number of output tokens, and the ids that end it."""

    reads = Reads.TOKENS  # their number

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[int, Ids]] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        if sampling.min_tokens <= 0:
            return False
        self._rows[row] = sampling.min_tokens, known_ids(sampling.stop_token_ids, self._vocab_size)
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        columns = []
        for row, position in rows:
            least, ids = self._rows[row]
            _, prompt_len = rows.history(row, position)
            columns.append(ids if position - prompt_len < least else ids[:0])
        return rows.forbid(columns)

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        ends_P = tokens.prompt_len_S[rows.places_P] + [self._rows[row][0] for row in rows.rows_P.tolist()]
        may_be_early_P = rows.positions_P < ends_P
        columns = [
            self._rows[row][1] if may_be else self._rows[row][1][:0]
            for row, may_be in zip(rows.rows_P.tolist(), may_be_early_P.tolist(), strict=True)
        ]
        if not any(map(len, columns)):
            return None
        at = rows.at(columns)
        ends = rows.send(np.repeat(ends_P, [len(ids) for ids in columns]))

        def change(logits_SV: torch.Tensor) -> None:
            places, ids = at()
            is_early = tokens.positions_S[places] < ends()
            logits_SV[places, ids] = logits_SV[places, ids].masked_fill_(is_early, FORBIDDEN)

        return change

    def edits(self, row: int) -> RowEdits:
        least, ids = self._rows[row]
        return RowEdits({token: TokenEdit(least_output=least) for token in ids.tolist()})

    def free(self, row: int) -> None:
        del self._rows[row]
