"""Messages as a redacted recording has them: without token ids, texts and whatever else a client has written."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from tandem.workers.messages.request import AdapterRef, GenerationRequest, PromptLogprobs, SamplingParams, TokenLogprobs
from tandem.workers.messages.step import RowResult, RowSampling, RowWork
from tandem.workers.messages.transfer import (
    CompileGrammar,
    CopyKV,
    DropAdapter,
    DropGrammar,
    FetchAdapter,
    PlaceAdapter,
)

END: Final = 1
"""The one stop token: it stands where a token has ended its choice."""
HIDDEN_VOCABULARY: Final = 2**63
"""A vocabulary that has every hash."""
NO_LOGPROB: Final = TokenLogprobs(0, 0.0)
S = TypeVar("S", bound=msgspec.Struct)
Words = Mapping[str, str]


def hidden_request(
    request: GenerationRequest, prompt: list[int], resumed: list[list[int]], words: Words
) -> GenerationRequest:
    """Returns a request with these ids in place of its own. words: what stands for each word that is hidden."""
    public_id = request.trace_ids.get("x-request-id")
    return replace(
        request,
        prompt_token_ids=prompt,
        resume_token_ids=resumed,
        sampling=_hidden_params(request.sampling, words),
        adapter=None if request.adapter is None else hidden_adapter(request.adapter, words),
        cache_salt="",
        trace_ids={} if public_id is None else {"x-request-id": public_id},
        reply_to=None,
    )


def hidden_adapter(ref: AdapterRef, words: Words) -> AdapterRef:
    """Returns an adapter with another source of the same kind: a URL may have a password in it."""
    return replace(ref, source=hidden_source(ref.source, words))


def hidden_source(source: str, words: Words) -> str:
    """Returns a folder or URL in place of an adapter's: of the true one only the scheme is left, which decides how long
    it may take."""
    scheme, mark, place = source.partition("://")
    return f"{scheme}{mark}{words[place]}" if mark else words[source]


def _hidden_params(params: SamplingParams, words: Words) -> SamplingParams:
    return replace(
        params,
        stop=(),
        stop_token_ids=(END,) if params.stop_token_ids else (),
        logit_bias=(),
        allowed_token_ids=None,
        bad_words=(),
        bad_words_token_ids=(),
        grammar=None if params.grammar is None else words[params.grammar],
        structured_outputs=None,
        thinking_budget=None,
        logprob_token_ids=None if params.logprob_token_ids is None else (),
    )


def hidden_sampling(sampling: RowSampling, words: Words) -> RowSampling:
    """Returns what the engine makes of hidden parameters where it has made `sampling` of the true ones."""
    return replace(
        sampling,
        stop_token_ids=(END,) if sampling.stop_token_ids else (),
        logit_bias=(),
        allowed_token_ids=None,
        bad_words_token_ids=(),
        grammar=None if sampling.grammar is None else words[sampling.grammar],
        thinking_budget=None,
        logprob_token_ids=None if sampling.logprob_token_ids is None else (),
    )


def hidden_work(work: RowWork, token_ids: list[int]) -> RowWork:
    """Returns a row's work with these ids in place of the known tokens that it carries."""
    return replace(work, token_ids=token_ids, draft_ids=[0] * len(work.draft_ids))


def hidden_row(row: RowResult, token_ids: list[int]) -> RowResult:
    """Returns a row's result with these ids in place of its own."""
    scored = row.prompt_logprobs
    return RowResult(
        row=row.row,
        token_ids=token_ids,
        logprobs=None if row.logprobs is None else [NO_LOGPROB] * len(row.logprobs),
        error=None if row.error is None else "error",
        num_drafts=row.num_drafts,
        embedding=None if row.embedding is None else b"",
        prompt_logprobs=None if scored is None else _hidden_scores(scored),
        draft_ids=[0] * len(row.draft_ids),
    )


def _hidden_scores(scored: PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(scored.first_position, [NO_LOGPROB] * len(scored.entries))


def hidden_op(op: Any, hash_key: Callable[[bytes], bytes], words: Words) -> Any:
    """Returns an op, or another message, without true keys of blocks, grammars and sources of adapters."""
    if isinstance(op, CopyKV):
        return replace(op, keys=[*map(hash_key, op.keys)], dropped=[*map(hash_key, op.dropped)])
    if isinstance(op, FetchAdapter | PlaceAdapter | DropAdapter):
        return replace(op, adapter=hidden_adapter(op.adapter, words))
    if isinstance(op, CompileGrammar):
        return replace(op, digest=words[op.digest], text=words[op.text])
    return replace(op, digest=words[op.digest]) if isinstance(op, DropGrammar) else op


def without_message(one: S) -> S:
    """Returns an answer of the ranks without the words of its failure, which may quote what a client has written."""
    failure = getattr(one, "failure", None)
    return one if failure is None or isinstance(failure, str) else replace(one, failure=replace(failure, message=""))
