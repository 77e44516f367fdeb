"""SamplingTable: each row's sampling parameters as columns of numpy arrays, so that a step reads them at once.

Written when a row is bound, read by sampler.py every step. Owns the chain of logits processors; holds no tokens and no
tensors. What a request could send to break a step (ids outside the vocabulary) is dropped here and by the processors.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tandem.workers.kernels.sampling_ops import Draws
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.chain import ProcessorChain, all_processors
from tandem.workers.sampling.processors.grammar import GrammarMask
from tandem.workers.sampling.processors.logits_processor import LogitsProcessor, Reads
from tandem.workers.structured.grammar_store import GrammarStore

Ints = npt.NDArray[np.int64]
RANDOM: Final = 1  # temperature above 0
EDITS: Final = 2  # some logits processor changes the logits before the choice
LOGPROBS: Final = 4
READS_TOKENS: Final = 8  # some logits processor reads the row's tokens before the forward pass
READS_LATE: Final = 16  # and some behind it
READS_ON_HOST: Final = 32  # some of those before it cannot read them on a device
GREEDY_BELOW: Final = 1e-5  # as in vLLM: a temperature this small is greedy


COLUMNS: Final = ("flags", "temperature", "top_k", "top_p", "min_p", "seed", "choice")


def flags_of(sampling: RowSampling) -> int:
    """The needs of a row beyond argmax and logits processors, as bits."""
    random = sampling.temperature >= GREEDY_BELOW
    return RANDOM * random + LOGPROBS * (sampling.logprobs is not None)


class SamplingTable:
    """Columns indexed by row; `params[row]` is the whole RowSampling, for what is rare. processors: which, in which
    order, change the logits; default: all. grammars: the compiled grammars of this rank."""

    def __init__(
        self,
        capacity: int,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.flags = np.zeros(capacity, np.uint8)
        self.temperature = np.ones(capacity, np.float64)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float64)
        self.min_p = np.zeros(capacity, np.float64)
        self.seed = np.zeros(capacity, np.uint64)
        self.choice = np.zeros(capacity, np.int64)
        self.params: list[RowSampling | None] = [None] * capacity
        self.grammars = GrammarMask(vocab_size, grammars)
        own = all_processors(vocab_size, self.grammars) if processors is None else processors
        self.chain = ProcessorChain(own, capacity)

    def bind(self, row: int, sampling: RowSampling) -> None:
        """Replaces what the row held."""
        reads = self.chain.bind(row, sampling)
        self.flags[row] = (
            flags_of(sampling)
            + EDITS * bool(reads)
            + READS_TOKENS * (Reads.TOKENS in reads)
            + READS_LATE * (Reads.TOKENS_LATE in reads)
            + READS_ON_HOST * self.chain.waits(row)
        )
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, self.vocab_size)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed & (2**64 - 1)
        self.choice[row] = sampling.choice
        self.params[row] = sampling

    def grow(self, capacity: int) -> None:
        """Makes room for rows below `capacity`; rows keep what they hold."""
        more = capacity - len(self.params)
        for name in COLUMNS:
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.params += [None] * more
        self.chain.grow(capacity)

    def free(self, row: int) -> None:
        """Forgets what the row held; its columns stay until it is bound again."""
        self.chain.free(row)

    def fixed(self, rows_S: Ints) -> Draws | None:
        """Returns the draws of a step of these rows, where one sequence of calls serves them all, as a capture has it:
        no logits processor changes their logits, and none of them has log probabilities, top-k or top-p. None for
        others: they sample behind the capture."""
        flags_S, top_k_S, top_p_S = self.flags[rows_S], self.top_k[rows_S], self.top_p[rows_S]
        is_random_S = flags_S & RANDOM > 0
        if (flags_S & (EDITS | LOGPROBS)).any() or (((top_k_S > 0) | (top_p_S < 1)) & is_random_S).any():
            return None
        draws = self.draws(np.arange(len(rows_S)), rows_S)
        draws.factor[~is_random_S] = 0
        return draws

    def draws(self, places: Ints, rows: Ints) -> Draws:
        """Returns what draws tokens of these rows, at these places of a step."""
        with np.errstate(divide="ignore"):  # of rows that are greedy
            return Draws.of(places, *(getattr(self, name)[rows] for name in COLUMNS[1:]))

    def of(self, row: int) -> RowSampling:
        """The parameters of a bound row."""
        sampling = self.params[row]
        assert sampling is not None, f"row {row} is not bound"
        return sampling
