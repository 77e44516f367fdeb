"""Beam search over any source of next-token log probabilities: the state of one prompt's search, and its parameters.

As in vLLM since beam search has left its core, nothing below knows of beams: whoever drives a search asks for one token
of each live beam, with the log probabilities of the best `num_logprobs`, and hands these to advance(). LLM does so with
requests of one token (workers/offline/beams.py), the gateway with resumed requests (beam_generation.py there).

Candidates, what ends and the scores are those of `transformers`' generate(num_beams=..., early_stopping="never"):
a finished beam's score is its log probability over the number of its output tokens, EOS included, to the power of
length_penalty. The search goes on until max_tokens, or until no live beam can become better than the worst of
beam_width finished ones. Torch-free.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from tandem.workers.messages.request import FinishReason, SamplingParams, TokenLogprobs

MAX_BEAM_WIDTH = 1024
MAX_LENGTH_PENALTY = 10.0
NEXT_TOKEN = SamplingParams(temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
"""Parameters that the requests of all beams and steps have in common. Copies of it are not checked each time."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search, with vLLM's names.

    beam_width: beams that are kept, and answers that are returned, at least 1.
    max_tokens: most output tokens of a beam, at least 1. At the end of the model's context or KV pool a beam ends too.
    length_penalty: a beam's score is its log probability over its output tokens to this power; above 0 favours long
        answers.
    temperature: 0 or 1, which mean the same: beams are ranked by the model's own log probabilities.
    ignore_eos: True: the model's end-of-sequence tokens do not end a beam.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    temperature: float = 0.0
    ignore_eos: bool = False

    def check(self) -> None:
        """ValueError with the name and value of a parameter outside its range."""
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.beam_width > MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width={self.beam_width} must be at most {MAX_BEAM_WIDTH}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty={penalty!r} must be a number from -10 to 10")
        if self.temperature not in (0, 1):
            raise ValueError(f"temperature={self.temperature!r} must be 0 or 1: beam search does not sample")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")


class Beam(NamedTuple):
    """One beam: its output tokens, the sum of their log probabilities, an entry for each, and how it ended (None: it
    is live)."""

    token_ids: list[int]
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None

    def score(self, length_penalty: float) -> float:
        """The log probability, normalized by the length."""
        return self.cum_logprob / math.pow(max(1, len(self.token_ids)), length_penalty)


class BeamSearch:
    """One prompt's search. live: the beams that want a token, best first; one without tokens at the start.

    eos_token_ids: tokens that end a beam. max_tokens: as in BeamSearchParams, within the room in the context. num_top:
    candidates that a beam keeps in the entry of each of its tokens; None: all that it was given.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_tokens: int,
        num_top: int | None = None,
    ) -> None:
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._num_top = num_top
        self._finished: list[Beam] = []
        self.live = [Beam([], 0.0, [])]

    @property
    def num_logprobs(self) -> int:
        """Candidates that each live beam needs, so that beam_width of all go on even if the best ones end."""
        return max(2, 1 + len(self._eos)) * self._width

    @property
    def is_over(self) -> bool:
        """True if no further token can change the answer."""
        return not self.live

    def sampling(self, beam: Beam) -> SamplingParams:
        """Parameters of a request for the next token of a live beam: one more than it has, with its candidates."""
        return msgspec.structs.replace(NEXT_TOKEN, max_tokens=len(beam.token_ids) + 1, logprobs=self.num_logprobs)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Takes a step. entries: for each live beam, in order, its next token's best candidates in `top`."""
        many = [
            (beam.cum_logprob + logprob, place, token_id, logprob, rank)
            for place, (beam, entry) in enumerate(zip(self.live, entries, strict=True))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        ]
        chosen = heapq.nlargest(self.num_logprobs, many, key=lambda candidate: candidate[0])
        going_on: list[Beam] = []
        for number, (total, place, token_id, logprob, rank) in enumerate(chosen):
            before = self.live[place]
            ends = token_id in self._eos
            if (ends or len(before.token_ids) + 1 >= self._max_tokens) and number >= self._width:
                continue  # it only stands by
            if not ends and len(going_on) == self._width:
                continue
            entry = TokenLogprobs(token_id, logprob, entries[place].top[: self._num_top], rank)
            grown = Beam([*before.token_ids, token_id], total, [*before.logprobs, entry])
            if ends:
                self._finish(grown, "stop")
            elif len(grown.token_ids) >= self._max_tokens:
                self._finish(grown, "length")
            else:
                going_on.append(grown)
        self.live = going_on if self._may_improve(going_on) else []

    def best(self) -> list[Beam]:
        """The beams with the highest scores, at most beam_width, best first. Live ones are among them if the search was
        given up."""
        many = [*self._finished, *(beam for beam in self.live if beam.token_ids)]
        return sorted(many, key=self._score, reverse=True)[: self._width]

    def _finish(self, beam: Beam, reason: FinishReason) -> None:
        """Keeps a beam that ends, if it is of the best so far."""
        self._finished.append(beam._replace(finish_reason=reason))
        self._finished = heapq.nlargest(self._width, self._finished, key=self._score)

    def _may_improve(self, live: Sequence[Beam]) -> bool:
        """Returns whether a live beam may still get a score above the worst of enough finished ones: log probabilities
        only fall, and the best length for them is the longest, or the next one under a penalty that favours short."""
        if not live or len(self._finished) < self._width:
            return bool(live)
        length = self._max_tokens if self._penalty > 0 else len(live[0].token_ids)
        return live[0].cum_logprob / math.pow(length, self._penalty) > self._score(self._finished[-1])

    def _score(self, beam: Beam) -> float:
        return beam.score(self._penalty)
