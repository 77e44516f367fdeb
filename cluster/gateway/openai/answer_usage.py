"""The usage and the metrics of OpenAI's answers and of their chunks."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.schemas.generation_body import CommonBody
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.request import Usage

Metrics = Callable[[], dict[str, Any]] | None
"""Makes the object `metrics` beside `usage`; None: answers have none."""


class ChunkCounts:
    """The counts in every chunk of a stream (vLLM's continuous_usage_stats): of the chunk's choice, as in vLLM.

    prompt_tokens: by choice, those of its prompt. The output tokens are those whose text has been formatted, whichever
    group they came from.
    """

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = [0] * len(prompt_tokens)

    def add(self, index: int, num_tokens: int) -> None:
        """Counts new tokens of a choice, whether or not a chunk shows them."""
        self._completion_tokens[index] += num_tokens

    def tail(self, index: int) -> bytes:
        """The end of a chunk of this choice."""
        prompt, output = self._prompt_tokens[index], self._completion_tokens[index]
        counts = b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (prompt, prompt + output, output)
        return b',"usage":{%b}}\n\n' % counts


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chunk_counts(body: CommonBody, parts: Sequence[RequestPart]) -> ChunkCounts | None:
    """Makes what counts in every chunk, if that is asked for."""
    if body.stream_options is None or not body.stream_options.continuous_usage_stats:
        return None
    return ChunkCounts([len(part.request.prompt_token_ids) for part in parts for _ in part.choices])


def draft_metrics(text: TextServices, body: CommonBody, parts: Sequence[RequestPart]) -> Metrics:
    """`metrics` of the answer, where the service reports it: acceptance of drafts, of a single choice only."""
    if text.settings.per_request_spec_decode_metrics == "none":
        return None
    acceptance = None if len(parts) > 1 or body.use_beam_search else parts[0].acceptance
    return lambda: {"speculative_decoding": None if acceptance is None else acceptance.report()}
