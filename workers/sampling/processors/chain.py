"""ProcessorChain: the logits processors of a rank, in their fixed order, and which rows need which.

Owned by sampling_table.py; applied by sampler.py. The order is vLLM's: what forbids tokens first, then
penalties; the grammar comes last. S rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.allowed_tokens import AllowedTokens
from tandem.workers.sampling.processors.bad_words import BadWords
from tandem.workers.sampling.processors.grammar import GrammarMask
from tandem.workers.sampling.processors.logit_bias import LogitBias
from tandem.workers.sampling.processors.logits_processor import (
    History,
    Ids,
    LogitsProcessor,
    SampledRows,
    ToDevice,
)
from tandem.workers.sampling.processors.min_tokens import MinTokens
from tandem.workers.sampling.processors.penalties import Penalties
from tandem.workers.sampling.processors.thinking_budget import ThinkingBudgets


def all_processors(vocab_size: int, grammars: GrammarMask | None = None) -> list[LogitsProcessor]:
    """Returns every processor, in the order in which they are applied. grammars: the one for grammars; None: one that
    knows none."""
    return [
        MinTokens(vocab_size),
        AllowedTokens(vocab_size),
        BadWords(vocab_size),
        LogitBias(vocab_size),
        ThinkingBudgets(vocab_size),
        Penalties(),
        GrammarMask(vocab_size, None) if grammars is None else grammars,
    ]


class ProcessorChain:
    """The processors, and a bit for each row and processor."""

    def __init__(self, processors: Sequence[LogitsProcessor], capacity: int) -> None:
        self._processors = processors
        self._needs = np.zeros((capacity, len(processors)), np.bool_)

    def bind(self, row: int, sampling: RowSampling) -> bool:
        """Replaces what the row held; returns whether any processor has something to do for it."""
        self.free(row)
        needs = [processor.bind(row, sampling) for processor in self._processors]
        self._needs[row] = needs
        return any(needs)

    def free(self, row: int) -> None:
        """Forgets the row. Idempotent."""
        if self._needs[row].any():
            for place in np.flatnonzero(self._needs[row]).tolist():
                self._processors[place].free(row)
            self._needs[row] = False

    def grow(self, capacity: int) -> None:
        """Makes room for rows below `capacity`; rows keep what they hold."""
        self._needs = np.pad(self._needs, ((0, capacity - len(self._needs)), (0, 0)))

    def apply(
        self,
        logits_SV: torch.Tensor,
        rows_S: Ids,
        positions_S: Ids,
        history: History,
        to_device: ToDevice,
        ops: SamplingOps,
    ) -> None:
        """Changes logits_SV in place. Arguments as for sample()."""
        needs_SP = self._needs[rows_S]
        for which in np.flatnonzero(needs_SP.any(axis=0)).tolist():
            places = np.flatnonzero(needs_SP[:, which])
            rows = SampledRows(places, rows_S[places], positions_S[places], history, to_device, ops)
            self._processors[which].apply(logits_SV, rows)
