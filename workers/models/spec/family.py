"""Family: the row of data that says how an architecture's config.json and checkpoint have what ArchSpec needs.

The rows are in family_rows/; config_reader.py reads config.json by a row, parameters.py names parameters by it.
Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.workers.models.spec.arch import NormKind, NormPlace, QkNorm, Scoring
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
    """Rotation of a family."""

    theta: str = "rope_theta"  # the key of the base
    # the key of the part of a head that rotates, which may stand in the rope parameters too; None: all rotates
    share: str | None = None
    default_share: float = 1.0  # the part without that key
    dim: str | None = None  # where `share` is None: the key of how many elements rotate
    interleaved: bool | str = False  # as in RopeSpec, or the key that says so
    kinds: Mapping[str, str] = field(default_factory=dict)  # own spellings of RopeKind
    # key and default of the base in layers with a window, which have an unscaled rope of their own
    local_theta: tuple[str, float] | None = None
    positions_scaled: bool = False  # config.json's positions count the scaling already
    scaling: Mapping[str, Any] = field(default_factory=dict)  # the rope parameters of a config.json without any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """config.json's keys of numbers that multiply what is computed, None where a family has none."""

    embeddings: str | None = None
    branches: str | None = None
    scores: str | None = None  # in place of the inverse square root of head_dim
    logits: str | None = None
    logits_divisor: str | None = None  # divides logits

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that a family has."""
        found = (self.embeddings, self.branches, self.scores, self.logits, self.logits_divisor)
        return tuple(key for key in found if key is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeKeys:
    """config.json's keys of a mixture of experts."""

    num_experts: str
    top_k: str
    width: str | None = None  # of an expert; None: the MLP's own key
    renormalize: bool | str = True  # True, or the key that sets it
    shared: str | None = None  # of the shared expert's width; None: there is none
    shared_count: str | None = None  # of how many experts' width it has
    scoring: Scoring = Scoring.SOFTMAX
    scale: str | None = None  # of what multiplies weights
    correction: bool = False  # the router has one (Moe)
    groups: "GroupKeys | None" = None
    grouped_if: Condition | None = None  # the condition under which groups count; None: always
    first: str | None = None  # of how many layers at the beginning have an MLP in place of experts
    every: str | None = None  # of n, where only each n-th layer has experts
    counts_from_one: bool = False  # those layers are counted from 1, else from 0
    dense: str | None = None  # of the list of layers with an MLP
    biased: bool = False  # router and experts have biases
    swiglu: tuple[str, str] | None = None  # of ClampedSwiglu's alpha and limit; None: experts have a plain activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKeys:
    """config.json's keys of ExpertGroups, and its `best`."""

    count: str
    taken: str
    best: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. A bias is True, False, or the config key that sets it. Keys inside an object of config.json are
    spelled with a dot."""

    architecture: str
    # config.json's names of what LLAMA_KEYS lists, where they differ
    keys: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    latent: bool = False  # attention is latent (Mla)
    sinks: bool = False  # heads have one (Gqa)
    extra_layers: str | None = None  # the key of how many layers a checkpoint may have behind the last
    qk_norm: QkNorm | None = None  # the kind of norm of q and k
    qk_norm_if: str | None = None  # the key that says whether there is one
    norm: NormKind = NormKind.RMS
    norm_bias: bool = True  # a LayerNorm has one
    norm_weight: bool = True  # norms have one
    norms_store_offset: bool = False  # see Norm
    place: NormPlace = NormPlace.PRE
    # places of norms under conditions: the first that holds counts, else `place`
    place_if: tuple[tuple[Condition, NormPlace], ...] = ()
    no_final_norm_if: tuple[Condition, ...] = ()  # any of these takes the last norm away
    one_kv_head_if: tuple[Condition, ...] = ()  # all of these make it one
    gated: bool = True  # the MLP has a gate
    moe: MoeKeys | None = None  # its MLPs are the experts of a mixture
    activations: Mapping[str, str] = field(default_factory=dict)  # own spellings of Activation
    positions: PositionKind = PositionKind.ROTARY
    position_offset: int = 0  # rows of the table of positions that nothing uses
    alibi_if: str | None = None  # the key that makes ALIBI of the positions
    scales_alibi: bool = False  # slopes are multiplied as scores are
    rotary: Rotary = field(default_factory=Rotary)
    embedding_norm: bool = False
    scales_embeddings: bool = False  # by the square root of the hidden size
    scales: Scales = field(default_factory=Scales)
    score_scale: str | None = None  # the key of the number whose inverse square root scales scores; None: head_dim
    softcaps: bool = False  # SOFTCAPS apply
    window: Window = Window.NEVER
    has_no_rope_layers: bool = False  # `no_rope_layers` or `no_rope_layer_interval` says which layers rotate
    names: ParameterNames = field(default_factory=ParameterNames)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the values of absent keys, by config.json's names
    # further keys that are accepted with these values only
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)  # keys that must agree with another
    # other spellings of keys, which win where both are given
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()  # other names of the architecture

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys that it reads of those that would change what is computed."""
        softcaps = SOFTCAPS if self.softcaps else ()
        share = () if self.rotary.share is None else (self.rotary.share,)
        return frozenset((*softcaps, *share, *self.scales.keys))


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
