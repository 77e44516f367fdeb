"""SamplingTable: each row's sampling parameters as columns of numpy arrays, so that a step reads them at once.

Written when a row is bound, read by sampler.py every step. Owns the chain of logits processors; holds no tokens and no
tensors. What a request could send to break a step (ids outside the vocabulary) is dropped here and by the processors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tandem.workers.kernels.logit_edits import NO_EDITS, LogitEdits
from tandem.workers.kernels.sampling_ops import Draws
from tandem.workers.kernels.sampling_rules import MOST_TOP
from tandem.workers.kernels.step_arrays import Array
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.chain import ProcessorChain, all_processors
from tandem.workers.sampling.processors.grammar import GrammarMask
from tandem.workers.sampling.processors.logits_processor import History, LogitsProcessor, Reads
from tandem.workers.sampling.processors.row_edits import RowEdits, step_edits
from tandem.workers.sampling.processors.thinking_budget import ThinkingBudgets
from tandem.workers.sampling.step_rules import AskedRow, StepRules, step_rules
from tandem.workers.structured.grammar_store import GrammarStore

Ints = npt.NDArray[np.int64]
RANDOM: Final = 1  # temperature above 0
EDITS: Final = 2  # some logits processor changes the logits before the choice
LOGPROBS: Final = 4
READS_TOKENS: Final = 8  # some logits processor reads the row's tokens before the forward pass
READS_LATE: Final = 16  # and some behind it
READS_ON_HOST: Final = 32  # some of those before it cannot read them on a device
BEHIND: Final = 64  # no capture serves it whole
RULED: Final = 128  # a capture with rules does
GREEDY_BELOW: Final = 1e-5  # as in vLLM: a temperature this small is greedy


COLUMNS: Final = ("flags", "temperature", "top_k", "top_p", "min_p", "seed", "choice")


def flags_of(sampling: RowSampling) -> int:
    """The needs of a row beyond argmax and logits processors, as bits."""
    random = sampling.temperature >= GREEDY_BELOW
    return RANDOM * random + LOGPROBS * (sampling.logprobs is not None)


def _reports_too_many(sampling: RowSampling) -> bool:
    """Returns whether a row wants more log probabilities than a capture reports."""
    named = sampling.logprob_token_ids
    return (sampling.logprobs or 0 if named is None else len(named)) > MOST_TOP


@dataclass(frozen=True, slots=True)
class CapturedSampling:
    """The sampling of a captured step: edits of its logits, then draws, of which a factor of 0 takes the best token.
    read_rows: rows whose tokens that reads on the device; None for none."""

    draws: Draws
    edits: LogitEdits[Array]
    read_rows: Ints | None = None


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
        self._edits: dict[int, RowEdits] = {}
        self.grammars = GrammarMask(vocab_size, grammars)
        self._thinking = ThinkingBudgets(vocab_size)
        own = all_processors(vocab_size, self.grammars, self._thinking) if processors is None else processors
        self.chain = ProcessorChain(own, capacity)

    def bind(self, row: int, sampling: RowSampling) -> None:
        """Replaces what the row held."""
        reads = self.chain.bind(row, sampling)
        edits = self.chain.edits(row) if reads else None
        self._edits.pop(row, None)
        if edits is not None:
            self._edits[row] = edits
        self.flags[row] = (
            flags_of(sampling)
            + EDITS * bool(reads)
            + READS_TOKENS * (Reads.TOKENS in reads)
            + READS_LATE * (Reads.TOKENS_LATE in reads)
            + READS_ON_HOST * self.chain.waits(row)
            + BEHIND * (_reports_too_many(sampling) or (bool(reads) and edits is None))
            + RULED * (sampling.logprobs is not None or (edits is not None and edits.has_rules))
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
        self._edits.pop(row, None)

    def captured(
        self, rows_S: Ints, prompt_len_S: Ints, most_entries: int, *, with_rules: bool = False, reports: bool = True
    ) -> CapturedSampling | None:
        """Returns how a capture samples these rows, by one sequence of calls for any mix of them. with_rules: by one
        that carries out rules, which others do not. reports: with the log probabilities that rows ask for. None where
        some row asks for more than it holds, or for edits of more tokens than there is room for."""
        flags_S = self.flags[rows_S]
        if reports and (flags_S & (BEHIND if with_rules else BEHIND | RULED)).any():
            return None
        if not reports and any(self._has_more_than_edits(row) for row in rows_S[flags_S & EDITS > 0].tolist()):
            return None
        edits, read_rows = NO_EDITS, None
        if (flags_S & EDITS).any():
            edits = step_edits([self._edits.get(row) for row in rows_S.tolist()], prompt_len_S)
            if len(edits.place_E) > most_entries:
                return None
            read = {row for row in rows_S.tolist() if row in self._edits and self._edits[row].reads_tokens}
            read_rows = np.array(sorted(read), np.int64) if read else None
        draws = self.draws(np.arange(len(rows_S)), rows_S)
        draws.factor[flags_S & RANDOM == 0] = 0
        return CapturedSampling(draws, edits, read_rows)

    def _has_more_than_edits(self, row: int) -> bool:
        """Returns whether a row whose logits change has them changed by more than edits."""
        edits = self._edits.get(row)
        return edits is None or edits.has_rules

    def needs_whole(self, rows: Ints) -> bool:
        """Returns whether some of these rows cannot be drawn from parts of the vocabulary: the best token and a draw
        with min-p can, on all ranks alike."""
        flags = self.flags[rows]
        is_cut = (flags & RANDOM > 0) & ((self.top_k[rows] > 0) | (self.top_p[rows] < 1))
        return bool((is_cut | (flags & (EDITS | LOGPROBS | BEHIND | RULED) > 0)).any())

    def rules(self, rows_S: Ints, read_S: Ints, history: History) -> StepRules:
        """Returns the rules of a step's places, all of which captured() serves with rules; without the masks of
        grammars. read_S: the tokens of each place's row that the host has read."""
        asked: dict[int, AskedRow | None] = {}
        for row, read in zip(rows_S.tolist(), read_S.tolist(), strict=True):
            if row not in asked:
                asked[row] = self._asked(row, read, history) if self.flags[row] & RULED else None
        return step_rules([asked[row] for row in rows_S.tolist()], rows_S.tolist(), -(-self.vocab_size // 32))

    def _asked(self, row: int, read: int, history: History) -> AskedRow:
        edits, sampling, span = self._edits.get(row), self.of(row), None
        if edits is not None and edits.thinks:
            tokens, prompt_len = history(row, read)
            span = self._thinking.span_of(row, tokens[prompt_len:], read)
        if sampling.logprobs is None:
            return AskedRow(edits, span, -1, None)
        if sampling.logprob_token_ids is not None:
            return AskedRow(edits, span, 0, self.named_ids(sampling))
        return AskedRow(edits, span, min(sampling.logprobs, self.vocab_size), None)

    def named_ids(self, sampling: RowSampling) -> list[int]:
        """Returns the ids that a row names, of those that the vocabulary has."""
        return [i for i in sampling.logprob_token_ids or () if 0 <= i < self.vocab_size]

    def draws(self, places: Ints, rows: Ints) -> Draws:
        """Returns what draws tokens of these rows, at these places of a step."""
        with np.errstate(divide="ignore"):  # of rows that are greedy
            return Draws.of(places, *(getattr(self, name)[rows] for name in COLUMNS[1:]))

    def of(self, row: int) -> RowSampling:
        """The parameters of a bound row."""
        sampling = self.params[row]
        assert sampling is not None, f"row {row} is not bound"
        return sampling
