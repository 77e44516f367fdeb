"""Converts arguments of LLM (prompts, conversations, adapters, bad words) to plain values, or raises TypeError.

Called by workers/offline.py before anything runs. The engine decides whether a prompt can be served.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from tandem.workers.messages.request import AdapterRef, SamplingParams
from tandem.workers.text.bad_word_ids import bad_word_ids
from tandem.workers.text.tokenizer import ModelTokenizer

Prompt = str | Sequence[int]
NO_PROMPT = "a prompt is text or a list of token ids, not"


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts as a list, each a text or a list of token ids. TypeError for any other type."""
    if isinstance(given, str):
        return [given]
    many = _items(given)
    if many and _is_id(many[0]):
        return [_as_ids(many)]
    return [prompt if isinstance(prompt, str) else _as_ids(prompt) for prompt in many]


def as_conversations(given: Any) -> list[Sequence[Mapping[str, Any]]]:
    """Returns the conversations as a list, each a list of messages. TypeError for any other type."""
    many = [given] if isinstance(given, Sequence) and given and isinstance(given[0], Mapping) else given
    if isinstance(many, str | Mapping) or not isinstance(many, Iterable):
        raise TypeError(f"a conversation is a list of messages, not {given!r:.80}")
    conversations = list(many)
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not all(isinstance(m, Mapping) for m in conversation):
            raise TypeError(f"a conversation is a list of messages, not {conversation!r:.80}")
    return conversations


def one_for_each(given: AdapterRef | Sequence[AdapterRef | None] | None, count: int) -> list[AdapterRef | None]:
    """Returns an adapter or None for each of `count` prompts. TypeError or ValueError for another type or number."""
    if given is None or isinstance(given, AdapterRef):
        return [given] * count
    adapters = list(given)
    if wrong := [one for one in adapters if one is not None and not isinstance(one, AdapterRef)]:
        raise TypeError(f"lora_request: {wrong[0]!r:.80} is not what load_adapter() returned")
    if len(adapters) != count:
        raise ValueError(f"{len(adapters)} lora_requests for {count} prompts")
    return adapters


def with_bad_word_ids(params: SamplingParams, tokenizer: ModelTokenizer) -> SamplingParams:
    """Returns checked parameters in which the ids of bad_words are among bad_words_token_ids."""
    if not params.bad_words:
        return params
    ids = (*params.bad_words_token_ids, *bad_word_ids(tokenizer, params.bad_words))
    return msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=ids)


def _as_ids(prompt: Any) -> list[int]:
    """Converts token ids of any library to a list of ints. TypeError for anything else."""
    items = _items(prompt)
    if not all(map(_is_id, items)):
        raise TypeError(f"{NO_PROMPT} {prompt!r:.80}")
    return list(map(operator.index, items))


def _items(given: Any) -> list[Any]:
    """Returns the items of a list, an array or an iterator. TypeError for other types, mappings, sets and bytes."""
    try:
        if not isinstance(given, bytes | bytearray | Mapping | Set):
            return list(given)
    except TypeError:  # a number, an array without dimensions
        pass
    raise TypeError(f"{NO_PROMPT} {given!r:.80}")


def _is_id(value: object) -> bool:
    """Returns whether a value is a whole number of any library; arrays of one item and booleans are not."""
    if isinstance(value, bool) or bool(getattr(value, "ndim", None)) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
