"""The sampling of a step, prepared from a row table. Called by model_runner.py and profiling.py. S sampled tokens."""

import numpy as np
import numpy.typing as npt

from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.kernels.step_arrays import Send
from tandem.workers.rank.batch import Prepare
from tandem.workers.rank.row_table import RowTable
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.sampling.sampling_table import READS_TOKENS

Ints = npt.NDArray[np.int64]


def preparing(table: RowTable, ops: SamplingOps, *, is_ahead: bool) -> Prepare:
    """Returns what prepares the sampling of a step of these rows. is_ahead: they live on a device that may be ahead of
    the table; logits processors then read tokens there."""

    def prepare(rows_S: Ints, positions_S: Ints, most_S: Ints, send: Send) -> Sampling:
        tokens = None
        if is_ahead and (table.sampling.flags[rows_S] & READS_TOKENS).any():
            read_S = table.num_known[rows_S] - table.num_unread[rows_S]
            tokens = DeviceTokens(table.prompt_len[rows_S], read_S, most_S)
        return Sampling(rows_S, positions_S, table.sampling, table.history, ops, send, is_ahead=is_ahead, tokens=tokens)

    return prepare
