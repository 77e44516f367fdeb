"""ArchSpec: the facts of one checkpoint, as frozen data that the decoder, the attention and the planners read.

Built by families.py from config.json. Torch-free: the coordinator, the gateway and the launcher read it too. A model is
its layers, each described by a LayerSpec; behaviour depends on these fields only.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem.configs.errors import SettingsError


class RopeKind(StrEnum):
    """A way to stretch rotary frequencies beyond the trained context; the formulas are in positions.py."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


class Activation(StrEnum):
    """The MLP's activation, as transformers spells `hidden_act`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. trained_context: positions that the unscaled frequencies were trained for; the rest by kind.

    dim: the first elements of a head that rotate, None for all. interleaved: neighbours form a pair, not elements of
    both halves. factors: longrope's divisors of the frequencies.
    """

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    trained_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    dim: int | None = None
    interleaved: bool = False
    factors: tuple[float, ...] = ()

    @property
    def score_mscale(self) -> float:
        """The factor that DeepSeek multiplies scores with twice: YaRN's attention temperature for mscale_all_dim."""
        if self.kind is RopeKind.DEFAULT or not self.mscale_all_dim or self.factor <= 1:
            return 1.0
        return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Returns a head's stored elements in the order in which the model holds them: those that rotate stand in both
        halves at the same places, so that the same kernels turn every kind. () for the stored order."""
        dim = self.dim or head_dim
        if dim == head_dim and not self.interleaved:
            return ()
        rotating = range(dim)
        pairs = (rotating[::2], rotating[1::2]) if self.interleaved else (rotating[: dim // 2], rotating[dim // 2 :])
        middle = dim + (head_dim - dim) // 2
        return (*pairs[0], *range(dim, middle), *pairs[1], *range(middle, head_dim))


class QkNorm(StrEnum):
    """A norm of q and k. PER_HEAD: of each head, one weight for all of them. OWN: of each head, which has its own
    weight. WHOLE: of all heads at once."""

    PER_HEAD = "per_head"
    OWN = "own"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Gqa:
    """Attention with num_heads query heads in groups that share a key and value head (MHA and MQA are cases of it).
    qk_norm: which norm q and k pass, of the layer's kind without a bias; None for none. sinks: each query head has a
    learned sink (AttentionParams)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    sinks: bool = False

    @property
    def rope_dim(self) -> int:
        """Elements of a head that positions may turn."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class Mla:
    """Latent attention (DeepSeek-V2): keys and values of all heads are products with one vector per token, its latent,
    which the cache holds beside a key that rotates and that all heads share.

    q_rank: width between the two projections of q, None for one projection. kv_rank: of the latent. nope_dim, rope_dim:
    elements of a head's key that do not rotate, and that do; v_dim: of its value. bias: those of q's first projection,
    of the latent's and of the output's. norm_eps: of the norms of q and the latent.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Elements of a token in the cache: the latent, then the key that rotates."""
        return self.kv_rank + self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return 1


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """All by which an attention kernel may vary; hashable. scale: of the products q @ k.

    window: the number of last positions (itself included) that a token attends to, None for all. softcap: scores s
    become softcap * tanh(s / softcap), None for none (Gemma 2). slopes: of each query head, the score falls by its
    slope for each position of distance (ALiBi, Press et al. 2021), None for none. sinks: of each query head, the score
    of a position without a value: it takes its share of the softmax and adds nothing (gpt-oss, Xiao et al. 2023), None
    for none. Slopes and sinks are of this rank's heads where a kernel gets them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """True if weights are the softmax of scaled products, as every kernel computes them."""
        return self.softcap is None and self.slopes is None and self.sinks is None


class NormKind(StrEnum):
    """RMS: RMSNorm (Zhang and Sennrich 2019). LAYER: LayerNorm, with a mean and a bias (Ba et al. 2016)."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm. stores_offset: checkpoints store the weight less one, as Gemma's do. bias: a LayerNorm has one. weight:
    it has one at all."""

    eps: float
    kind: NormKind = NormKind.RMS
    stores_offset: bool = False
    bias: bool = True
    weight: bool = True


class Place(StrEnum):
    """The places of a layer's norms. PRE: before attention and MLP. SANDWICH: before and behind both (Gemma 2). POST:
    behind both, before they are added (OLMo 2). POST_SUM: behind each sum (the first transformer). PARALLEL: one norm,
    before both, which are computed side by side. PARALLEL_TWO: side by side, each with a norm of its own."""

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"
    POST_SUM = "post_sum"
    PARALLEL = "parallel"
    PARALLEL_TWO = "parallel_two"


@dataclass(frozen=True, slots=True)
class Gated:
    """An MLP of down(activation(gate(x)) * up(x)), `width` wide."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Plain:
    """An MLP of down(activation(up(x))), `width` wide."""

    width: int
    activation: Activation
    bias: bool = True


class Scoring(StrEnum):
    """The weights that a router makes of its logits. SOFTMAX: over all. TOP_SOFTMAX: over those that are chosen.
    SIGMOID: each by itself."""

    SOFTMAX = "softmax"
    TOP_SOFTMAX = "top_softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in `count` equal groups: a token takes experts of the `taken` groups only whose `best` greatest scores
    have the greatest sums (DeepSeek-V2, V3)."""

    count: int
    taken: int
    best: int = 1


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gpt-oss's activation of gated experts: gate up to `limit` times its sigmoid of `alpha` times itself, times up
    between -limit and limit plus 1."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts (Shazeer et al. 2017): each token passes the top_k of num_experts gated MLPs, `width` wide,
    whose outputs are added by their weights. scoring, groups: how they are chosen and weighed; renormalize: the weights
    of the top_k add up to 1; scale: multiplies them then. router_bias: its logits have one. correction: a bias, by
    which experts are chosen, not weighed. shared: the width of an MLP that every token passes, None without one; its
    output is multiplied by a sigmoid of its own gate if it is shared_gated. expert_bias: the experts' projections have
    biases. swiglu: in place of their activation."""

    num_experts: int
    top_k: int
    width: int
    activation: Activation
    renormalize: bool = True
    shared: int | None = None
    shared_gated: bool = True
    scoring: Scoring = Scoring.SOFTMAX
    groups: ExpertGroups | None = None
    scale: float = 1.0
    router_bias: bool = False
    correction: bool = False
    expert_bias: bool = False
    swiglu: ClampedSwiglu | None = None

    @property
    def expert(self) -> Gated:
        """One expert."""
        return Gated(self.width, self.activation, self.expert_bias)

    @property
    def shared_expert(self) -> Gated | None:
        """The MLP that every token passes."""
        return None if self.shared is None else Gated(self.shared, self.activation)


@dataclass(frozen=True, slots=True)
class Learned:
    """A table of positions that is added to the embeddings: `count` rows behind `offset` that nothing uses."""

    count: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention and MLP, each with norms, added to the residual. position: None where q and k are not
    rotated. branch_scale: multiplies both before they are added."""

    attention: Gqa | Mla
    params: AttentionParams
    position: RopeSpec | None
    norm: Norm
    mlp: Gated | Plain | Moe
    place: Place = Place.PRE
    branch_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """One model. max_position_embeddings counts tokens of context, rope scaling included. torch_dtype: the
    checkpoint's own, as config.json spells it.

    positions: a table that is added to the embeddings, None for none. embedding_norm: of the embeddings.
    embedding_scale: multiplies them. final_norm: None for none. head_bias: the head adds one. logit_scale: multiplies
    logits. final_softcap: logits x become final_softcap * tanh(x / final_softcap). short_context,
    short_factors: see for_context() (LongRoPE, Ding et al. 2024). extra_layers: that a checkpoint may have behind the
    last, to guess further tokens; they are not read.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    final_norm: Norm | None
    tie_word_embeddings: bool
    torch_dtype: str | None
    eos_token_ids: tuple[int, ...]
    positions: Learned | None = None
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    short_context: int = 0
    short_factors: tuple[float, ...] = ()
    extra_layers: int = 0

    def for_context(self, max_model_len: int) -> "ArchSpec":
        """Returns the model for sequences of up to max_model_len tokens: with LongRoPE's short_factors within its
        trained context. They are chosen once, as in vLLM: keys that were rotated by both do not fit together."""
        if not self.short_factors or max_model_len > self.short_context:
            return self

        def short(layer: LayerSpec) -> LayerSpec:
            rope = layer.position
            return layer if rope is None else replace(layer, position=replace(rope, factors=self.short_factors))

        return replace(self, layers=tuple(short(layer) for layer in self.layers))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary positions of its layers."""
        return tuple(dict.fromkeys(layer.position for layer in self.layers if layer.position is not None))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """True if some layers have a mixture of experts."""
        return any(isinstance(layer.mlp, Moe) for layer in self.layers)

    @property
    def kv_heads(self) -> int:
        """KV heads of the cache, which are those of each layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key and of a value of the cache, which are those of each layer."""
        return self.layers[0].attention.head_dim

    @property
    def has_latents(self) -> bool:
        """True if the cache has latents in place of keys and values, as that of each layer."""
        return isinstance(self.layers[0].attention, Mla)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that positions may turn, which are as many in each layer."""
        return self.layers[0].attention.rope_dim

    def check_parallel(self, tp_size: int, pp_size: int = 1, *, expert_parallel: bool = False) -> None:
        """Raises SettingsError when the model cannot be sharded this way. The vocabulary may be any size: it is
        padded."""
        if expert_parallel and not self.has_experts:
            flag = "--enable-expert-parallel"
            raise SettingsError(f"{flag}: {self.architecture} has no experts", flag)
        for layer in dict.fromkeys(self.layers):
            _check_layer(layer, tp_size, expert_parallel)
        if not 1 <= pp_size <= self.num_layers:
            flag = "--pipeline-parallel-size"
            raise SettingsError(f"{flag} {pp_size} is outside 1..{self.num_layers}, the model's layers", flag)


def _check_layer(layer: LayerSpec, tp_size: int, expert_parallel: bool) -> None:
    flag = "--tensor-parallel-size"
    heads, kv_heads, width = layer.attention.num_heads, layer.attention.num_kv_heads, layer.mlp.width
    if heads % tp_size:
        raise SettingsError(f"{flag} {tp_size} does not divide the model's {heads} attention heads", flag)
    if kv_heads % tp_size and tp_size % kv_heads:
        raise SettingsError(
            f"{flag} {tp_size} neither divides nor is a multiple of the model's {kv_heads} KV heads", flag
        )
    if isinstance(layer.mlp, Moe) and expert_parallel:
        if layer.mlp.num_experts % tp_size:
            raise SettingsError(f"{flag} {tp_size} does not divide the model's {layer.mlp.num_experts} experts", flag)
    elif width % tp_size:
        raise SettingsError(f"{flag} {tp_size} does not divide the model's MLP width {width}", flag)
    if isinstance(layer.mlp, Moe) and layer.mlp.shared is not None and layer.mlp.shared % tp_size:
        raise SettingsError(f"{flag} {tp_size} does not divide the shared expert's width {layer.mlp.shared}", flag)
