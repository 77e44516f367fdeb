"""Token ids of bad words: what the ranks need of SamplingParams.bad_words. Used by the gateway and LLM."""

from collections.abc import Iterable

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
