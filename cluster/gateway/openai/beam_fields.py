"""The fields of a body with use_beam_search: what may stand beside it. `n` is the number of beams and of answers, as in
vLLM. Beams are ranked by the model's own log probabilities, so what changes those, or samples, is refused by name."""

from typing import Any, TypeVar

from tandem.cluster.gateway.openai.schemas import CommonBody, CompletionBody, invalid, unsupported

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
}
"""Fields that beam search does not honour, and the values that ask for nothing."""


def checked_beams(body: Body, max_logprobs: int) -> Body:
    """Returns the body. RequestRefused for a field that does not go with use_beam_search, or not without it, and for
    more beams than half of max_logprobs: each step asks for the log probabilities of twice as many tokens, as in vLLM.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise invalid("length_penalty", "length_penalty needs use_beam_search true.")
        return body
    if body.stream:
        raise unsupported("stream", "An answer of beam search cannot be streamed: it is known at the end.")
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
        value = getattr(body, name)
        if value is not None and value not in allowed:
            words = " or ".join(str(one) for one in allowed)
            raise unsupported(name, f"With use_beam_search {name} may only be {words}.")
    return body
