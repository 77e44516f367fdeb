"""GrammarStore: the compiled grammars of a rank that samples, by digest. Torch-free.

Compiled on the rank's grammar lanes (workers/rank/transfers/grammar_lanes.py), used by the logits processor of the
steps. llguidance compiles and matches: see docs/decisions/028-structured-output.md. Any thread may call it.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tandem.workers.messages.errors import SettingsError
from tandem.workers.structured.row_grammar import RowGrammar
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.generation_config import GenerationConfig
from tandem.workers.text.grammars import NO_TOKEN, reason_of, why_no_token_begins
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer

LIMITS: Final = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)
"""Limits of a grammar: llguidance's own limits, but for the states of its lexer (1 to 2 kB each)."""


class GrammarRefused(Exception):
    """A grammar that cannot be compiled; the message is for the client."""


class TokenizerUnusable(Exception):
    """The model's tokenizer cannot be used for grammars on this rank; no grammar can be compiled."""


class _Compiled(NamedTuple):
    """A grammar's matcher, which only copies are made of, what makes it, and the ticket of the order to compile it."""

    matcher: LLMatcher
    make: Callable[[], LLMatcher]
    ticket: int


class GrammarStore:
    """Grammars over a model's tokens. vocab_size: the model's, which may be more than the tokenizer's. eos_token_ids:
    those at which the engine ends a text, beside the tokenizer's own."""

    def __init__(self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = tokenizer_folder
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._special: frozenset[int] = frozenset()
        self._compiled: dict[str, _Compiled] = {}
        self._worn: set[str] = set()
        self._opening = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def open(self) -> None:
        """Builds the table of tokens, once. It takes seconds for large vocabularies, in which no other thread of the
        process runs. TokenizerUnusable when it cannot be built."""
        with self._opening:
            if self._tokenizer is not None:
                return
            try:
                own = load_tokenizer(self._folder, GenerationConfig(eos_token_ids=tuple(self._eos)))
                eos = own.eos_token_ids
                self._tokenizer = _token_table(own, self._vocab_size, eos)
            except (SettingsError, ValueError, RuntimeError) as error:
                raise TokenizerUnusable(f"the tokenizer cannot be used for structured output: {error}") from error
            self._eos, self._special = eos, own.hidden_token_ids

    def compile(self, digest: str, text: str, ticket: int = 0) -> None:
        """Compiles a grammar. GrammarRefused says why it cannot be; TokenizerUnusable as open()."""
        self.open()
        assert self._tokenizer is not None
        make = partial(LLMatcher, self._tokenizer, text, log_level=0, limits=LIMITS)
        matcher = make()
        # the first mask takes longest, and not all errors show before it
        begins = matcher.is_error() or self._begins(matcher, matcher.compute_bitmask())
        if not begins or matcher.get_error().startswith(NO_TOKEN):
            raise GrammarRefused(why_no_token_begins(text))
        if matcher.is_error():
            raise GrammarRefused(reason_of(matcher.get_error()))
        self._compiled[digest] = _Compiled(matcher, make, ticket)

    def _begins(self, matcher: LLMatcher, mask: bytes) -> bool:
        """Returns whether a text may be empty or some token begins it. Of a text that only one spelling has, the mask
        is the tokenizer's spelling, also where that lacks a character."""
        if matcher.is_error() or matcher.is_accepting():
            return True
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return any(matcher.validate_tokens([token]) for token in np.flatnonzero(bits).tolist())

    def drop(self, digest: str, ticket: int = 0) -> None:
        """Forgets a grammar that no later ticket has compiled again. Rows that have begun keep theirs."""
        compiled = self._compiled.get(digest)
        if compiled is not None and compiled.ticket <= ticket:
            self._compiled.pop(digest, None)

    def start(self, digest: str) -> LLMatcher | None:
        """Returns a matcher at the beginning of a text, to be copied; None if the grammar is not there."""
        compiled = self._compiled.get(digest)
        return None if compiled is None else compiled.matcher

    def row(self, digest: str, stop_token_ids: tuple[int, ...]) -> RowGrammar | None:
        """Returns the place of a new row, which stops at these ids; None if the grammar is not there."""
        compiled = self._compiled.get(digest)
        if compiled is None:
            return None
        if digest in self._worn:
            self._worn.discard(digest)
            compiled = self._compiled[digest] = compiled._replace(matcher=compiled.make())

        def make() -> LLMatcher:
            self._worn.add(digest)  # what the rows share is at a limit
            return compiled.make()

        return RowGrammar(compiled.matcher, self.end_ids(stop_token_ids), make)

    def end_ids(self, stop_token_ids: tuple[int, ...]) -> frozenset[int]:
        """Returns the token ids that end a text, for a row that stops at these ids."""
        own = self._eos.union(self._special).intersection(stop_token_ids)
        return frozenset(i for i in own or self._eos if i < self._vocab_size)

    def __len__(self) -> int:
        return len(self._compiled)


class _VocabularyTokens:
    """A tokenizer as llguidance's TokenizerWrapper reads it: the bytes of each token below `size`, and which are
    special.

    Given a tokenizer.json, llguidance takes every added token for special, so that a grammar's "<tool_call>" would be
    spelled out where the model writes one token.
    """

    def __init__(self, tokenizer: ModelTokenizer, size: int, eos_token_ids: list[int]) -> None:
        pieces = DetokenizerFactory(tokenizer)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [pieces.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = sorted(i for i in tokenizer.hidden_token_ids.union(eos_token_ids) if i < size)
        self._tokenizer = tokenizer
        self._hidden = hidden = frozenset(self.special_token_ids)
        self._id_of = {piece: i for i, piece in reversed(list(enumerate(self.tokens))) if piece and i not in hidden}
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: str) -> list[int]:
        """Returns tokens whose bytes are exactly the text's: the tokenizer's own where it adds no space in front, else
        those behind a line break, else the longest ones that fit."""
        wanted = text.encode()
        for guard in ("", "\n"):
            ids = self._tokenizer.encode(guard + text, add_special_tokens=False)
            if max(ids, default=0) >= len(self.tokens) or not self._hidden.isdisjoint(ids):
                break  # the model has it not, or it is no text
            pieces = [self.tokens[i] for i in ids]
            for first in range(min(3, len(ids))):
                if b"".join(pieces[first:]) == wanted:
                    return ids[first:]
        return self._greedy(wanted)

    def _greedy(self, wanted: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(wanted):
            for end in range(min(len(wanted), start + self._longest), start, -1):
                if (found := self._id_of.get(wanted[start:end])) is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                break  # no token has this byte
        return ids


def _token_table(tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """llguidance's view of a tokenizer. Ids at and above vocab_size, which the model cannot write, are left out: masks
    have a bit for each token of the model."""
    eos = sorted(i for i in eos_token_ids if i < vocab_size)
    if not eos:
        raise ValueError("it has no end-of-sequence token")
    return LLTokenizer(
        TokenizerWrapper(_VocabularyTokens(tokenizer, vocab_size, eos)), n_vocab=vocab_size, eos_token=eos
    )
