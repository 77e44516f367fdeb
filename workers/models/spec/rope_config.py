"""Converts the rotary settings of config.json, in classic or transformers 5 spelling, to a RopeSpec.

Called by families.py. Torch-free; the formulas are in positions.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import RopeKind, RopeSpec

# What the spec stores that config.json must hold, per kind; the rest has defaults.
REQUIRED: Mapping[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.DYNAMIC: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: (),
    RopeKind.LONGROPE: ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRow:
    """What a family says beside the rope parameters. theta: the top-level base, used where these have none; local: this
    is the rope of layers with a window; share: the top-level part of a head that rotates, None where all of it must;
    kinds: own spellings."""

    theta: float
    positions: int
    head_dim: int
    local: bool | None = None
    share: float | None = None
    dim: int | None = None
    interleaved: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE's divisors within the trained context, which is short_context tokens."""

    short_context: int
    short_factors: tuple[float, ...]


def rope_from_config(config: Mapping[str, Any], row: RopeRow, overridden: frozenset[str]) -> RopeSpec:
    """Returns the RopeSpec. LongRoPE has its factors for a long context, unless there is none."""
    given = _parameters(config, overridden, row.local)
    kind = _kind(given, row.kinds)
    missing = [key for key in REQUIRED[kind] if given.get(key) is None]
    if missing:
        raise UnsupportedModelError(f"config.json: rope type {kind.value!r} needs {missing[0]!r}", "MODEL")
    dim = _rotating(given, row)
    trained = _trained_context(config, given, kind, row.positions)
    own_theta = given.get("rope_theta") if "rope_theta" not in overridden else None
    factors: tuple[float, ...] = ()
    if kind is RopeKind.LONGROPE:
        short, long = (_factors(given, key, dim // 2) for key in ("short_factor", "long_factor"))
        factors = long if row.positions > trained else short
    return RopeSpec(
        theta=float(own_theta or row.theta),
        kind=kind,
        factor=float(given.get("factor") or row.positions / trained),
        trained_context=trained,
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        dim=None if dim == row.head_dim else dim,
        interleaved=row.interleaved,
        factors=factors,
    )


def long_rope(config: Mapping[str, Any], rope: RopeSpec, row: RopeRow, overridden: frozenset[str]) -> LongRope | None:
    """Returns what LongRoPE does within the trained context; None for other kinds."""
    if rope.kind is not RopeKind.LONGROPE:
        return None
    given = _parameters(config, overridden, row.local)
    return LongRope(rope.trained_context, _factors(given, "short_factor", len(rope.factors)))


def _factors(given: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    factors = given[key]
    if not isinstance(factors, list) or len(factors) != count:
        words = f"{len(factors)} numbers" if isinstance(factors, list) else repr(factors)
        raise UnsupportedModelError(f"config.json: {key} of the rope parameters is {words}, want {count}", "MODEL")
    return tuple(float(factor) for factor in factors)


def _rotating(given: Mapping[str, Any], row: RopeRow) -> int:
    """Returns the elements of a head that rotate."""
    share = given.get("partial_rotary_factor")
    if row.dim is not None or row.share is None:
        if share not in (None, 1, 1.0):
            raise UnsupportedModelError(f"config.json: partial_rotary_factor {share!r} is not supported", "MODEL")
        dim = row.dim or row.head_dim
    else:
        dim = int(row.head_dim * float(row.share if share is None else share))
    if dim % 2 or not 0 < dim <= row.head_dim:
        raise UnsupportedModelError(
            f"config.json: {dim} of a head's {row.head_dim} elements rotate, want an even number of them", "MODEL"
        )
    return dim


def context_length(rope: RopeSpec, positions: int) -> int:
    """Returns the tokens of context: config.json's, or the trained context stretched by the scaling, as vLLM counts."""
    if rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return int(positions * rope.factor)
    if rope.kind is RopeKind.YARN:
        return max(positions, int(rope.trained_context * rope.factor))
    return positions


def _parameters(config: Mapping[str, Any], overridden: frozenset[str], local: bool | None) -> Mapping[str, Any]:
    """Returns rope_parameters or rope_scaling: the one that the user gave, else the newer spelling, else {}. local:
    those of layers with a window, which only the newer spelling has; None: all layers share them."""
    keys = sorted(("rope_parameters", "rope_scaling"), key=lambda key: key not in overridden)
    given: Mapping[str, Any] = next((config[key] for key in keys if config.get(key)), {})
    nested = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    if local is not None:
        kind = "sliding_attention" if local else "full_attention"
        return nested.get(kind, {} if nested or local else given)
    if not nested:
        return given
    first, *others = nested.values()
    if any(value != first for value in others):
        raise UnsupportedModelError("config.json: rope_parameters that differ between layer types", "MODEL")
    return first


def _kind(given: Mapping[str, Any], spellings: Mapping[str, str]) -> RopeKind:
    value = given.get("rope_type") or given.get("type") or "default"
    try:
        return RopeKind(spellings.get(value, value))
    except ValueError:
        supported = ", ".join(RopeKind)
        raise UnsupportedModelError(
            f"config.json: rope type {value!r} is not supported; supported: {supported}", "MODEL"
        ) from None


def _trained_context(config: Mapping[str, Any], given: Mapping[str, Any], kind: RopeKind, positions: int) -> int:
    """Returns original_max_position_embeddings for the kinds that scale from it, else config.json's own positions."""
    if kind not in (RopeKind.LLAMA3, RopeKind.YARN, RopeKind.LONGROPE):
        return positions
    key = "original_max_position_embeddings"
    return int(config.get(key) or given.get(key) or positions)
