"""TextServices: text in and out of one model, for the handlers of all routes.

Built once (wiring.py, tests). `settings` alone is replaced later (app/live_settings.py); else nothing changes, except
inside the objects it points to.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.configs.schema import BatchingPolicyName, GatewaySettings
from tandem.workers.models.spec.config.pooling_config import PoolingFacts
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.output.formats import ReasoningFormat, ToolFormat
from tandem.workers.text.pair_judge import PairJudge
from tandem.workers.text.tokenizer import ModelTokenizer


@dataclass(kw_only=True)
class TextServices:
    """Text services of one model: from bodies to prompts and from tokens to answers."""

    # the limits of bodies and texts
    settings: GatewaySettings
    # all names of the base, at least one
    model_names: tuple[str, ...]
    tokenizer: ModelTokenizer
    detokenizers: DetokenizerFactory
    # None when the model has none
    chat_template: ChatTemplate | None
    max_model_len: int
    # the model's, which may be more than the tokenizer's
    vocab_size: int
    # see extra_stop_token_ids()
    extra_stop_token_ids: tuple[int, ...]
    pooling: PoolingFacts
    workers: TextWorkers
    # draft tokens of a step, 0 without speculative decoding
    max_drafts: int = 0
    fingerprint: str = "tandem"
    created_s: int = field(default_factory=lambda: int(time.time()))
    # that of all groups
    batching_policy: BatchingPolicyName = "continuous"
    # how the model writes calls and thinking; None: unknown, all is content
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    # None: pairs of texts are compared by their embeddings
    judge: PairJudge | None = None
    # the seed of a request that gives none
    random_seed: Callable[[], int] = lambda: secrets.randbits(63)
    # the hexadecimal part of an answer's id
    random_ids: Callable[[], str] = lambda: secrets.token_hex(16)
    # the number of a request's first attempt, above those of a gateway that may have sent it before
    first_attempt: int = 0

    def __post_init__(self) -> None:
        assert self.model_names, "a service has a model name"


def extra_stop_token_ids(tokenizer: ModelTokenizer, engine_eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """The tokenizer's EOS ids at which the engine does not stop by itself; they go with each request as stop ids."""
    return tuple(sorted(tokenizer.eos_token_ids - engine_eos_token_ids))
