"""Scorers: from pairs of texts to prompts, and from what the engine makes of these to scores.

A model compares texts by their embeddings (the cosine of the angle between them), each text embedded once. One that is
served as a classifier judges each pair in a prompt of its own, by the log probabilities of two tokens behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.openai.embeddings import EmbeddingChoice, vector_of
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.scoring.scoring_body import ScoringBody, TextPairs
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.parts import PromptWork
from tandem.cluster.gateway.serving.prompts import check_text_bytes, tokenized
from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused
from tandem.workers.messages.request import NO_TOKENS, FinishReason, Pool, TokenDelta, TokenLogprobs
from tandem.workers.text.pair_judge import PairJudge
from tandem.workers.text.tokenizer import last_tokens

SMALL = 1e-8
"""The least length of an embedding in a cosine, as in torch."""


class Scorer(Protocol):
    """The way in which a model scores pairs."""

    @property
    def pool(self) -> Pool | None:
        """The task of its requests; None: they generate."""
        ...

    def work(self, text: TextServices, body: ScoringBody, pairs: TextPairs) -> list[PromptWork]:
        """The prompts, whatever may be refused refused."""
        ...

    def scores(self, pairs: TextPairs, parts: Sequence[RequestPart]) -> list[float]:
        """The score of each pair, when all prompts have been computed."""
        ...


def scorer_of(text: TextServices, body: ScoringBody) -> Scorer:
    """The scorer of the service's model."""
    if text.judge is not None:
        return JudgeScorer(text.judge, is_raw=body.use_activation is False)
    return EmbeddingScorer(text.pooling.pool())


@dataclass(frozen=True)
class EmbeddingScorer:
    """Cosines of embeddings."""

    pool: Pool

    def work(self, text: TextServices, body: ScoringBody, pairs: TextPairs) -> list[PromptWork]:
        """The texts, each once: the first ones, then the second ones."""
        firsts, seconds = _cut(text, body, pairs)
        work = []
        for name, texts in zip(pairs.names, (firsts, seconds), strict=True):
            for token_ids in _fitting(text, body, texts, name, text.max_model_len):
                work.append(PromptWork(token_ids, NO_TOKENS, [EmbeddingChoice()]))
        return work

    def scores(self, pairs: TextPairs, parts: Sequence[RequestPart]) -> list[float]:
        """Implements Scorer."""
        packed = [vector_of(part) for part in parts]
        vectors_PH = np.frombuffer(b"".join(packed), "<f4").reshape(len(packed), -1).astype(np.float64)
        vectors_PH /= np.maximum(np.linalg.norm(vectors_PH, axis=1, keepdims=True), SMALL)
        firsts = [pairs.first_of(i) for i in range(len(pairs.seconds))]
        cosines_P = (vectors_PH[firsts] * vectors_PH[len(pairs.firsts) :]).sum(axis=1)
        return [float(one) for one in cosines_P]


class JudgedChoice:
    """The log probabilities of the two tokens behind a prompt. The token that is sampled beside them is not billed."""

    tokens = 0

    def __init__(self) -> None:
        self.finished: FinishReason | None = None
        self.entry: TokenLogprobs | None = None

    def take(self, delta: TokenDelta) -> None:
        """Adds a delta."""
        if delta.logprobs:
            self.entry = delta.logprobs[0]
        self.finished = self.finished or delta.finish_reason


@dataclass(frozen=True)
class JudgeScorer:
    """The probability of "yes" beside "no". is_raw: the difference of their logits."""

    judge: PairJudge
    is_raw: bool
    pool: None = None

    def work(self, text: TextServices, body: ScoringBody, pairs: TextPairs) -> list[PromptWork]:
        """A prompt for each pair."""
        firsts, seconds = _cut(text, body, pairs)
        texts = [self.judge.prompt(firsts[pairs.first_of(i)], second) for i, second in enumerate(seconds)]
        prompts = _fitting(text, body, texts, pairs.names[1], text.max_model_len - 1)
        return [PromptWork(token_ids, self.judge.sampling, [JudgedChoice()]) for token_ids in prompts]

    def scores(self, pairs: TextPairs, parts: Sequence[RequestPart]) -> list[float]:
        """Implements Scorer."""
        return [self._score(part) for part in parts]

    def _score(self, part: RequestPart) -> float:
        (choice,) = part.choices
        if not isinstance(choice, JudgedChoice) or choice.entry is None:
            raise RequestRefused("The request ended without a score.", code="internal_error", status=500)
        return self.judge.score(dict(choice.entry.top), is_raw=self.is_raw)


def _cut(text: TextServices, body: ScoringBody, pairs: TextPairs) -> tuple[list[str], list[str]]:
    """The texts, to their first tokens where the body says so."""
    check_text_bytes(text, sum(len(one.encode()) for one in (*pairs.firsts, *pairs.seconds)), pairs.names[1])
    limits = (("max_tokens_per_query", body.max_tokens_per_query), ("max_tokens_per_doc", body.max_tokens_per_doc))
    for name, most in limits:
        if most is not None and most >= text.max_model_len:
            raise invalid(name, f"{name}: {most} must be less than the model's context, {text.max_model_len} tokens.")
    firsts, seconds = (
        [_first_tokens(text, one, most) for one in texts]
        for texts, (_, most) in zip((pairs.firsts, pairs.seconds), limits, strict=True)
    )
    return firsts, seconds


def _first_tokens(text: TextServices, one: str, most: int | None) -> str:
    if not most:
        return one
    token_ids = text.tokenizer.encode(one, add_special_tokens=False)
    return one if len(token_ids) <= most else text.tokenizer.decode(token_ids[:most], skip_special_tokens=False)


def _fitting(text: TextServices, body: ScoringBody, texts: Sequence[str], param: str, limit: int) -> list[list[int]]:
    """The token ids of prompts, cut as asked. RequestRefused for one that does not fit."""
    keep = body.truncate_prompt_tokens
    special = body.add_special_tokens is not False
    found = []
    for prompt in tokenized(text, texts, param, add_special_tokens=special, truncates=keep is not None):
        token_ids = last_tokens(prompt.token_ids, keep, limit)
        if not token_ids:
            raise invalid(param, f"A text of {param} is empty: it must hold at least one token.")
        if len(token_ids) > limit:
            raise ContextLengthExceeded(
                f"This model has room for {limit} tokens; a prompt with a text of {param} has {len(token_ids)}. "
                "Shorten it, or send max_tokens_per_doc or truncate_prompt_tokens.",
                param,
            )
        found.append(token_ids)
    return found
