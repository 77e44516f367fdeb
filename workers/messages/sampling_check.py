"""Checks the values of SamplingParams where they are made, with the ranges that the gateway has for bodies of clients
(cluster/gateway/schemas/generation_body.py); and against a model, for LLM (workers/offline/offline_text.py).
Torch-free."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from tandem.workers.messages.sampling_ranges import (
    LEAST_BIAS,
    MOST_BIAS,
    Count,
    MinP,
    Penalty,
    RepetitionPenalty,
    RequestOutputKind,
    Seed,
    StructuredOutputsParams,
    Temperature,
    Text,
    TokenId,
    TopK,
    TopP,
    Whole,
)
from tandem.workers.messages.thinking import ThinkingBudget

Made = TypeVar("Made", bound=msgspec.Struct)
Ids = tuple[TokenId, ...]
SomeIds = Annotated[Ids, Meta(min_length=1)]
RANGES: Final[Mapping[str, Any]] = {
    "max_tokens": Count,
    "n": Count,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "seed": Seed | None,
    "min_tokens": Whole,
    "ignore_eos": bool,
    "stop": tuple[Text, ...],
    "stop_token_ids": Ids,
    "logprobs": Whole | None,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "repetition_penalty": RepetitionPenalty,
    "logit_bias": tuple[tuple[TokenId, Annotated[float, Meta(le=MOST_BIAS)]], ...],
    "allowed_token_ids": SomeIds | None,
    "bad_words": tuple[Text, ...],
    "bad_words_token_ids": tuple[SomeIds, ...],
    "prompt_logprobs": Whole | None,
    "skip_special_tokens": bool,
    "include_stop_str_in_output": bool,
    "thinking_budget": ThinkingBudget | None,
    "detokenize": bool,
    "output_kind": RequestOutputKind,
    "skip_reading_prefix_cache": bool | None,
    "logprob_token_ids": SomeIds | None,
}
"""Type and range of every parameter. A bias may be minus infinity, which forbids the token: JSON cannot say that."""
FORM_TYPES: Final[Mapping[str, Any]] = {
    "regex": str | None,
    "choice": Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
    "grammar": str | None,
    "json_object": bool | None,
    "disable_any_whitespace": bool,
    "whitespace_pattern": str | None,
}
"""Types of the fields of StructuredOutputsParams; json and structural_tag are read by workers/text/grammars.py."""
UNBOUNDED: Final = 2**31 - 1
"""The max_tokens of None: the context ends the answer."""
NONE_MEANS_EMPTY: Final = ("stop", "stop_token_ids", "logit_bias", "bad_words")
"""Parameters whose default is None in vLLM."""


class CheckedCalls(msgspec.StructMeta):
    """Metaclass of SamplingParams: its constructor checks. Decoded messages and msgspec.structs.replace() do not come
    through here, as msgspec makes them in C: they cost nothing more, and are never refused."""

    def __call__(cls, **given: Any) -> Any:
        """Makes one, with plain numbers and tuples. ValueError as plain_values() and check_together() raise it."""
        made = super().__call__(**plain_values(given))
        check_together(made)
        return made


def plain_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters by name as plain numbers and tuples; numbers and sequences of numpy and other libraries are
    converted. So is what vLLM takes too: one text for `stop`, a mapping for `logit_bias`, None for what may be empty
    and for a max_tokens without bound. ValueError has a parameter's name, its value and its range. Names that are no
    parameters stay as they are."""
    plain = dict(given)
    for name, value in given.items():
        if name == "structured_outputs":
            plain[name] = _checked_form(value)
        elif (kind := RANGES.get(name)) is not None:
            try:
                plain[name] = msgspec.convert(_plain(_as_vllm(name, value)), kind)
            except msgspec.ValidationError as error:
                raise _refused(f"{name}={value!r:.80}", error) from error
    return plain


def check_together(params: Any) -> None:
    """Checks plain SamplingParams. ValueError for one that another one excludes, and for what no type says."""
    for token_id, bias in params.logit_bias:
        if -math.inf < bias < LEAST_BIAS:
            raise ValueError(f"logit_bias: {bias} of token id {token_id} must be -inf or at least {LEAST_BIAS}")
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise ValueError(f"stop={params.stop!r:.80} needs detokenize=True: it is found in the text")
    thinking = params.thinking_budget
    if thinking is not None and not (thinking.tokens >= 0 and thinking.start and thinking.end):
        raise ValueError(f"thinking_budget={thinking!r}: at least 0 tokens, and two marks")


def checked_sampling(given: Made, vocab_size: int, max_logprobs: int) -> Made:
    """Returns SamplingParams that a model can take. ValueError for more log probabilities than max_logprobs, for token
    ids outside the vocabulary, and for values that the constructor refuses and has not seen."""
    made = type(given)(**msgspec.structs.asdict(given))
    params: Any = made
    if params.grammar is not None:
        raise ValueError("grammar is made from structured_outputs; give that")
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(params, name) or 0) > max_logprobs:
            raise ValueError(f"{name}={wanted} exceeds the limit of {max_logprobs} (max_logprobs)")
    thinking = params.thinking_budget
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [i for i, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_token_ids", [i for word in params.bad_words_token_ids for i in word]),
        ("logprob_token_ids", params.logprob_token_ids or ()),
        ("thinking_budget", (*thinking.start, *thinking.end) if thinking is not None else ()),
    ):
        if bad := [i for i in ids if i >= vocab_size]:
            raise ValueError(f"{name}: token id {bad[0]} is outside the vocabulary, 0 to {vocab_size - 1}")
    return made


def _checked_form(given: Any) -> StructuredOutputsParams | None:
    """Returns structured_outputs with its choices as a tuple."""
    if given is None:
        return None
    if not isinstance(given, StructuredOutputsParams):
        raise ValueError(f"structured_outputs={given!r:.80} is no StructuredOutputsParams")
    plain = {}
    for name, kind in FORM_TYPES.items():
        value = getattr(given, name)
        try:
            plain[name] = msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError as error:
            raise _refused(f"structured_outputs.{name}={value!r:.80}", error) from error
    return msgspec.structs.replace(given, **plain)


def _refused(value: str, error: msgspec.ValidationError) -> ValueError:
    """The refusal of a value, with Python's word for a sequence in place of JSON's."""
    return ValueError(f"{value}: {error}".replace("`array`", "a list"))


def _as_vllm(name: str, value: Any) -> Any:
    """Converts the ways in which vLLM writes a parameter to what it is here."""
    if value is None and name in NONE_MEANS_EMPTY:
        return ()
    if value is None and name == "max_tokens":
        return UNBOUNDED
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    return value


def _plain(value: Any) -> Any:
    """Converts numbers of any library to int and float, and sequences to tuples; returns the rest as it is."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    try:
        return tuple(map(_plain, value)) if isinstance(value, Iterable) else value
    except TypeError:  # an array without dimensions only looks as if it had items
        return value
