"""Scores of LLM.score(): what a judging model says of a pair, or the cosine of two embeddings. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem.workers.messages.errors import RequestRefused
from tandem.workers.offline.chats import given_template
from tandem.workers.offline.embed import EmbeddingRequestOutput, PoolingParams, activation_of
from tandem.workers.offline.inputs import GivenPrompt, as_params
from tandem.workers.offline.offline_text import OfflineText
from tandem.workers.offline.outputs import RequestOutput
from tandem.workers.text.pair_judge import PairJudge
from tandem.workers.text.tokenizer import last_tokens

Pair = tuple[GivenPrompt, GivenPrompt]


class ScoringOutput(msgspec.Struct, kw_only=True):
    """The score of one pair: -1 to 1, of a judging model 0 to 1; 0 if it was refused, and `error` says why."""

    score: float = 0.0
    error: str | None = None


class ScoringRequestOutput(msgspec.Struct, kw_only=True):
    """Result of one pair of LLM.score(), with vLLM's names. prompt_token_ids: of both prompts, one after the other, or
    of the prompt in which a judging model sees both."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def pairs_of(firsts: Sequence[GivenPrompt], seconds: Sequence[GivenPrompt]) -> list[tuple[int, int]]:
    """Returns the pairs as places of prompts: one with each, or each with its own. ValueError for other numbers."""
    first, second = len(firsts), len(seconds)
    if not first or not second or first not in (1, second):
        raise ValueError(f"{first} prompts cannot be paired with {second}: the numbers must be 1:1, 1:N or N:N")
    return [(0 if first == 1 else number, number) for number in range(second)]


# ---- by embeddings ----


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


# ---- by a judging model ----


@dataclass(frozen=True, slots=True)
class Judging:
    """One call of score() with a judging model. is_raw: scores are differences of logits. keep: the tokens that stay of
    each prompt, as truncate_prompt_tokens says."""

    text: OfflineText
    judge: PairJudge
    is_raw: bool
    keep: int | None

    def prompts(self, pairs: Sequence[Pair]) -> list[GivenPrompt | RequestRefused]:
        """Returns the prompt of each pair, or why the template refuses it. ValueError for two salts of one pair."""
        return [self._prompt(*pair) for pair in pairs]

    def scored(self, output: RequestOutput) -> ScoringRequestOutput:
        """Returns the score of a pair whose prompt has ended."""
        (end,) = output.outputs
        told = ScoringOutput(error=end.error)
        if end.logprobs:
            behind = {token_id: one.logprob for token_id, one in end.logprobs[0].items()}
            told.score = self.judge.score(behind, is_raw=self.is_raw)
        elif told.error is None:
            told.error = f"The prompt ended ({end.finish_reason}) without a score."
        return ScoringRequestOutput(
            request_id=output.request_id, prompt_token_ids=output.prompt_token_ids, outputs=told
        )

    def _prompt(self, first: GivenPrompt, second: GivenPrompt) -> GivenPrompt | RequestRefused:
        salt = first.cache_salt or second.cache_salt
        if second.cache_salt not in ("", salt):
            raise ValueError(f"cache_salt: {salt!r:.80} and {second.cache_salt!r:.80} are of one pair, in one prompt")
        try:
            prompt = self.judge.prompt(self._text(first), self._text(second))
        except RequestRefused as error:
            return error
        room = self.text.facts.max_model_len - 1
        ids = last_tokens(self.text.tokenizer.encode(prompt, add_special_tokens=True), self.keep, room)
        return GivenPrompt(prompt, ids, salt)

    def _text(self, prompt: GivenPrompt) -> str:
        """Returns a prompt's text; ids are read as text, as in vLLM, without special tokens."""
        return (prompt.text or "") if prompt.token_ids is None else self.text.tokenizer.decode(prompt.token_ids)


def judging(
    text: OfflineText, params: PoolingParams | None, chat_template: str | None, keep: int | None
) -> Judging | None:
    """Returns how a call is judged; None where pairs are compared by their embeddings. keep: truncate_prompt_tokens.
    TypeError or ValueError names an argument of another type, and one that the model has no use for."""
    (params,) = as_params([PoolingParams() if params is None else params], PoolingParams, "pooling_params")
    if not isinstance(chat_template, str | None):
        raise TypeError(f"chat_template: {chat_template!r:.80} is no text")
    judge = text.judge
    if judge is None:
        if chat_template is not None:
            raise ValueError(f"chat_template={chat_template!r:.80}: this model compares embeddings and judges no pairs")
        return None
    for name in ("dimensions", "normalize"):
        if (given := getattr(params, name)) is not None:
            raise ValueError(f"{name}={given!r:.80} is of embeddings, and this model judges pairs")
    if chat_template is not None:
        judge = PairJudge(judge.no_id, judge.yes_id, given_template(chat_template, text.tokenizer))
    return Judging(text, judge, is_raw=activation_of(params) is False, keep=keep)
