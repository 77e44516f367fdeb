"""parameters(): every parameter of a model, as a table. The only place that knows what a layer consists of.

Decoder, checkpoint reader, sizes, planner, adapter room and PEFT reader take names, shapes and shards from it.
Torch-free; reads no file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from tandem.parallel.params import WHOLE, Init, Param, Shard, Source
from tandem.workers.models.spec.arch import ArchSpec, Gated, Gqa, LayerSpec


class Role(StrEnum):
    """What a parameter is."""

    EMBEDDING = "embedding"
    ATTENTION_NORM = "attention_norm"
    Q = "q"
    K = "k"
    V = "v"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    O = "o"  # noqa: E741 - the projection behind attention has this name everywhere
    MLP_NORM = "mlp_norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    FINAL_NORM = "final_norm"
    HEAD = "head"


LLAMA_STEMS: Mapping[Role, str] = MappingProxyType(
    {
        Role.EMBEDDING: "model.embed_tokens",
        Role.ATTENTION_NORM: "input_layernorm",
        Role.Q: "self_attn.q_proj",
        Role.K: "self_attn.k_proj",
        Role.V: "self_attn.v_proj",
        Role.Q_NORM: "self_attn.q_norm",
        Role.K_NORM: "self_attn.k_norm",
        Role.O: "self_attn.o_proj",
        Role.MLP_NORM: "post_attention_layernorm",
        Role.GATE: "mlp.gate_proj",
        Role.UP: "mlp.up_proj",
        Role.DOWN: "mlp.down_proj",
        Role.FINAL_NORM: "model.norm",
        Role.HEAD: "lm_head",
    }
)


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """A family's names of parameters, without `.weight` and `.bias`; those of a layer follow layer_prefix with its
    index. base_prefix: what names lack in a checkpoint without a head. ignored_suffixes: of tensors that checkpoints
    may hold too, as they can be derived."""

    stems: Mapping[Role, str] = field(default_factory=lambda: LLAMA_STEMS)
    layer_prefix: str = "model.layers.{layer}."
    base_prefix: str = "model."
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LayerParams:
    """The parameters of one layer. weights, biases: by role."""

    weights: Mapping[Role, Param]
    biases: Mapping[Role, Param]

    def __iter__(self) -> Iterator[Param]:
        yield from self.weights.values()
        yield from self.biases.values()

    def merged(self, merge: str) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
        """Returns the weights and the biases of the projections that share this matmul."""
        weights, biases = (
            tuple(param for param in params.values() if param.merge == merge) for params in (self.weights, self.biases)
        )
        return weights, biases

    @property
    def matrices(self) -> tuple[Param, ...]:
        """The weights of its linear layers, in the order in which the layer uses them."""
        return tuple(param for param in self.weights.values() if param.is_matrix)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a model. head: the embedding's parameter where that is tied."""

    embedding: Param
    layers: tuple[LayerParams, ...]
    final_norm: Param
    head: Param
    head_name: str

    def __iter__(self) -> Iterator[Param]:
        """Yields each parameter once, in the order of the model."""
        yield self.embedding
        for layer in self.layers:
            yield from layer
        yield self.final_norm
        if self.head is not self.embedding:
            yield self.head

    @property
    def num_elements(self) -> int:
        """Parameters in the sense of a model's size, a tied table counted once."""
        return sum(param.num_elements for param in self)


def parameters(spec: ArchSpec, names: ParameterNames) -> ParameterTable:
    """Returns the table of a model whose parameters have these names."""
    table = (spec.vocab_size, spec.hidden_size)
    by_vocabulary = Shard("tp", pads=True)
    aliases = (f"{names.stems[Role.HEAD]}.weight",) if spec.tie_word_embeddings else ()
    embedding = _outside(names, Role.EMBEDDING, table, by_vocabulary, aliases=aliases)
    head = embedding if spec.tie_word_embeddings else _outside(names, Role.HEAD, table, by_vocabulary)
    return ParameterTable(
        embedding=embedding,
        layers=tuple(_layer(spec.hidden_size, layer, i, names) for i, layer in enumerate(spec.layers)),
        final_norm=_outside(names, Role.FINAL_NORM, (spec.hidden_size,), WHOLE, Init.ONES),
        head=head,
        head_name=names.stems[Role.HEAD],
    )


def _outside(
    names: ParameterNames,
    role: Role,
    shape: tuple[int, ...],
    shard: Shard,
    init: Init = Init.NORMAL,
    aliases: tuple[str, ...] = (),
) -> Param:
    """A parameter outside of layers. aliases: other names under which checkpoints store it."""
    name = f"{names.stems[role]}.weight"
    return Param(name=name, shape=shape, role=role, source=Source((name, *aliases)), shard=shard, init=init)


class _Layer:
    """Collects the parameters of one layer."""

    def __init__(self, layer: int, names: ParameterNames) -> None:
        self._layer = layer
        self._names = names
        self.weights: dict[Role, Param] = {}
        self.biases: dict[Role, Param] = {}

    def norm(self, role: Role, size: int) -> None:
        self.weights[role] = self._param(role, "weight", (size,), WHOLE, None, Init.ONES)

    def linear(self, role: Role, outputs: int, inputs: int, shard: Shard, merge: str, *, bias: bool) -> None:
        """A linear layer. A bias of sharded outputs is sharded with them; one of summed outputs is whole."""
        self.weights[role] = self._param(role, "weight", (outputs, inputs), shard, merge, Init.NORMAL)
        if bias:
            of_bias = shard if shard.dim == 0 else WHOLE
            self.biases[role] = self._param(role, "bias", (outputs,), of_bias, merge, Init.ZEROS)

    def _param(
        self, role: Role, suffix: str, shape: tuple[int, ...], shard: Shard, merge: str | None, init: Init
    ) -> Param:
        name = f"{self._names.layer_prefix.format(layer=self._layer)}{self._names.stems[role]}.{suffix}"
        return Param(
            name=name,
            shape=shape,
            role=role,
            source=Source((name,)),
            shard=shard,
            layer=self._layer,
            merge=merge,
            init=init,
        )


def _layer(hidden: int, spec: LayerSpec, layer: int, names: ParameterNames) -> LayerParams:
    found = _Layer(layer, names)
    found.norm(Role.ATTENTION_NORM, hidden)
    _attention(found, hidden, spec.attention)
    found.norm(Role.MLP_NORM, hidden)
    _gated(found, hidden, spec.mlp)
    return LayerParams(found.weights, found.biases)


def _attention(found: _Layer, hidden: int, spec: Gqa) -> None:
    dim = spec.head_dim
    by_head, by_kv_head = Shard("tp", unit=dim), Shard("tp", unit=dim, replicate=True)
    found.linear(Role.Q, spec.num_heads * dim, hidden, by_head, "qkv", bias=spec.qkv_bias)
    for role in (Role.K, Role.V):
        found.linear(role, spec.num_kv_heads * dim, hidden, by_kv_head, "qkv", bias=spec.qkv_bias)
    if spec.qk_norm:
        found.norm(Role.Q_NORM, dim)
        found.norm(Role.K_NORM, dim)
    found.linear(Role.O, hidden, spec.num_heads * dim, Shard("tp", dim=1, unit=dim), "o", bias=spec.o_bias)


def _gated(found: _Layer, hidden: int, spec: Gated) -> None:
    for role in (Role.GATE, Role.UP):
        found.linear(role, spec.width, hidden, Shard("tp"), "gate_up", bias=spec.bias)
    found.linear(Role.DOWN, hidden, spec.width, Shard("tp", dim=1), "down", bias=spec.bias)
