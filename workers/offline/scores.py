"""Scores of LLM.score(): the cosine of two embeddings."""

import math

import msgspec

from tandem.workers.offline.embed import EmbeddingRequestOutput


class ScoringOutput(msgspec.Struct, kw_only=True):
    """The score of one pair, -1 to 1; 0 if a prompt was refused, and `error` says why."""

    score: float = 0.0
    error: str | None = None


class ScoringRequestOutput(msgspec.Struct, kw_only=True):
    """Result of one pair of LLM.score(), with vLLM's names. prompt_token_ids: of both prompts, one after the other."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def pairs_of(first: int, second: int) -> list[tuple[int, int]]:
    """Returns the pairs of as many prompts: one with each, or each with its own. ValueError for other numbers."""
    if not first or not second or first not in (1, second):
        raise ValueError(f"{first} prompts cannot be paired with {second}: the numbers must be 1:1, 1:N or N:N")
    return [(0 if first == 1 else number, number) for number in range(second)]


def scored(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Returns the score of two embedded prompts."""
    error = one.outputs.error or other.outputs.error
    score = 0.0 if error is not None else cosine(one.outputs.embedding, other.outputs.embedding)
    return ScoringRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        prompt_token_ids=[*one.prompt_token_ids, *other.prompt_token_ids],
        outputs=ScoringOutput(score=score, error=error),
    )


def cosine(one: list[float], other: list[float]) -> float:
    """Returns the cosine of the angle between two vectors; 0 where one has no length."""
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
