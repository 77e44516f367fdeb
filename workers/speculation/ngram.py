"""Search for an earlier occurrence of a sequence's last tokens. Called by proposer.py. L tokens of the sequence."""

import numpy as np
import numpy.typing as npt


def find_continuation(token_ids: npt.NDArray[np.int32], shortest: int, longest: int, max_tokens: int) -> list[int]:
    """Returns up to max_tokens tokens that followed an earlier occurrence of the last `longest` tokens of token_ids
    (int32 [L]), or of as many of them as occur, at least `shortest`; [] if there is none.

    Of several such places it takes the latest that has max_tokens behind it, else the earliest, which has most. O(L).
    """
    last = len(token_ids) - 1
    ends = np.flatnonzero(token_ids[:last] == token_ids[last]) if last > 0 else np.empty(0, np.int64)
    length = 1 if len(ends) else 0
    while length and length < longest:
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < shortest:
        return []
    whole = ends[ends + max_tokens <= last]
    end = int(whole[-1] if len(whole) else ends[0])
    return [int(token) for token in token_ids[end + 1 : end + 1 + max_tokens]]
