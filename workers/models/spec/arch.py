"""ArchSpec: the facts of one checkpoint, as frozen data that the decoder, the attention and the planners read.

Built by families.py from config.json. Torch-free: the coordinator, the gateway and the launcher read it too. A model is
its layers, each described by a LayerSpec; behaviour depends on these fields only.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem.configs.errors import SettingsError
from tandem.parallel.quantization.weight_plan import DENSE, WeightPlan


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
    """Rotary positions; which fields count depends on the kind."""

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    trained_context: int = 0  # positions that the unscaled frequencies were trained for
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    dim: int | None = None  # the first elements of a head, which rotate; None: all
    interleaved: bool = False  # neighbours form a pair, not elements of both halves
    factors: tuple[float, ...] = ()  # longrope's divisors of the frequencies

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
    """A norm of q and k."""

    PER_HEAD = "per_head"  # of each head, one weight for all of them
    OWN = "own"  # of each head, which has its own weight
    WHOLE = "whole"  # of all heads at once


@dataclass(frozen=True, slots=True)
class Gqa:
    """Attention with num_heads query heads in groups that share a key and value head (MHA and MQA are cases of it)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None  # the norm that q and k pass, of the layer's kind without a bias; None: none
    sinks: bool = False  # each query head has a learned sink (AttentionParams)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that positions may turn."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class Mla:
    """Latent attention (DeepSeek-V2): keys and values of all heads are products with one vector per token, its latent,
    which the cache holds beside a key that rotates and that all heads share."""

    num_heads: int
    q_rank: int | None  # width between the two projections of q; None: there is one projection
    kv_rank: int  # width of the latent
    nope_dim: int  # elements of a head's key that do not rotate
    rope_dim: int  # elements of it that do
    v_dim: int  # elements of a head's value
    bias: bool = False  # of q's first projection, the latent's and the output's
    norm_eps: float = 1e-6  # of the norms of q and the latent

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
    """All by which an attention kernel may vary; hashable. Slopes and sinks are of this rank's heads where a kernel
    gets them."""

    scale: float  # of the products q @ k
    window: int | None = None  # the number of last positions (itself included) that a token attends to; None: all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap); None: they stay (Gemma 2)
    # of each query head: its score falls by it for each position of distance (ALiBi, Press et al. 2021); None: none
    slopes: tuple[float, ...] | None = None
    # of each query head, the score of a position without a value: it takes its share of the softmax and adds nothing
    # (gpt-oss, Xiao et al. 2023); None: none
    sinks: tuple[float, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """True if weights are the softmax of scaled products, as every kernel computes them."""
        return self.softcap is None and self.slopes is None and self.sinks is None


class NormKind(StrEnum):
    """The kinds of norms."""

    RMS = "rms"  # RMSNorm (Zhang and Sennrich 2019)
    LAYER = "layer"  # LayerNorm, with a mean and a bias (Ba et al. 2016)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm."""

    eps: float
    kind: NormKind = NormKind.RMS
    stores_offset: bool = False  # checkpoints store the weight less one, as Gemma's do
    bias: bool = True  # a LayerNorm has one
    weight: bool = True  # it has one at all


class NormPlace(StrEnum):
    """The places of a layer's norms."""

    PRE = "pre"  # before attention and MLP
    SANDWICH = "sandwich"  # before and behind both (Gemma 2)
    POST = "post"  # behind both, before they are added (OLMo 2)
    POST_SUM = "post_sum"  # behind each sum (the first transformer)
    PARALLEL = "parallel"  # one norm, before both, which are computed side by side
    PARALLEL_TWO = "parallel_two"  # side by side, each with a norm of its own


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
    """The weights that a router makes of its logits."""

    SOFTMAX = "softmax"  # over all
    TOP_SOFTMAX = "top_softmax"  # over those that are chosen
    SIGMOID = "sigmoid"  # each by itself


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
    whose outputs are added by their weights."""

    num_experts: int
    top_k: int
    width: int
    activation: Activation
    renormalize: bool = True  # the weights of the top_k add up to 1
    shared: int | None = None  # the width of an MLP that every token passes; None: there is none
    shared_gated: bool = True  # its output is multiplied by a sigmoid of its own gate
    scoring: Scoring = Scoring.SOFTMAX  # experts are weighed so
    groups: ExpertGroups | None = None  # they are chosen by groups
    scale: float = 1.0  # multiplies weights at last
    router_bias: bool = False  # the router's logits have one
    correction: bool = False  # a bias by which experts are chosen, not weighed
    expert_bias: bool = False  # the experts' projections have biases
    swiglu: ClampedSwiglu | None = None  # in place of the experts' activation

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
    """One layer: attention and MLP, each with norms, added to the residual."""

    attention: Gqa | Mla
    params: AttentionParams
    position: RopeSpec | None  # None: q and k are not rotated
    norm: Norm
    mlp: Gated | Plain | Moe
    place: NormPlace = NormPlace.PRE
    branch_scale: float = 1.0  # multiplies both before they are added


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """One model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int  # tokens of context, rope scaling included
    final_norm: Norm | None  # None: there is none
    tie_word_embeddings: bool
    torch_dtype: str | None  # the checkpoint's own, as config.json spells it
    eos_token_ids: tuple[int, ...]
    positions: Learned | None = None  # a table that is added to the embeddings; None: none
    embedding_norm: Norm | None = None  # of the embeddings
    embedding_scale: float = 1.0  # multiplies them
    final_softcap: float | None = None  # logits x become final_softcap * tanh(x / final_softcap)
    head_bias: bool = False  # the head adds one
    logit_scale: float = 1.0  # multiplies logits
    short_context: int = 0  # see for_context() (LongRoPE, Ding et al. 2024)
    short_factors: tuple[float, ...] = ()
    extra_layers: int = 0  # that a checkpoint may have behind the last, to guess further tokens; they are not read
    remarks: tuple[str, ...] = ()  # lines for the start about files that say one thing in two ways
    weights: WeightPlan = DENSE  # how its matrices are stored and held

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
    def rope_dim(self) -> int:
        """Elements of a head that positions may turn, which are as many in each layer."""
        return self.layers[0].attention.rope_dim

    def check_parallel(self, tp_size: int, pp_size: int = 1, *, expert_parallel: bool = False) -> None:
        """Raises SettingsError when the model cannot be sharded this way. The vocabulary may be any size: it is
        padded."""
        if expert_parallel and not self.has_experts:
            flag = "--enable-expert-parallel"
            raise SettingsError(f"{flag}: {self.architecture} has no experts", flag)
        if (problem := self._problem(tp_size, expert_parallel)) is not None:
            heads = max(layer.attention.num_heads for layer in self.layers)
            fitting = [size for size in range(1, heads + 1) if self._problem(size, expert_parallel) is None]
            flag = "--tensor-parallel-size"
            raise SettingsError(f"{flag} {tp_size} {problem}; possible: {', '.join(map(str, fitting))}", flag)
        if not 1 <= pp_size <= self.num_layers:
            flag = "--pipeline-parallel-size"
            raise SettingsError(f"{flag} {pp_size} is outside 1..{self.num_layers}, the model's layers", flag)

    def _problem(self, tp_size: int, expert_parallel: bool) -> str | None:
        """Returns why so many ranks cannot share its layers."""
        problems = (_layer_problem(layer, tp_size, expert_parallel) for layer in dict.fromkeys(self.layers))
        return next((problem for problem in problems if problem is not None), None)


def _layer_problem(layer: LayerSpec, tp_size: int, expert_parallel: bool) -> str | None:
    heads, kv_heads, width = layer.attention.num_heads, layer.attention.num_kv_heads, layer.mlp.width
    if heads % tp_size:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads % tp_size and tp_size % kv_heads:
        return f"neither divides nor is a multiple of the model's {kv_heads} KV heads"
    if isinstance(layer.mlp, Moe) and expert_parallel:
        if layer.mlp.num_experts % tp_size:
            return f"does not divide the model's {layer.mlp.num_experts} experts"
    elif width % tp_size:
        return f"does not divide the model's MLP width {width}"
    if isinstance(layer.mlp, Moe) and layer.mlp.shared is not None and layer.mlp.shared % tp_size:
        return f"does not divide the shared expert's width {layer.mlp.shared}"
    return None
