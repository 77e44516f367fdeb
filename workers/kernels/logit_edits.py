"""LogitEdits: what logits processors change where a captured step holds it, as numbers by place of the step.

    forbidden  = position < until                        until: a number of tokens of the row, prompt included
    logit      = -inf if forbidden else logit + added    for each entry (place, id); none is there twice
    penalties  as in sampling/processors/penalties.py, of the tokens ahead of the position

Made by sampling/sampling_table.py; carried out in triton/sampling. S places, E entries, N rows, L tokens.
"""

from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from tandem.workers.kernels.step_arrays import Array

T = TypeVar("T")
ALWAYS: Final = 2**31 - 1
"""A position that none reaches."""


class LogitEdits(NamedTuple, Generic[T]):
    """The numbers, on the host or on the device."""

    repetition_S: T  # float32, as the two below; 1, 0 and 0 where a row has no penalty
    frequency_S: T
    presence_S: T
    prompt_S: T  # int64: the tokens of the prompt
    place_E: T  # int32, as the two below; below 0 for an entry that is none
    id_E: T
    until_E: T
    added_E: T  # float32


FILLS: Final = LogitEdits(1.0, 0.0, 0.0, 0, -1, 0, 0, 0.0)
"""Numbers that change nothing: they stand in the room behind those of a step."""
DTYPES: Final = LogitEdits(np.float32, np.float32, np.float32, np.int64, np.int32, np.int32, np.int32, np.float32)
"""Types of the arrays."""
NO_EDITS: Final = LogitEdits[Array](*(np.empty(0, dtype) for dtype in DTYPES))


class RowTokens(NamedTuple):
    """The tokens of all rows on the device, int32 [N, L]; the row of each place and the index of the token that is
    chosen there, int64 [S]."""

    tokens_NL: torch.Tensor
    rows_S: torch.Tensor
    positions_S: torch.Tensor
