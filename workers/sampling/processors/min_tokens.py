"""MinTokens: stop tokens cannot be chosen while fewer than min_tokens are out. See logits_processor.py."""

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import Ids, Reads, SampledRows, known_ids


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

    def free(self, row: int) -> None:
        del self._rows[row]
