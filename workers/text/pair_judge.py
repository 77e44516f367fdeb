"""PairJudge: the way in which a model that generates judges a pair of texts, such as Qwen3-Reranker.

A pair becomes one prompt, and its score the probability of the token that says yes beside the one that says no, behind
it. workers/build.py makes one of a checkpoint, for the gateway (POST /v1/score) and for LLM.score() alike. Torch-free.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.workers.messages.request import SamplingParams
from tandem.workers.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class PairJudge:
    """no_id, yes_id: the two tokens. template: of a pair, which sees messages of the roles query and document; None:
    one text follows the other."""

    no_id: int
    yes_id: int
    template: ChatTemplate | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a pair's request: the log probabilities of both tokens behind its prompt."""
        return SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=(self.no_id, self.yes_id))

    def prompt(self, query: str, document: str) -> str:
        """Returns the text of a pair's prompt. RequestRefused when the template rejects it."""
        if self.template is None:
            return query + document
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self.template.render(messages, add_generation_prompt=False)

    def score(self, behind: Mapping[int, float], *, is_raw: bool) -> float:
        """Returns the score of a pair. behind: log probabilities of both tokens behind its prompt. is_raw: the
        difference of both logits, in place of the probability that it stands for."""
        logit = behind[self.yes_id] - behind[self.no_id]
        return logit if is_raw else _logistic(logit)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
