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
from typing import Any

from tandem.configs.errors import SettingsError, UnsupportedModelError
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
from tandem.workers.models.spec.config.config_values import ConfigValues, entries, text, whole, wrong_weights
from tandem.workers.models.spec.config.mlp_config import layer_mlps
from tandem.workers.models.spec.config.rope_config import (
    SPELLINGS,
    RopeRow,
    check_rope_keys,
    context_length,
    long_rope,
    rope_from_config,
)
from tandem.workers.models.spec.family import Family, PositionKind, Window
from tandem.workers.models.spec.family_rows.families import family_of

OVERRIDES = "--hf-overrides"
READ_BESIDE = ("architectures", "dtype", "torch_dtype", "matryoshka_dimensions", "is_matryoshka")
"""Keys of config.json that are read elsewhere."""
QUANTIZED_BESIDE = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
"""Files beside config.json that older quantized checkpoints have."""


def load_spec(folder: str | Path, overrides: Mapping[str, Any] | None = None) -> ArchSpec:
    """Reads folder/config.json, with `overrides` (--hf-overrides) replacing its keys.

    Raises SettingsError without a readable config.json, UnsupportedModelError for values that the decoder does not
    support.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}", "MODEL") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file} is not JSON: {error}", "MODEL") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} is not a JSON object", "MODEL")
    if not config.get("quantization_config"):
        for name, scheme in QUANTIZED_BESIDE.items():
            if (file.parent / name).exists():
                raise wrong_weights(f"{file.parent / name}: a checkpoint quantized by {scheme}")
    return spec_from_config(config, overrides)


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


def _spec(published: Mapping[str, Any], overrides: Mapping[str, Any]) -> ArchSpec:
    config, overridden = {**published, **overrides}, frozenset(overrides)
    architectures = config.get("architectures") or []
    if architectures == []:
        raise UnsupportedModelError(
            "config.json has no architectures: a list with the name of the model's class, such as "
            '["LlamaForCausalLM"]; docs/models.md has them',
            "MODEL",
        )
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModelError(f"config.json: architectures is {architectures!r}, want exactly one name", "MODEL")
    family = family_of(architectures[0])
    reader = ConfigValues(config, family, overridden)
    reader.check_neutral()
    num_layers, hidden_size = reader.positive("num_layers"), reader.positive("hidden_size")
    context = positions = reader.positive("context")
    attention, kind = _attention(reader, family, hidden_size), _positions(reader, family)
    rope = local = long = None
    if kind is PositionKind.ROTARY:
        for key in (key for key in SPELLINGS if key in overrides):
            check_rope_keys(key, entries(key, overrides[key] or {}), family.rotary.kinds)
        row = _rope_row(reader, family, positions, attention.rope_dim)
        if not any(published.get(key) for key in SPELLINGS):
            published = {**published, "rope_parameters": family.rotary.scaling}
        rope = local = rope_from_config(published, row, overrides)
        context = context_length(rope, positions, scaled=family.rotary.positions_scaled)
        long = long_rope(published, rope, row, overrides)
        if family.rotary.local_theta is not None:
            key, theta = family.rotary.local_theta
            base, given = reader.number(key, theta, above=0), reader.overrides(key)
            local = rope_from_config(published, replace(row, theta=base, theta_given=given, local=True), overrides)
    has_final_norm = not any(reader.holds(condition) for condition in family.no_final_norm_if)
    found = ArchSpec(
        architecture=family.architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=_layers(reader, family, num_layers, attention, kind, (rope, local)),
        max_position_embeddings=context,
        final_norm=_norm(reader, family) if has_final_norm else None,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        torch_dtype=_dtype(config, overridden),
        eos_token_ids=_eos_token_ids(reader),
        positions=Learned(positions, family.position_offset) if kind is PositionKind.LEARNED else None,
        embedding_norm=_norm(reader, family) if family.embedding_norm else None,
        embedding_scale=_scale(reader, family.scales.embeddings)
        * (hidden_size**0.5 if family.scales_embeddings else 1),
        head_bias=family.head_bias,
        logit_scale=_scale(reader, family.scales.logits) / _scale(reader, family.scales.logits_divisor, above=0),
        final_softcap=reader.number_or_none("final_logit_softcapping", above=0) if family.softcaps else None,
        short_context=0 if long is None else long.short_context,
        short_factors=() if long is None else long.short_factors,
        extra_layers=0
        if family.extra_layers is None
        else whole(family.extra_layers, reader.get(family.extra_layers, 0), 0),
    )
    _check_overrides(overrides, reader, family, rotates=kind is PositionKind.ROTARY)
    return found


def _positions(reader: ConfigValues, family: Family) -> PositionKind:
    return PositionKind.ALIBI if family.alibi_if and reader.flag(family.alibi_if) else family.positions


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
    reader: ConfigValues,
    family: Family,
    num_layers: int,
    attention: Gqa | Mla,
    kind: PositionKind,
    ropes: tuple[RopeSpec | None, RopeSpec | None],
) -> tuple[LayerSpec, ...]:
    """ropes: of layers without a window, and with one."""
    rotary, windows = _rotary_layers(reader, family, num_layers), _windows(reader, family, num_layers)
    scale = _score_scale(reader, family, attention, ropes[0])
    slopes = alibi_slopes(attention.num_heads) if kind is PositionKind.ALIBI else None
    if slopes is not None and family.scales_alibi:
        slopes = tuple(slope * scale for slope in slopes)
    softcap = reader.number_or_none("attn_logit_softcapping", above=0) if family.softcaps else None
    mlps = layer_mlps(reader, family, num_layers)
    place = next((place for condition, place in family.place_if if reader.holds(condition)), family.place)
    return tuple(
        LayerSpec(
            attention=attention,
            params=AttentionParams(scale, window, softcap, slopes),
            position=ropes[window is not None] if rotates else None,
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


def _rotary_layers(reader: ConfigValues, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer rotates: where `no_rope_layers` is 1 (sic); else all but each `interval`-th."""
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    given = reader.items_or_none("no_rope_layers")
    if given is None:
        interval = reader.positive("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(given) < num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers names {len(given)} of {num_layers} layers", "MODEL")
    unknown = [rotates for rotates in given if rotates not in (0, 1)]
    if unknown:
        raise reader.unsupported("no_rope_layers", unknown[0], ("0", "1"))
    return tuple(bool(rotates) for rotates in given[:num_layers])


def _windows(reader: ConfigValues, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where attention is full."""
    used = family.window in (Window.ALWAYS, Window.ALTERNATING, Window.PATTERN) or (
        family.window is Window.IF_USED and reader.flag("use_sliding_window")
    )
    layer_types = None if family.window is Window.NEVER else reader.items_or_none("layer_types")
    if not used or reader.get("sliding_window", None) is None:
        return (None,) * num_layers
    window = reader.positive("sliding_window")
    if family.window is Window.ALWAYS and layer_types is None:
        return (window,) * num_layers
    if family.window is Window.ALTERNATING and layer_types is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    if family.window is Window.PATTERN and layer_types is None:
        pattern = reader.positive("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if layer_types is None and family.has_no_rope_layers:
        rotary = _rotary_layers(reader, family, num_layers)
        return tuple(None if rotates else window for rotates in rotary)
    if layer_types is None:
        first = whole("max_window_layers", reader.get("max_window_layers", 28), least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    by_type = {"full_attention": None, "sliding_attention": window}
    unknown = [kind for kind in layer_types if text("layer_types", kind) not in by_type]
    if unknown:
        raise reader.unsupported("layer_types", unknown[0], tuple(by_type))
    if len(layer_types) != num_layers:
        words = f"config.json: layer_types names {len(layer_types)} layers, {reader.key('num_layers')} is {num_layers}"
        raise UnsupportedModelError(words, "MODEL")
    return tuple(by_type[kind] for kind in layer_types)


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
