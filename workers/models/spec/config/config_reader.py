"""config.json to ArchSpec, by the family's row.

`load_spec` is called by the launcher, the coordinator, the gateway and the ranks, so nothing here imports torch. Both
the classic keys (rope_theta, rope_scaling, torch_dtype) and those of transformers 5 (rope_parameters, dtype,
layer_types) are read. What the decoder cannot compute is refused by name, never ignored.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.parallel.stored.headers import has_other_weights, no_weights, unfinished_words
from tandem.workers.models.spec.arch import (
    ArchSpec,
    AttentionParams,
    Gqa,
    LayerSpec,
    Learned,
    Mla,
    Norm,
    RopeSpec,
)
from tandem.workers.models.spec.config.classifier_config import CLASSIFIER_KEYS, generating
from tandem.workers.models.spec.config.config_values import ConfigValues, entries, whole
from tandem.workers.models.spec.config.layer_patterns import layer_windows, rotary_layers
from tandem.workers.models.spec.config.mlp_config import layer_mlps
from tandem.workers.models.spec.config.other_kinds import other_kind
from tandem.workers.models.spec.config.rope_config import (
    SPELLINGS,
    LongRope,
    RopeRow,
    check_rope_keys,
    check_rope_layers,
    context_length,
    long_rope,
    rope_from_config,
    rope_remarks,
)
from tandem.workers.models.spec.config.stored_head import with_stored_head
from tandem.workers.models.spec.family import Family, PositionKind
from tandem.workers.models.spec.family_rows.families import family_of, short_names
from tandem.workers.models.spec.weights.weight_config import chosen_plan, stored_plan, with_files_beside

OVERRIDES = "--hf-overrides"
QUANTIZATION = ("quantization_config",)
READ_BESIDE = (
    "architectures",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "matryoshka_dimensions",
    "is_matryoshka",
    *CLASSIFIER_KEYS,
)
"""Keys of config.json that are read elsewhere."""


def load_spec(
    folder: str | Path, overrides: Mapping[str, Any] | None = None, quantization: str | None = None
) -> ArchSpec:
    """Reads folder/config.json, with `overrides` (--hf-overrides) replacing its keys, and whether the weights beside it
    have a head of their own. quantization: --quantization.

    Raises SettingsError without a readable config.json, UnsupportedModelError for values that the decoder does not
    support.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _no_config(file.parent) from error
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}", "MODEL") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file} is not JSON: {error}", "MODEL") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} is not a JSON object", "MODEL")
    spec = spec_from_config(with_files_beside(config, file.parent), overrides)
    spec = replace(spec, weights=chosen_plan(spec.weights, quantization))
    return with_stored_head(spec, file.parent, family_of(spec.architecture).names)


def _no_config(folder: Path) -> SettingsError:
    """Returns the error for a folder that holds no config.json, which names what it holds instead."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if has_other_weights(names) and not any(name.endswith(".safetensors") for name in names):
        return no_weights(str(folder), names)
    if "model_index.json" in names:
        return UnsupportedModelError(f"{folder} holds a pipeline of diffusers: Tandem serves text only", "MODEL")
    why = unfinished_words(folder) or "it is no folder of a model in transformers' format"
    return SettingsError(f"{folder} holds no config.json: {why}", "MODEL")


def spec_from_config(published: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ArchSpec:
    """Returns the ArchSpec of config.json's keys. `overrides`: what the user gave, which wins, also over other
    spellings. UnsupportedModelError, with the flag of overrides where config.json alone would not raise it."""
    try:
        return _spec(published, overrides or {})
    except UnsupportedModelError as error:
        if not overrides or str(error) == _complaint(published):
            raise
        words = str(error).removeprefix("MODEL: ").removeprefix("config.json: ")
        raise UnsupportedModelError(words, OVERRIDES) from error


def _complaint(published: Mapping[str, Any]) -> str | None:
    """Returns the words with which config.json alone is refused."""
    try:
        _spec(published, {})
    except UnsupportedModelError as error:
        return str(error)
    return None


def _check_overrides(overrides: Mapping[str, Any], reader: ConfigValues, family: Family, *, rotates: bool) -> None:
    """UnsupportedModelError for the first override that nothing has read. reader: has read what it reads."""
    architecture = family.architecture
    asked = {*READ_BESIDE, *reader.asked, *(SPELLINGS if rotates else ())}
    if all(overrides.get(key) for key in SPELLINGS):
        raise UnsupportedModelError(f"{' and '.join(SPELLINGS)} are two names of one thing", OVERRIDES)
    for key, value in overrides.items():
        inside = {name.partition(".")[2] for name in asked if name.startswith(f"{key}.")}
        if key not in asked and not inside:
            close = difflib.get_close_matches(key, asked, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UnsupportedModelError(f"{key} is not a key that {architecture} reads{hint}", OVERRIDES)
        unread = sorted(set(value) - inside) if inside and isinstance(value, Mapping) else []
        if unread:
            raise UnsupportedModelError(f"{key}.{unread[0]} is not a key that {architecture} reads", OVERRIDES)


class _Positions(NamedTuple):
    """The way in which a model tells tokens their positions."""

    kind: PositionKind
    context: int  # tokens, rope scaling included
    learned: Learned | None = None
    rope: RopeSpec | None = None  # of layers without a window
    local: RopeSpec | None = None  # of layers with one
    remarks: tuple[str, ...] = ()
    short: LongRope = LongRope(0, ())


def _spec(published: Mapping[str, Any], overrides: Mapping[str, Any]) -> ArchSpec:
    config = {**published, **overrides}
    family = _family(config)
    reader = ConfigValues(config, family, frozenset(overrides))
    reader.check_neutral()
    num_layers, hidden_size, context = map(reader.positive, ("num_layers", "hidden_size", "context"))
    attention = _attention(reader, family, hidden_size)
    positions = _positions(reader, family, published, overrides, context, attention.rope_dim)
    layers = _layers(reader, family, num_layers, attention, positions)
    found = _model(reader, family, hidden_size, layers, positions, _dtype(config, frozenset(overrides)))
    _check_overrides(overrides, reader, family, rotates=positions.kind is PositionKind.ROTARY)
    plan = stored_plan(config)
    return replace(found, weights=plan, remarks=(*found.remarks, *plan.remarks))


def _family(config: Mapping[str, Any]) -> Family:
    """Returns the row of config.json's architecture. UnsupportedModelError, which says what another model is."""
    architecture = _architecture(config)
    try:
        return family_of(architecture)
    except UnsupportedModelError as error:
        if (kind := other_kind(str(architecture), config)) is None:
            raise
        raise UnsupportedModelError(f"{architecture} {kind}", "MODEL") from error


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the one name in config.json's architectures."""
    architectures = config.get("architectures") or []
    if architectures == []:
        raise UnsupportedModelError(
            "config.json has no architectures: a list with the name of the model's class, such as "
            f'["LlamaForCausalLM"]; supported are {short_names()}',
            "MODEL",
        )
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModelError(f"config.json: architectures is {architectures!r}, want exactly one name", "MODEL")
    return generating(architectures[0], config)


def _model(
    reader: ConfigValues,
    family: Family,
    hidden_size: int,
    layers: tuple[LayerSpec, ...],
    positions: _Positions,
    dtype: str | None,
) -> ArchSpec:
    return ArchSpec(
        architecture=family.architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        max_position_embeddings=positions.context,
        final_norm=None if any(map(reader.holds, family.no_final_norm_if)) else _norm(reader, family),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        torch_dtype=dtype,
        eos_token_ids=_eos_token_ids(reader),
        positions=positions.learned,
        embedding_norm=_norm(reader, family) if family.embedding_norm else None,
        embedding_scale=_embedding_scale(reader, family, hidden_size),
        head_bias=family.head_bias,
        logit_scale=_scale(reader, family.scales.logits) / _scale(reader, family.scales.logits_divisor, above=0),
        final_softcap=reader.number_or_none("final_logit_softcapping", above=0) if family.softcaps else None,
        short_context=positions.short.short_context,
        short_factors=positions.short.short_factors,
        remarks=positions.remarks,
        extra_layers=_extra_layers(reader, family),
    )


def _positions(
    reader: ConfigValues,
    family: Family,
    published: Mapping[str, Any],
    overrides: Mapping[str, Any],
    context: int,
    rope_dim: int,
) -> _Positions:
    """context: config.json's. rope_dim: elements of a head that may rotate."""
    kind = PositionKind.ALIBI if family.alibi_if and reader.flag(family.alibi_if) else family.positions
    if kind is PositionKind.LEARNED:
        return _Positions(kind, context, Learned(context, family.position_offset))
    if kind is PositionKind.ALIBI:
        return _Positions(kind, context)
    for key in (key for key in SPELLINGS if key in overrides):
        check_rope_keys(key, entries(key, overrides[key] or {}), family.rotary.kinds)
    if family.rotary.local_theta is not None:
        check_rope_layers(published)
    remarks = rope_remarks(published, overrides, adds=family.rotary.local_theta is not None)
    if not any(published.get(key) for key in SPELLINGS):
        published = {**published, "rope_parameters": family.rotary.scaling}
    row = _rope_row(reader, family, context, rope_dim)
    rope = rope_from_config(published, row, overrides)
    total = context_length(rope, context, scaled=family.rotary.positions_scaled)
    short = long_rope(published, rope, row, overrides) or LongRope(0, ())
    local = rope if (own := _local_row(reader, family, row)) is None else rope_from_config(published, own, overrides)
    return _Positions(kind, total, None, rope, local, remarks, short)


def _local_row(reader: ConfigValues, family: Family, row: RopeRow) -> RopeRow | None:
    """Returns the row of layers with a window, None where they have the rope of the others."""
    if family.rotary.local_theta is None:
        return None
    key, theta = family.rotary.local_theta
    base, given = reader.number(key, theta, above=0), reader.overrides(key)
    return replace(row, theta=base, theta_given=given, local=True)


def _embedding_scale(reader: ConfigValues, family: Family, hidden_size: int) -> float:
    by_width = hidden_size**0.5 if family.scales_embeddings else 1.0
    return _scale(reader, family.scales.embeddings) * by_width


def _extra_layers(reader: ConfigValues, family: Family) -> int:
    key = family.extra_layers
    return 0 if key is None else whole(reader.spelled(key), reader.get(key, 0), 0)


def _scale(reader: ConfigValues, key: str | None, above: float = -math.inf) -> float:
    """Returns a factor, 1 where there is none."""
    value = reader.number_or_none(key, above)
    return 1.0 if value is None else value


def _rope_row(reader: ConfigValues, family: Family, positions: int, head_dim: int) -> RopeRow:
    rotary, trained = family.rotary, "original_max_position_embeddings"
    return RopeRow(
        theta=reader.number(rotary.theta, 10000.0, above=0),
        theta_given=reader.overrides(rotary.theta),
        positions=positions,
        head_dim=head_dim,
        local=None if rotary.local_theta is None else False,
        share=None if rotary.share is None else reader.number(rotary.share, rotary.default_share, above=0),
        share_given=rotary.share is not None and reader.overrides(rotary.share),
        trained=reader.positive(trained) if reader.has(trained) else None,
        default_trained=family.defaults.get(trained),
        dim=None if rotary.dim is None else reader.positive(rotary.dim),
        interleaved=reader.flag(rotary.interleaved),
        kinds=rotary.kinds,
    )


def _layers(
    reader: ConfigValues, family: Family, num_layers: int, attention: Gqa | Mla, positions: _Positions
) -> tuple[LayerSpec, ...]:
    rotary, windows = rotary_layers(reader, family, num_layers), layer_windows(reader, family, num_layers)
    scale = _score_scale(reader, family, attention, positions.rope)
    slopes = alibi_slopes(attention.num_heads) if positions.kind is PositionKind.ALIBI else None
    if slopes is not None and family.scales_alibi:
        slopes = tuple(slope * scale for slope in slopes)
    softcap = reader.number_or_none("attn_logit_softcapping", above=0) if family.softcaps else None
    mlps = layer_mlps(reader, family, num_layers)
    place = next((place for condition, place in family.place_if if reader.holds(condition)), family.place)
    return tuple(
        LayerSpec(
            attention=attention,
            params=AttentionParams(scale, window, softcap, slopes),
            position=None if not rotates else positions.rope if window is None else positions.local,
            norm=_norm(reader, family),
            mlp=mlp,
            place=place,
            branch_scale=_scale(reader, family.scales.branches),
        )
        for rotates, window, mlp in zip(rotary, windows, mlps, strict=True)
    )


def _score_scale(reader: ConfigValues, family: Family, attention: Gqa | Mla, rope: RopeSpec | None) -> float:
    given = reader.number_or_none(family.scales.scores)
    if given is not None:
        return given
    if isinstance(attention, Mla):
        return attention.key_dim**-0.5 * (1.0 if rope is None else rope.score_mscale**2)
    return float((reader.number_or_none(family.score_scale, above=0) or attention.head_dim) ** -0.5)


def _latent_attention(reader: ConfigValues, family: Family) -> Mla:
    q_rank = reader.get("q_lora_rank", None)
    return Mla(
        num_heads=reader.positive("num_heads"),
        q_rank=None if q_rank is None else whole("q_lora_rank", q_rank),
        kv_rank=reader.positive("kv_lora_rank"),
        nope_dim=reader.positive("qk_nope_head_dim"),
        rope_dim=reader.positive("qk_rope_head_dim"),
        v_dim=reader.positive("v_head_dim"),
        bias=reader.flag(family.qkv_bias),
    )


def _attention(reader: ConfigValues, family: Family, hidden_size: int) -> Gqa | Mla:
    if family.latent:
        return _latent_attention(reader, family)
    num_heads = reader.positive("num_heads")
    num_kv_heads = reader.positive("num_kv_heads", num_heads)
    if family.one_kv_head_if and all(reader.holds(condition) for condition in family.one_kv_head_if):
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        key = reader.key("num_kv_heads")
        raise UnsupportedModelError(
            f"config.json: {key} {num_kv_heads} does not divide {reader.key('num_heads')} {num_heads}", "MODEL"
        )
    return Gqa(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=reader.positive("head_dim", hidden_size // num_heads),
        qkv_bias=reader.flag(family.qkv_bias),
        o_bias=reader.flag(family.o_bias),
        qk_norm=family.qk_norm if family.qk_norm_if is None or reader.flag(family.qk_norm_if) else None,
        sinks=family.sinks,
    )


def _norm(reader: ConfigValues, family: Family) -> Norm:
    return Norm(
        reader.number(reader.key("norm_eps"), 1e-6),
        family.norm,
        family.norms_store_offset,
        bias=family.norm_bias,
        weight=family.norm_weight,
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns ALiBi's slope of each head (Press et al. 2021): powers of 2 ** (-8 / n) for n heads, n the greatest power
    of two in num_heads; then every other one of those for 2 n heads."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    more = [2 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return (*slopes, *more)


def _dtype(config: Mapping[str, Any], overridden: frozenset[str]) -> str | None:
    """`dtype` or `torch_dtype`, whichever the user gave, else the newer spelling."""
    keys = sorted(("dtype", "torch_dtype"), key=lambda key: key not in overridden)
    value = next((config[key] for key in keys if config.get(key)), None)
    return None if value in (None, "auto") else str(value).removeprefix("torch.")


def _eos_token_ids(reader: ConfigValues) -> tuple[int, ...]:
    key = "eos_token_id"
    value = reader.get(key, [])
    ids = value if isinstance(value, list) else [value]
    return tuple(whole(key, each, least=-1) for each in ids)
