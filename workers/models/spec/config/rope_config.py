"""Converts the rotary settings of config.json, in classic or transformers 5 spelling, to a RopeSpec.

Called by families.py. Torch-free; the formulas are in positions.py.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import RopeKind, RopeSpec
from tandem.workers.models.spec.config.config_values import entries, flag, items, number, text, whole

# What the spec stores that config.json must hold, per kind; the rest has defaults.
REQUIRED: Mapping[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.DYNAMIC: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: (),
    RopeKind.LONGROPE: ("short_factor", "long_factor"),
}
TRAINED = "original_max_position_embeddings"
SPELLINGS = ("rope_parameters", "rope_scaling")
KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
)
"""The keys of rope parameters that are read."""
KEPT = ("rope_theta", "partial_rotary_factor")
"""Keys that a model keeps where the user's rope parameters lack it."""
OF_ANY = ("rope_type", "type", *KEPT)
OF_KIND: Mapping[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.DYNAMIC: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    RopeKind.YARN: (
        *("factor", TRAINED, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    RopeKind.LONGROPE: ("short_factor", "long_factor", "factor", TRAINED, "attention_factor"),
}
"""The keys of rope parameters that change what is computed: of any kind, and of each."""
LAYER_KINDS = ("full_attention", "sliding_attention")
"""Keys of rope parameters with a rope for each kind of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRow:
    """Statements of a family beside the rope parameters."""

    theta: float  # the top-level base, used where the rope parameters have none or the user gave it
    positions: int
    head_dim: int
    theta_given: bool = False  # the user gave it
    local: bool | None = None  # this is the rope of layers with a window; None: there is no such rope
    share: float | None = None  # the top-level part of a head that rotates; None: all of it must
    share_given: bool = False  # the user gave it
    trained: int | None = None  # the top-level trained context
    default_trained: int | None = None  # the family's own, where none is given
    dim: int | None = None
    interleaved: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)  # own spellings of RopeKind


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE's divisors within the trained context, which is short_context tokens."""

    short_context: int
    short_factors: tuple[float, ...]


def rope_from_config(config: Mapping[str, Any], row: RopeRow, overrides: Mapping[str, Any]) -> RopeSpec:
    """Returns the RopeSpec of config.json under the user's overrides. LongRoPE has its factors for a long context,
    unless there is none."""
    given = _parameters(config, overrides, row)
    kind = _kind(given, row.kinds)
    missing = [key for key in REQUIRED[kind] if key not in given]
    if missing:
        raise UnsupportedModelError(f"config.json: rope type {kind.value!r} needs {missing[0]!r}", "MODEL")
    dim = _rotating(given, row)
    by_user = any(key in overrides for key in SPELLINGS)
    trained = _trained_context(given, kind, row, by_user=by_user)
    factors: tuple[float, ...] = ()
    if kind is RopeKind.LONGROPE:
        short, long = (_factors(given, key, dim // 2) for key in ("short_factor", "long_factor"))
        factors = long if row.positions > trained else short
    rope = RopeSpec(
        theta=row.theta if row.theta_given else _number(given, "rope_theta", row.theta),
        kind=kind,
        factor=_number(given, "factor", row.positions / trained),
        trained_context=trained,
        low_freq_factor=_number(given, "low_freq_factor", 1.0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=flag(_named("truncate"), given.get("truncate", True)),
        attention_factor=_number_or_none(given, "attention_factor"),
        mscale=_number_or_none(given, "mscale"),
        mscale_all_dim=_number_or_none(given, "mscale_all_dim"),
        dim=None if dim == row.head_dim else dim,
        interleaved=row.interleaved,
        factors=factors,
    )
    _check_formula(rope, dim)
    return rope


def _check_formula(rope: RopeSpec, dim: int) -> None:
    """UnsupportedModelError for numbers that the kind's formula (layers/positions.py) divides by zero with, each of
    them right for another kind. dim: elements of a head that rotate."""
    problem = None
    if rope.kind is RopeKind.YARN and rope.theta == 1:
        problem = "rope_theta is 1, want another number"
    if rope.kind is RopeKind.LONGROPE and rope.attention_factor is None and rope.factor > 1 >= rope.trained_context:
        problem = f"{TRAINED} is {rope.trained_context}, want more than 1 without an attention_factor"
    if rope.kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        problem = f"high_freq_factor is {rope.high_freq_factor}, want more than low_freq_factor {rope.low_freq_factor}"
    if rope.kind is RopeKind.DYNAMIC and dim == 2:
        problem = "2 elements of a head rotate, want more"
    if problem is not None:
        raise UnsupportedModelError(f"config.json: rope type {rope.kind.value!r}: {problem}", "MODEL")


def long_rope(config: Mapping[str, Any], rope: RopeSpec, row: RopeRow, overrides: Mapping[str, Any]) -> LongRope | None:
    """Returns what LongRoPE does within the trained context; None for other kinds."""
    if rope.kind is not RopeKind.LONGROPE:
        return None
    given = _parameters(config, overrides, row)
    return LongRope(rope.trained_context, _factors(given, "short_factor", len(rope.factors)))


def check_rope_keys(name: str, given: Mapping[str, Any] | None, spellings: Mapping[str, str]) -> None:
    """UnsupportedModelError for a key of the user's rope parameters that nothing reads. name: of the parameters.
    spellings: the family's own of RopeKind."""
    values = {key: value for key, value in (given or {}).items() if value is not None}
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    for key in values:
        if key not in (known := LAYER_KINDS if key in nested else KEYS):
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise _unread(name, key, f"one of {', '.join(known)}{hint}")
        if nested and key not in nested:
            raise _unread(name, key, f"read beside {next(iter(nested))}")
    for key, value in nested.items():
        check_rope_keys(f"{name}.{key}", value, spellings)
    kind = _kind({} if nested else values, spellings)
    for key in values:
        if key not in (*nested, *OF_ANY, *OF_KIND[kind]):
            raise _unread(name, key, f"read by the rope type {kind.value!r}")


def _unread(name: str, key: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}.{key} is not {what}", "--hf-overrides")


def _named(key: str) -> str:
    return f"{key} of the rope parameters"


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    return number(_named(key), given.get(key, default), above=0)


def _number_or_none(given: Mapping[str, Any], key: str) -> float | None:
    return number(_named(key), given[key]) if key in given else None


def _factors(given: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    factors = items(_named(key), given[key])
    if len(factors) != count:
        raise UnsupportedModelError(f"config.json: {_named(key)} is {len(factors)} numbers, want {count}", "MODEL")
    return tuple(number(_named(key), factor, above=0) for factor in factors)


def _rotating(given: Mapping[str, Any], row: RopeRow) -> int:
    """Returns the elements of a head that rotate."""
    share = _number(given, "partial_rotary_factor", 1.0 if row.share is None else row.share)
    if row.dim is not None or row.share is None:
        if share != 1:
            raise UnsupportedModelError(f"config.json: partial_rotary_factor {share!r} is not supported", "MODEL")
        dim = row.dim or row.head_dim
    else:
        dim = int(row.head_dim * (row.share if row.share_given else share))
    if dim % 2 or not 0 < dim <= row.head_dim:
        raise UnsupportedModelError(
            f"config.json: {dim} of a head's {row.head_dim} elements rotate, want an even number of them", "MODEL"
        )
    return dim


def context_length(rope: RopeSpec, positions: int, *, scaled: bool = False) -> int:
    """Returns the tokens of context: config.json's, or the trained context stretched by the scaling, as vLLM counts.
    scaled: config.json's are stretched already."""
    if not scaled and rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return int(positions * rope.factor)
    if not scaled and rope.kind is RopeKind.YARN:
        return max(positions, int(rope.trained_context * rope.factor))
    return positions


def _parameters(config: Mapping[str, Any], overrides: Mapping[str, Any], row: RopeRow) -> Mapping[str, Any]:
    """Returns the rope parameters of the layers that a row is about, without nulls: the user's, with what is KEPT, else
    config.json's."""
    newer, older = (_of_layers(config, key, row.local) if config.get(key) else {} for key in SPELLINGS)
    user = [_of_layers(overrides, key, row.local) for key in SPELLINGS if key in overrides]
    if user:
        kept = {key: value for key, value in {**newer, **older}.items() if key in KEPT}
        return {**kept, **user[0]}
    if row.local is False and not config.get(SPELLINGS[0]):
        newer = {"rope_type": RopeKind.DEFAULT.value}
    if newer and older:
        return _both(newer, older, row)
    return older or newer


def _both(newer: Mapping[str, Any], older: Mapping[str, Any], row: RopeRow) -> Mapping[str, Any]:
    """Returns what rope_parameters (newer) and rope_scaling (older) beside each other mean to transformers: the older
    one takes the other's place, or where layers with a window have a rope of their own is added to the other's.
    UnsupportedModelError where a number or the kind of scaling would get lost by that."""
    newer_key, older_key = SPELLINGS
    if row.local is not None:
        kind, own = older.get("type"), newer.get("rope_type")
        if "rope_type" not in older and None not in (kind, own) and kind != own:
            raise UnsupportedModelError(
                f"config.json: {older_key} has the type {kind!r}, which does not count in transformers beside the "
                f"rope_type {own!r} of these layers; write it as rope_type",
                "MODEL",
            )
        return {**newer, **older}
    plain = {"rope_theta": row.theta, "partial_rotary_factor": 1.0 if row.share is None else row.share}
    for key in (key for key in KEPT if key in newer and key not in older and newer[key] != plain[key]):
        raise UnsupportedModelError(
            f"config.json: {older_key} takes the place of {newer_key} in transformers, whose {key} {newer[key]!r} "
            f"becomes {plain[key]!r} by that; say {key} in {older_key} too",
            "MODEL",
        )
    return older


def check_rope_layers(config: Mapping[str, Any]) -> None:
    """UnsupportedModelError for rope parameters of config.json, of a family whose layers with a window have a rope of
    their own, that transformers does not take: each kind of layer has its parameters in the newer spelling, and the
    older one is about layers without a window."""
    newer, older = (entries(key, config.get(key) or {}) for key in SPELLINGS)
    if newer and not any(isinstance(value, dict) for value in newer.values()):
        raise UnsupportedModelError(
            f"config.json: {SPELLINGS[0]} is not one of {' and '.join(LAYER_KINDS)}, each with its own", "MODEL"
        )
    if any(isinstance(value, dict) for value in older.values()):
        raise UnsupportedModelError(f"config.json: {SPELLINGS[1]} has no kinds of layers; {SPELLINGS[0]} has", "MODEL")


def rope_remarks(config: Mapping[str, Any], overrides: Mapping[str, Any], *, adds: bool) -> tuple[str, ...]:
    """Returns a line where config.json says rope parameters twice, none where the user says them. adds: the older
    spelling is added to the newer one."""
    newer, older = (config.get(key) for key in SPELLINGS)
    if not newer or not older or newer == older or any(key in overrides for key in SPELLINGS):
        return ()
    words = "is added to it" if adds else "takes its place"
    return (f"config.json has {SPELLINGS[1]} beside {SPELLINGS[0]}: it {words}, as in transformers",)


def _of_layers(config: Mapping[str, Any], key: str, local: bool | None) -> Mapping[str, Any]:
    """Returns the parameters that the object at a key has for these layers."""
    given = entries(key, config[key] or {})
    nested = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    if local is not None:
        kind = "sliding_attention" if local else "full_attention"
        given = nested.get(kind, {} if nested or local else given)
    elif nested:
        given, *others = nested.values()
        if any(other != given for other in others):
            raise UnsupportedModelError("config.json: rope_parameters that differ between layer types", "MODEL")
    return {key: value for key, value in given.items() if value is not None}


def _kind(given: Mapping[str, Any], spellings: Mapping[str, str]) -> RopeKind:
    value = text(_named("rope_type"), given.get("rope_type") or given.get("type") or "default")
    try:
        return RopeKind(spellings.get(value, value))
    except ValueError:
        supported = ", ".join(RopeKind)
        raise UnsupportedModelError(
            f"config.json: rope type {value!r} is not supported; supported: {supported}", "MODEL"
        ) from None


def _trained_context(given: Mapping[str, Any], kind: RopeKind, row: RopeRow, *, by_user: bool) -> int:
    """Returns original_max_position_embeddings for the kinds that scale from it, else config.json's own positions.
    by_user: the user gave the rope parameters, which then win over the top level."""
    if kind not in (RopeKind.LLAMA3, RopeKind.YARN, RopeKind.LONGROPE):
        return row.positions
    own = whole(_named(TRAINED), given[TRAINED]) if TRAINED in given else None
    first, second = (own, row.trained) if by_user else (row.trained, own)
    return first or second or row.default_trained or row.positions
