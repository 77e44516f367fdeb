"""SamplingParams as a model can take them: bad words as token ids, and a seed.

The gateway uses the ids of bad words, LLM all of it. Torch-free."""

from collections.abc import Iterable

import msgspec

from tandem.workers.messages.request import SamplingParams
from tandem.workers.messages.sampling_ranges import NO_SEED
from tandem.workers.text.tokenizer import ModelTokenizer


def bad_word_ids(tokenizer: ModelTokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of each word at the start of a text and after a space, each sequence once.

    Unlike vLLM, which leaves out the second one where it has another number of tokens than the first.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    found.pop((), None)
    return tuple(found)


def with_bad_word_ids(params: SamplingParams, tokenizer: ModelTokenizer) -> SamplingParams:
    """Returns checked parameters in which the ids of bad_words are among bad_words_token_ids."""
    if not params.bad_words:
        return params
    ids = (*params.bad_words_token_ids, *bad_word_ids(tokenizer, params.bad_words))
    return msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=ids)


def with_seed(params: SamplingParams, drawn: int) -> SamplingParams:
    """Returns parameters that have a seed: their own, else the drawn one."""
    return msgspec.structs.replace(params, seed=drawn) if params.seed in (None, NO_SEED) else params
