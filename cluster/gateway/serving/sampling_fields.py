"""Makes SamplingParams of a checked body: defaults of the model's generation_config.json, a seed for everyone; and what
may stand beside use_beam_search. There `n` is the number of beams and of answers, as in vLLM. Beams are ranked by the
model's own log probabilities, so fields that change those, or sample, are refused by name."""

import math
from typing import Any, Final, TypeVar

import msgspec

from tandem.cluster.gateway.schemas.generation_body import CommonBody, CompletionBody
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.grammar_fields import structured_field
from tandem.configs.schema import BatchingPolicyName
from tandem.workers.messages.request import SamplingParams
from tandem.workers.messages.sampling_ranges import NO_SEED
from tandem.workers.text.model_params import bad_word_ids
from tandem.workers.text.tokenizer import check_token_ids

GREEDY_BELOW = 1e-5
Body = TypeVar("Body", bound=CommonBody)
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
}
"""Fields that beam search does not honour, and the values that ask for nothing."""
PLAIN: Final = SamplingParams()
"""Copies of it are not checked, as constructed ones are: the values of a body have been, by their types."""


def sampling_params(
    text: TextServices,
    body: CommonBody,
    *,
    max_tokens: int,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    """Resolved parameters of one prompt, its bad words tokenized. RequestRefused when a token id or min_tokens is out
    of range."""
    defaults = text.tokenizer.defaults
    min_tokens = _min_tokens(text, body, max_tokens)
    temperature = _chosen(body.temperature, defaults.temperature)
    stop_ids = list(body.stop_token_ids or ())
    check_token_ids(stop_ids, text.vocab_size, "stop_token_ids")
    ignore_eos = bool(body.ignore_eos)
    if not ignore_eos:
        stop_ids += [i for i in text.extra_stop_token_ids if i not in stop_ids]
    return msgspec.structs.replace(
        PLAIN,
        max_tokens=max_tokens,
        n=n,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=max(0, body.top_k if body.top_k is not None else defaults.top_k),
        top_p=_chosen(body.top_p, defaults.top_p),
        min_p=_chosen(body.min_p, defaults.min_p),
        seed=_seed(text, body),
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=stop_strings(body, defaults.stop_strings),
        stop_token_ids=tuple(stop_ids),
        logprobs=logprobs,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_chosen(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_with_forbidden(_logit_bias(body.logit_bias or {}, text.vocab_size), defaults.suppress_tokens),
        allowed_token_ids=_allowed_token_ids(body.allowed_token_ids, text.vocab_size),
        bad_words_token_ids=(*defaults.bad_words_ids, *bad_word_ids(text.tokenizer, body.bad_words or ())),
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def with_max_tokens(text: TextServices, body: CommonBody, params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The parameters of another prompt of the same body. What is dear to make, such as bad words, they share."""
    return msgspec.structs.replace(
        params, max_tokens=max_tokens, min_tokens=_min_tokens(text, body, max_tokens), seed=_seed(text, body)
    )


def _min_tokens(text: TextServices, body: CommonBody, max_tokens: int) -> int:
    if body.min_tokens is None:
        return min(text.tokenizer.defaults.min_new_tokens, max_tokens)
    if body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens {body.min_tokens} exceeds max_tokens {max_tokens}.")
    return body.min_tokens


def _seed(text: TextServices, body: CommonBody) -> int:
    return text.random_seed() if body.seed is None or body.seed == NO_SEED else body.seed


def bad_words_size(body: CommonBody) -> int:
    """The characters of the bad words, which are tokenized."""
    return sum(map(len, body.bad_words or ()))


def stop_strings(body: CommonBody, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The stop field as a tuple; `default` where there is none."""
    if body.stop is None:
        return default
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _with_forbidden(biases: tuple[tuple[int, float], ...], token_ids: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    kept = tuple(pair for pair in biases if pair[0] not in token_ids)
    return (*kept, *((token_id, -math.inf) for token_id in token_ids))


def _chosen(given: float | None, default: float) -> float:
    return default if given is None else given


def _allowed_token_ids(given: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if given is None:
        return None
    check_token_ids(given, vocab_size, "allowed_token_ids")
    return tuple(dict.fromkeys(given))


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid("logit_bias", "The keys of logit_bias must be token ids.")
        pairs[int(key)] = bias
    check_token_ids(list(pairs), vocab_size, "logit_bias")
    return tuple(pairs.items())


def checked_beams(body: Body, max_logprobs: int, batching: BatchingPolicyName = "continuous") -> Body:
    """Returns the body. RequestRefused for a field that does not go with use_beam_search, and for more beams than half
    of max_logprobs: each step asks for the log probabilities of twice as many tokens, as in vLLM. Refuses beam search
    where another batching policy would keep each token of it waiting for the next batch.
    """
    if not body.use_beam_search:
        return body
    if batching != "continuous":
        raise unsupported("use_beam_search", f"Beam search is not served with --batching-policy {batching}.")
    if body.stream:
        raise unsupported("stream", "An answer of beam search cannot be streamed: it is known at the end.")
    if (field := structured_field(body)) is not None:
        raise unsupported(field, f"With use_beam_search {field} is not supported.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "With use_beam_search n is the number of beams and of answers.")
    if 2 * (body.n or 1) > max_logprobs:
        raise invalid("n", f"n: {body.n} beams exceed the limit of {max_logprobs // 2}.")
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "An answer of beam search has no prompt_logprobs.")
    if isinstance(body, CompletionBody) and body.echo and (body.logprobs is not None or body.max_tokens == 0):
        name = "max_tokens" if body.max_tokens == 0 else "logprobs"
        raise unsupported(name, "With use_beam_search echo gives the text of the prompt only.")
    for name, allowed in WITHOUT_EFFECT.items():
        value = getattr(body, name, None)
        if value is not None and value not in allowed:
            words = "may only be " + " or ".join(map(str, allowed)) if allowed else "has no effect"
            raise unsupported(name, f"With use_beam_search {name} {words}.")
    return body
