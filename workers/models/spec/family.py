"""Family: the row of data that says how an architecture's config.json and checkpoint have what ArchSpec needs.

The rows are in family_rows/; config_reader.py reads config.json by a row, parameters.py names parameters by it.
Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.workers.models.spec.arch import NormKind, Place, QkNorm, Scoring
from tandem.workers.models.spec.parameter_names import ParameterNames

Condition = tuple[str, Any]
"""A key of config.json and the value that it must have."""


class Window(Enum):
    """The condition under which a family's `sliding_window` applies."""

    NEVER = "never"
    ALWAYS = "always"
    IF_USED = "if_used"  # with `use_sliding_window`, on the layers that `layer_types` or `max_window_layers` name
    ALTERNATING = "alternating"  # on every other layer from the first on, or where `layer_types` says
    PATTERN = "pattern"  # on all but each `sliding_window_pattern`-th layer, or where `layer_types` says


class PositionKind(Enum):
    """The way in which a family tells tokens their positions."""

    ROTARY = "rotary"
    LEARNED = "learned"  # a table that is added to the embeddings
    ALIBI = "alibi"  # a bias on the scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotation of a family. theta: the key of the base. share: the key of the part of a head that rotates, which may
    stand in the rope parameters too, and its default; None: all rotates, or `dim` is the key of how much. interleaved:
    as in RopeSpec, or the key that says so. kinds: own spellings of RopeKind. local_theta: the key and default of the
    base in layers with a window, which have an unscaled rope of their own. positions_scaled: config.json's positions
    count the scaling already. scaling: the rope parameters of a config.json without any."""

    theta: str = "rope_theta"
    share: str | None = None
    default_share: float = 1.0
    dim: str | None = None
    interleaved: bool | str = False
    kinds: Mapping[str, str] = field(default_factory=dict)
    local_theta: tuple[str, float] | None = None
    positions_scaled: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """config.json's keys of numbers that multiply what is computed, None where a family has none. scores: in place of
    the inverse square root of head_dim. logits_divisor: divides logits."""

    embeddings: str | None = None
    branches: str | None = None
    scores: str | None = None
    logits: str | None = None
    logits_divisor: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that a family has."""
        found = (self.embeddings, self.branches, self.scores, self.logits, self.logits_divisor)
        return tuple(key for key in found if key is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeKeys:
    """config.json's keys of a mixture of experts. width: of an expert, None: the MLP's own key. renormalize: True, or
    the key that sets it. shared: of the shared expert's width, None without one; shared_count: of how many experts'
    width it has. scale: of what multiplies weights. correction: the router has one (Moe). groups: None without; they
    count under `grouped_if` only, None: always. biased: router and experts have biases. swiglu: the keys of
    ClampedSwiglu's alpha and limit, None where experts have a plain activation.

    first: the key of how many layers at the beginning have an MLP in place of experts. every: the key of n where only
    each n-th layer has experts, counted from 1 if counts_from_one, else from 0. dense: the key of the list of layers
    with an MLP.
    """

    num_experts: str
    top_k: str
    width: str | None = None
    renormalize: bool | str = True
    shared: str | None = None
    shared_count: str | None = None
    scoring: Scoring = Scoring.SOFTMAX
    scale: str | None = None
    correction: bool = False
    groups: "GroupKeys | None" = None
    grouped_if: Condition | None = None
    first: str | None = None
    every: str | None = None
    counts_from_one: bool = False
    dense: str | None = None
    biased: bool = False
    swiglu: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKeys:
    """config.json's keys of ExpertGroups, and its `best`."""

    count: str
    taken: str
    best: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. A bias is True, False, or the config key that sets it. Keys inside an object of config.json are
    spelled with a dot.

    keys: config.json's names of what LLAMA_KEYS lists, where they differ. defaults: the values of absent keys, by
    config.json's names. gated: the MLP has a gate. moe: its MLPs are the experts of a mixture. activations: own
    spellings of Activation. norm_bias: a LayerNorm has one. norm_weight: norms have one. norms_store_offset: see Norm.
    latent: attention is latent (Mla). sinks: heads have one (Gqa). extra_layers: the key of how many layers a
    checkpoint may have behind the last.
    qk_norm: the kind of norm of q and k, qk_norm_if: the key that says whether there is one. place_if: places of norms
    under conditions, of which the first that holds counts, else `place`. no_final_norm_if: any of these takes the last
    norm away. one_kv_head_if: all of these make it one.

    alibi_if: the key that makes ALIBI of the positions; scales_alibi: slopes are multiplied as scores are.
    position_offset: rows of the table that nothing uses. scales_embeddings: by the square root of the hidden size.
    score_scale: the key of the number whose inverse square root scales scores, None: head_dim. softcaps: whether
    attn_logit_softcapping and final_logit_softcapping apply. neutral: further keys that are accepted with these values
    only; equal: keys that must agree with another; also: other spellings of keys, which win where both are given.
    aliases: other names of the architecture.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    latent: bool = False
    sinks: bool = False
    extra_layers: str | None = None
    qk_norm: QkNorm | None = None
    qk_norm_if: str | None = None
    norm: NormKind = NormKind.RMS
    norm_bias: bool = True
    norm_weight: bool = True
    norms_store_offset: bool = False
    place: Place = Place.PRE
    place_if: tuple[tuple[Condition, Place], ...] = ()
    no_final_norm_if: tuple[Condition, ...] = ()
    one_kv_head_if: tuple[Condition, ...] = ()
    gated: bool = True
    moe: MoeKeys | None = None
    activations: Mapping[str, str] = field(default_factory=dict)
    positions: PositionKind = PositionKind.ROTARY
    position_offset: int = 0
    alibi_if: str | None = None
    scales_alibi: bool = False
    rotary: Rotary = field(default_factory=Rotary)
    embedding_norm: bool = False
    scales_embeddings: bool = False
    scales: Scales = field(default_factory=Scales)
    score_scale: str | None = None
    softcaps: bool = False
    window: Window = Window.NEVER
    has_no_rope_layers: bool = False
    names: ParameterNames = field(default_factory=ParameterNames)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys that it reads of those that would change what is computed."""
        softcaps = SOFTCAPS if self.softcaps else ()
        share = () if self.rotary.share is None else (self.rotary.share,)
        return frozenset((*softcaps, *share, *self.scales.keys))


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
