"""Converts the rotary settings of config.json, in classic or transformers 5 spelling, to a RopeSpec.

Called by families.py. Torch-free; the formulas are in positions.py.
"""

from collections.abc import Mapping
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
}


def rope_from_config(config: Mapping[str, Any], theta: float, positions: int, overridden: frozenset[str]) -> RopeSpec:
    """Returns the RopeSpec. `theta`: the top-level base, used where the parameters have none; `positions` as
    config.json."""
    given = _parameters(config, overridden)
    kind = _kind(given)
    missing = [key for key in REQUIRED[kind] if given.get(key) is None]
    if missing:
        raise UnsupportedModelError(f"config.json: rope type {kind.value!r} needs {missing[0]!r}", "MODEL")
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        value = given["partial_rotary_factor"]
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {value!r} is not supported", "MODEL")
    trained = _trained_context(config, given, kind, positions)
    own_theta = given.get("rope_theta") if "rope_theta" not in overridden else None
    return RopeSpec(
        theta=float(own_theta or theta),
        kind=kind,
        factor=float(given.get("factor") or positions / trained),
        trained_context=trained,
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
    )


def context_length(rope: RopeSpec, positions: int) -> int:
    """Returns the tokens of context: config.json's, or the trained context stretched by the scaling, as vLLM counts."""
    if rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return int(positions * rope.factor)
    if rope.kind is RopeKind.YARN:
        return max(positions, int(rope.trained_context * rope.factor))
    return positions


def _parameters(config: Mapping[str, Any], overridden: frozenset[str]) -> Mapping[str, Any]:
    """Returns rope_parameters or rope_scaling: the one that the user gave, else the newer spelling, else {}."""
    keys = sorted(("rope_parameters", "rope_scaling"), key=lambda key: key not in overridden)
    given: Mapping[str, Any] = next((config[key] for key in keys if config.get(key)), {})
    nested = [value for value in given.values() if isinstance(value, dict)]
    if not nested:
        return given
    if any(value != nested[0] for value in nested[1:]):
        raise UnsupportedModelError("config.json: rope_parameters that differ between layer types", "MODEL")
    return nested[0]


def _kind(given: Mapping[str, Any]) -> RopeKind:
    value = given.get("rope_type") or given.get("type") or "default"
    try:
        return RopeKind(value)
    except ValueError:
        supported = ", ".join(RopeKind)
        raise UnsupportedModelError(
            f"config.json: rope type {value!r} is not supported; supported: {supported}", "MODEL"
        ) from None


def _trained_context(config: Mapping[str, Any], given: Mapping[str, Any], kind: RopeKind, positions: int) -> int:
    """Returns original_max_position_embeddings for the kinds that scale from it, else config.json's own positions."""
    if kind not in (RopeKind.LLAMA3, RopeKind.YARN):
        return positions
    key = "original_max_position_embeddings"
    return int(config.get(key) or given.get(key) or positions)
