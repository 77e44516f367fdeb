"""Parameters and outputs of LLM.embed(), and the sink of one call. Torch-free."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import (
    NO_TOKENS,
    Abort,
    AdapterRef,
    Ended,
    GenerationRequest,
    Pool,
    ReplyTo,
    TokenDelta,
)
from tandem.workers.models.spec.config.pooling_config import PoolingFacts
from tandem.workers.offline.inputs import GivenPrompt, as_params
from tandem.workers.offline.offline_text import OfflineText
from tandem.workers.text.tokenizer import last_tokens

ACTIVATION_NAMES = ("use_activation", "normalize", "activation")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one embedding, for LLM.embed(), or of scores, for LLM.score(), with vLLM's names.

    dimensions: how many components to keep, where the model says that it has Matryoshka embeddings; None: all.
    use_activation: whether the embedding has length 1 (L2); None: as the model does it. For a judging model whether a
        score is a probability (None: it is) or the difference of two logits.
    normalize, activation: vLLM's older names of use_activation, for embeddings alone and for both.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The embedding of one prompt, float32 numbers; empty if the prompt was refused, and `error` says why."""

    embedding: list[float] = []
    error: str | None = None

    @property
    def hidden_size(self) -> int:
        """The number of components."""
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt of LLM.embed(), with vLLM's names.

    prompt: the text, None if token ids were given. cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    cached_tokens: int = 0
    finished: bool = False


class PoolingOutput(msgspec.Struct, kw_only=True):
    """Result of LLM.encode(): `data` is a float32 tensor, empty for a prompt that was refused; `error` says why."""

    data: Any
    error: str | None = None


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt of LLM.encode(), with vLLM's names."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True


class EmbeddingRun:
    """CallSink of one call of embed(): collects the embeddings."""

    def __init__(self) -> None:
        self.open: dict[str, EmbeddingRequestOutput] = {}

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        for delta in deltas:
            told = self.open[delta.request_id].outputs
            told.error = delta.error
            if delta.embedding is not None:
                told.embedding = list(struct.unpack(f"<{len(delta.embedding) // 4}f", delta.embedding))
        return []


def end_embedding(output: EmbeddingRequestOutput, ended: Ended) -> None:
    """Ends an output with its request."""
    output.cached_tokens, output.finished = ended.usage.cached_tokens, True
    if ended.refused is not None:
        output.outputs.error = ended.refused[3]


def pooled(output: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """Returns an embedding in the shape of encode()."""
    import torch

    data = torch.tensor(output.outputs.embedding, dtype=torch.float32)
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=PoolingOutput(data=data, error=output.outputs.error),
    )


def embedding_request(
    text: OfflineText,
    name: str,
    prompt: GivenPrompt,
    pool: Pool,
    adapter: AdapterRef | None,
    keep: int | None,
    reply_to: ReplyTo,
) -> tuple[EmbeddingRequestOutput, GenerationRequest | None]:
    """Returns the output of a prompt and its request; None for what is refused, whose output says why. keep:
    truncate_prompt_tokens."""
    shown, ids, salt = text.read(prompt)
    ids = last_tokens(ids, keep, text.facts.max_model_len)
    output = EmbeddingRequestOutput(request_id=name, prompt=shown, prompt_token_ids=ids, outputs=EmbeddingOutput())
    try:
        text.check_ids(shown, ids)
    except RequestRefused as error:
        output.outputs.error, output.finished = str(error), True
        return output, None
    return output, GenerationRequest(
        request_id=name,
        prompt_token_ids=ids,
        sampling=NO_TOKENS,
        adapter=adapter,
        cache_salt=salt,
        pool=pool,
        reply_to=reply_to,
    )


def pools_of(facts: PoolingFacts, given: PoolingParams | Sequence[PoolingParams] | None, count: int) -> list[Pool]:
    """Returns the task of each of `count` prompts. ValueError for dimensions that the model has not, and for another
    number of parameters; TypeError for something else."""
    each = as_params(PoolingParams() if given is None else given, PoolingParams, "pooling_params")
    if given is None or isinstance(given, PoolingParams):
        each *= count
    if len(each) != count:
        raise ValueError(f"{len(each)} pooling_params for {count} prompts")
    return [_pool_of(facts, params) for params in each]


def activation_of(params: PoolingParams) -> bool | None:
    """Returns use_activation, by whichever of its names. ValueError for another type, and for two answers."""
    given = {name: getattr(params, name) for name in ACTIVATION_NAMES if getattr(params, name) is not None}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80} must be True or False")
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(f'{name}={value}' for name, value in given.items())} exclude each other")
    return next(iter(given.values()), None)


def checked_truncation(keep: int | None) -> int | None:
    """Returns truncate_prompt_tokens. ValueError for what is neither None, -1 nor a number of tokens."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < -1 or not keep):
        raise ValueError(f"truncate_prompt_tokens={keep!r:.80} must be -1 or a whole number of at least 1")
    return keep


def _pool_of(facts: PoolingFacts, params: PoolingParams) -> Pool:
    dimensions = params.dimensions
    if isinstance(dimensions, bool) or not isinstance(dimensions, int | None):
        raise ValueError(f"dimensions={dimensions!r:.80} must be a whole number")
    normalize = activation_of(params)
    try:
        return facts.pool(dimensions=dimensions, normalize=normalize)
    except ValueError as error:
        raise ValueError(f"dimensions={error}") from error
