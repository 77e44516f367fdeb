"""Whether sampling parameters make sense: for callers that build them by hand (workers/offline.py). Torch-free.

Ranges are those in which sampling means something; the gateway checks bodies of clients itself, within the service's
own and narrower caps (cluster/gateway/openai_schemas.py).
"""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from workers.messages import SamplingParams

MOST: Final = 1e30
"""Finite, in float32 too."""
Whole = Annotated[int, Meta(ge=0)]
Signed = Annotated[float, Meta(ge=-MOST, le=MOST)]
RANGES: Final[Mapping[str, Any]] = {
    "max_tokens": Annotated[int, Meta(ge=1, le=2**31 - 1)],
    "n": Annotated[int, Meta(ge=1, le=2**31 - 1)],
    "temperature": Annotated[float, Meta(ge=0, le=MOST)],
    "top_k": Annotated[int, Meta(ge=-1)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
    "min_tokens": Whole,
    "ignore_eos": bool,
    "stop": tuple[Annotated[str, Meta(min_length=1)], ...],
    "stop_token_ids": tuple[Whole, ...],
    "logprobs": Whole | None,
    "presence_penalty": Signed,
    "frequency_penalty": Signed,
    "repetition_penalty": Annotated[float, Meta(gt=0, le=MOST)],
    "logit_bias": tuple[tuple[Whole, Annotated[float, Meta(le=MOST)]], ...],
}
"""Of every parameter. A bias of minus infinity forbids a token."""


def checked_sampling(given: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same in plain numbers and tuples (numpy's, say, are taken too). ValueError that names the parameter, its
    value and what it must be."""
    plain = {}
    for name, kind in RANGES.items():
        value = getattr(given, name)
        try:
            plain[name] = msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={value!r:.80}: {error}") from error
    params = msgspec.structs.replace(given, **plain)
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [i for i, _ in params.logit_bias])):
        if bad := [i for i in ids if i >= vocab_size]:
            raise ValueError(f"{name}: token id {bad[0]} is outside the vocabulary, 0 to {vocab_size - 1}")
    return params


def _plain(value: Any) -> Any:
    """Whole and real numbers of any library as int and float; sequences as tuples; the rest as it is."""
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
