"""ArchSpec: the facts of one checkpoint, as frozen data that the decoder, the attention and the planners read.

Built by families.py from config.json. Torch-free: the coordinator, the gateway and the launcher read it too. All
registered families are pre-norm RMSNorm decoders with serial residuals, rotary positions and a gated MLP. Every other
difference is a field here, and behaviour depends on these fields only.
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
    """The gate's activation, as transformers spells `hidden_act`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """One model. max_position_embeddings counts tokens of context, rope scaling included.

    windows[i]: the number of last positions (itself included) that a token of layer i attends to, None for all.
    rotary_layers[i]: whether layer i rotates q and k. torch_dtype: the checkpoint's own, as config.json spells it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    rotary_layers: tuple[bool, ...]
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    torch_dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def check_parallel(self, tp_size: int, pp_size: int = 1) -> None:
        """Raises SettingsError when the model cannot be sharded this way. The vocabulary may be any size: it is
        padded."""
        flag = "--tensor-parallel-size"
        if self.num_heads % tp_size:
            raise SettingsError(f"{flag} {tp_size} does not divide the model's {self.num_heads} attention heads", flag)
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise SettingsError(
                f"{flag} {tp_size} neither divides nor is a multiple of the model's {self.num_kv_heads} KV heads", flag
            )
        if self.intermediate_size % tp_size:
            raise SettingsError(
                f"{flag} {tp_size} does not divide the model's MLP width {self.intermediate_size}", flag
            )
        if not 1 <= pp_size <= self.num_layers:
            flag = "--pipeline-parallel-size"
            raise SettingsError(f"{flag} {pp_size} is outside 1..{self.num_layers}, the model's layers", flag)

    def local_kv_heads(self, tp_size: int) -> int:
        """Returns the KV heads of one rank; with more ranks than KV heads each head is held by several ranks."""
        return max(1, self.num_kv_heads // tp_size)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP and norms."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        biases = self.qkv_bias * (q + 2 * kv) + self.o_bias * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return attention + mlp + biases + norms

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied table counted once."""
        table = self.vocab_size * self.hidden_size
        tables = table if self.tie_word_embeddings else 2 * table
        return self.num_layers * self.layer_parameters + tables + self.hidden_size
