"""ProcessorChain: the logits processors of a rank, in their fixed order, and which rows need which. Those that read
tokens late (Reads) change the logits behind all others.

Owned by sampling_table.py; applied by sampler.py. The order is vLLM's: what forbids tokens first, then
penalties; the grammar comes last. S rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from tandem.workers.kernels.sampling_ops import Change, SamplingOps
from tandem.workers.kernels.step_arrays import Send
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.allowed_tokens import AllowedTokens
from tandem.workers.sampling.processors.bad_words import BadWords
from tandem.workers.sampling.processors.device_tokens import DeviceTokens, ReadsOnDevice
from tandem.workers.sampling.processors.grammar import GrammarMask
from tandem.workers.sampling.processors.logit_bias import LogitBias
from tandem.workers.sampling.processors.logits_processor import (
    History,
    Ids,
    LogitsProcessor,
    Reads,
    SampledRows,
)
from tandem.workers.sampling.processors.min_tokens import MinTokens
from tandem.workers.sampling.processors.penalties import Penalties
from tandem.workers.sampling.processors.row_edits import HasRowEdits, RowEdits, together
from tandem.workers.sampling.processors.thinking_budget import ThinkingBudgets


def all_processors(
    vocab_size: int, grammars: GrammarMask | None = None, thinking: ThinkingBudgets | None = None
) -> list[LogitsProcessor]:
    """Returns every processor, in the order in which they change the logits. grammars: the one for grammars; None:
    one that knows none. thinking: the one for budgets of thinking."""
    return [
        MinTokens(vocab_size),
        AllowedTokens(vocab_size),
        BadWords(vocab_size),
        LogitBias(vocab_size),
        ThinkingBudgets(vocab_size) if thinking is None else thinking,
        Penalties(),
        GrammarMask(vocab_size, None) if grammars is None else grammars,
    ]


class ProcessorChain:
    """The processors, and a bit for each row and processor."""

    def __init__(self, processors: Sequence[LogitsProcessor], capacity: int) -> None:
        self._processors = processors
        self._on_device = [each if isinstance(each, ReadsOnDevice) else None for each in processors]
        waits = [
            each.reads == Reads.TOKENS and reader is None
            for each, reader in zip(processors, self._on_device, strict=True)
        ]
        self._waits = np.array(waits, np.bool_)
        self._reads = np.array([processor.reads for processor in processors], np.int64)
        self._needs = np.zeros((capacity, len(processors)), np.bool_)

    def bind(self, row: int, sampling: RowSampling) -> set[Reads]:
        """Replaces what the row held; returns what the processors read that have something to do for it; empty for
        none."""
        self.free(row)
        needs = [processor.bind(row, sampling) for processor in self._processors]
        self._needs[row] = needs
        return {processor.reads for processor, need in zip(self._processors, needs, strict=True) if need}

    def waits(self, row: int) -> bool:
        """True if some processor of the row reads its tokens on the host alone."""
        return bool((self._needs[row] & self._waits).any())

    def edits(self, row: int) -> RowEdits | None:
        """Returns what all processors of a row do together; None if some of it can be told in no numbers."""
        own = [self._processors[place] for place in np.flatnonzero(self._needs[row]).tolist()]
        return together(each.edits(row) if isinstance(each, HasRowEdits) else None for each in own)

    def free(self, row: int) -> None:
        """Forgets the row. Idempotent."""
        if self._needs[row].any():
            for place in np.flatnonzero(self._needs[row]).tolist():
                self._processors[place].free(row)
            self._needs[row] = False

    def grow(self, capacity: int) -> None:
        """Makes room for rows below `capacity`; rows keep what they hold."""
        self._needs = np.pad(self._needs, ((0, capacity - len(self._needs)), (0, 0)))

    def prepare(
        self,
        rows_S: Ids,
        positions_S: Ids,
        history: History,
        send: Send,
        ops: SamplingOps,
        *,
        late: bool,
        tokens: DeviceTokens | None = None,
    ) -> list[Change]:
        """Returns what changes the logits, in order. late: by the processors that read tokens late; else by all
        others. Arguments as for Sampling."""
        needs_SP = self._needs[rows_S]
        mine_P = needs_SP.any(axis=0) & ((self._reads == Reads.TOKENS_LATE) == late)
        changes = []
        for which in np.flatnonzero(mine_P).tolist():
            places = np.flatnonzero(needs_SP[:, which])
            rows = SampledRows(places, rows_S[places], positions_S[places], history, send, ops)
            reader = None if late or tokens is None else self._on_device[which]
            if reader is None or tokens is None:
                changes.append(self._processors[which].prepare(rows))
            else:
                changes.append(reader.prepare_on_device(rows, tokens))
        return [change for change in changes if change is not None]
