"""ArchSpec: the facts of one checkpoint, as frozen data that the decoder, the attention and the planners read.

Built by families.py from config.json. Torch-free: the coordinator, the gateway and the launcher read it too. A model is
its layers, each described by a LayerSpec; behaviour depends on these fields only.
"""

from dataclasses import dataclass
from enum import StrEnum

from tandem.configs.errors import SettingsError


class RopeKind(StrEnum):
    """A way to stretch rotary frequencies beyond the trained context; the formulas are in positions.py."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


class Activation(StrEnum):
    """The MLP's activation, as transformers spells `hidden_act`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. trained_context: positions that the unscaled frequencies were trained for; the rest by kind."""

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


@dataclass(frozen=True, slots=True)
class Gqa:
    """Attention with num_heads query heads in groups that share a key and value head (MHA and MQA are cases of it).
    qk_norm: q and k pass an RMSNorm per head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """All by which an attention kernel may vary; hashable. scale: of the products q @ k.

    window: the number of last positions (itself included) that a token attends to, None for all. softcap: scores s
    become softcap * tanh(s / softcap), None for none (Gemma 2). slopes: of each query head, the score falls by its
    slope for each position of distance (ALiBi, Press et al. 2021), None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products, as every kernel computes them."""
        return self.softcap is None and self.slopes is None


class NormKind(StrEnum):
    """RMS: RMSNorm (Zhang and Sennrich 2019). LAYER: LayerNorm, with a mean and a bias (Ba et al. 2016)."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm. stores_offset: checkpoints store the weight less one, as Gemma's do."""

    eps: float
    kind: NormKind = NormKind.RMS
    stores_offset: bool = False


class Place(StrEnum):
    """Where a layer's norms stand. PRE: before attention and MLP. SANDWICH: before and behind both (Gemma 2)."""

    PRE = "pre"
    SANDWICH = "sandwich"


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


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts (Shazeer et al. 2017): each token passes the top_k of num_experts gated MLPs, `width` wide,
    whose outputs are added by their weights. Routing is a softmax over all experts; renormalize: the weights of the
    top_k add up to 1."""

    num_experts: int
    top_k: int
    width: int
    activation: Activation
    renormalize: bool = True

    @property
    def expert(self) -> Gated:
        """One expert."""
        return Gated(self.width, self.activation)


@dataclass(frozen=True, slots=True)
class Learned:
    """A table of positions that is added to the embeddings: `count` rows."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention and MLP, each with norms, added to the residual. position: None where q and k are not
    rotated."""

    attention: Gqa
    params: AttentionParams
    position: RopeSpec | None
    norm: Norm
    mlp: Gated | Plain | Moe
    place: Place = Place.PRE


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """One model. max_position_embeddings counts tokens of context, rope scaling included. torch_dtype: the
    checkpoint's own, as config.json spells it.

    positions: a table that is added to the embeddings, None for none. embedding_norm: of the embeddings.
    embedding_scale: multiplies them. final_softcap: logits x become final_softcap * tanh(x / final_softcap).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    final_norm: Norm
    tie_word_embeddings: bool
    torch_dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    positions: Learned | None = None
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0
    final_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_heads(self) -> int:
        """KV heads of the cache, which are those of each layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key and of a value of the cache, which are those of each layer."""
        return self.layers[0].attention.head_dim

    def check_parallel(self, tp_size: int, pp_size: int = 1, *, expert_parallel: bool = False) -> None:
        """Raises SettingsError when the model cannot be sharded this way. The vocabulary may be any size: it is
        padded."""
        if expert_parallel and not any(isinstance(layer.mlp, Moe) for layer in self.layers):
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
