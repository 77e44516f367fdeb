"""parameters(): every parameter of a model, as a table. The only place that knows what a layer consists of.

Decoder, checkpoint reader, sizes, planner, adapter room and PEFT reader take names, shapes and shards from it.
Torch-free; reads no file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from tandem.parallel.params import WHOLE, Init, Param, Shard, Source
from tandem.workers.models.spec.arch import ArchSpec, Gated, Gqa, LayerSpec, Moe, Norm, NormKind, Place, Plain


class Role(StrEnum):
    """What a parameter is."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    EMBEDDING_NORM = "embedding_norm"
    ATTENTION_NORM = "attention_norm"
    QKV = "qkv"  # names the tensor of fused projections; parameters are Q, K and V
    Q = "q"
    K = "k"
    V = "v"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    O = "o"  # noqa: E741 - the projection behind attention has this name everywhere
    ATTENTION_POST_NORM = "attention_post_norm"
    MLP_NORM = "mlp_norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    MLP_POST_NORM = "mlp_post_norm"
    ROUTER = "router"
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


class FusedQkv(StrEnum):
    """How a checkpoint keeps q, k and v. APART: in three tensors. IN_TURN: in one, all rows of q, then k, then v.
    BY_HEAD: in one, for each head its rows of q, k and v."""

    APART = "apart"
    IN_TURN = "in_turn"
    BY_HEAD = "by_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """A family's names of parameters, without `.weight` and `.bias`; those of a layer follow layer_prefix with its
    index, those of an expert expert_prefix too. base_prefix: what names lack in a checkpoint without a head.
    transposed: matrices of layers are stored as [inputs, outputs]. ignored_suffixes: of tensors that checkpoints may
    hold too, as they can be derived.
    """

    stems: Mapping[Role, str] = field(default_factory=lambda: LLAMA_STEMS)
    layer_prefix: str = "model.layers.{layer}."
    expert_prefix: str = "mlp.experts.{expert}."
    base_prefix: str = "model."
    fused_qkv: FusedQkv = FusedQkv.APART
    transposed: bool = False
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class NormParams:
    """The parameters of a norm; a root-mean-square norm has no bias."""

    weight: Param
    bias: Param | None = None

    def __iter__(self) -> Iterator[Param]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True, slots=True)
class LayerParams:
    """The parameters of one layer. weights, biases: by role, those of norms too. experts: those of its experts."""

    weights: Mapping[Role, Param]
    biases: Mapping[Role, Param]
    experts: tuple["LayerParams", ...] = ()

    def __iter__(self) -> Iterator[Param]:
        yield from self.weights.values()
        yield from self.biases.values()
        for expert in self.experts:
            yield from expert

    def norm(self, role: Role) -> NormParams:
        """Returns the parameters of one of its norms."""
        return NormParams(self.weights[role], self.biases.get(role))

    def merged(self, merge: str) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
        """Returns the weights and the biases of the projections that share this matmul."""
        weights, biases = (
            tuple(param for param in params.values() if param.merge == merge) for params in (self.weights, self.biases)
        )
        return weights, biases

    @property
    def matrices(self) -> tuple[Param, ...]:
        """The weights of its linear layers, in the order in which the layer uses them; experts last."""
        own = tuple(param for param in self.weights.values() if param.is_matrix)
        return own + tuple(param for expert in self.experts for param in expert.matrices)

    @property
    def adaptable(self) -> tuple[Param, ...]:
        """The weights of the linear layers that LoRA adapters may change: not experts, and not what chooses them."""
        return tuple(p for p in self.weights.values() if p.is_matrix and p.role != Role.ROUTER)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a model. head: the embedding's parameter where that is tied."""

    embedding: Param
    positions: Param | None
    embedding_norm: NormParams | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams
    head: Param
    head_name: str

    def __iter__(self) -> Iterator[Param]:
        """Yields each parameter once, in the order of the model."""
        yield self.embedding
        yield from self.entry
        for layer in self.layers:
            yield from layer
        yield from self.final_norm
        if self.head is not self.embedding:
            yield self.head

    @property
    def entry(self) -> tuple[Param, ...]:
        """The parameters between the embedding and the first layer."""
        positions = () if self.positions is None else (self.positions,)
        return (*positions, *(self.embedding_norm or ()))

    @property
    def num_elements(self) -> int:
        """Parameters in the sense of a model's size, a tied table counted once."""
        return sum(param.num_elements for param in self)


def parameters(spec: ArchSpec, names: ParameterNames) -> ParameterTable:
    """Returns the table of a model whose parameters have these names."""
    outside = _Group(names, "", None)
    size, by_vocabulary = (spec.vocab_size, spec.hidden_size), Shard("tp", pads=True)
    aliases = (f"{names.stems[Role.HEAD]}.weight",) if spec.tie_word_embeddings else ()
    embedding = outside.table(Role.EMBEDDING, size, by_vocabulary, aliases)
    head = embedding if spec.tie_word_embeddings else outside.table(Role.HEAD, size, by_vocabulary)
    positions = None
    if spec.positions is not None:
        positions = outside.table(Role.POSITIONS, (spec.positions.count, spec.hidden_size), WHOLE)
    embedding_norm = None
    if spec.embedding_norm is not None:
        embedding_norm = outside.norm(Role.EMBEDDING_NORM, spec.hidden_size, spec.embedding_norm)
    return ParameterTable(
        embedding=embedding,
        positions=positions,
        embedding_norm=embedding_norm,
        layers=tuple(_layer(spec.hidden_size, layer, i, names) for i, layer in enumerate(spec.layers)),
        final_norm=outside.norm(Role.FINAL_NORM, spec.hidden_size, spec.final_norm),
        head=head,
        head_name=names.stems[Role.HEAD],
    )


class _Group:
    """Collects parameters whose names share a prefix: those of one layer, or those outside of layers."""

    def __init__(
        self, names: ParameterNames, prefix: str, layer: int | None, expert: tuple[int, int] | None = None
    ) -> None:
        self._names = names
        self._expert = expert
        self._prefix = prefix
        self._layer = layer
        self.weights: dict[Role, Param] = {}
        self.biases: dict[Role, Param] = {}

    def table(self, role: Role, shape: tuple[int, int], shard: Shard, aliases: tuple[str, ...] = ()) -> Param:
        """A table of vocabulary or positions. aliases: other names under which checkpoints store it."""
        name, is_matrix = (
            f"{self._names.stems[role]}.weight",
            role is not Role.POSITIONS,
        )  # where the head multiplies it
        return Param(
            name=name, shape=shape, role=role, source=Source((name, *aliases)), shard=shard, takes_format=is_matrix
        )

    def norm(self, role: Role, size: int, norm: Norm) -> NormParams:
        stem = self._prefix + self._names.stems[role]
        add = 1.0 if norm.stores_offset else 0.0
        weight = self._param(role, f"{stem}.weight", (size,), Source((f"{stem}.weight",), add=add), init=Init.ONES)
        self.weights[role] = weight
        if norm.kind is not NormKind.LAYER:
            return NormParams(weight)
        bias = self._param(role, f"{stem}.bias", (size,), Source((f"{stem}.bias",)), init=Init.ZEROS)
        self.biases[role] = bias
        return NormParams(weight, bias)

    def linear(self, role: Role, outputs: int, inputs: int, shard: Shard, merge: str, *, bias: bool) -> None:
        """A linear layer with a tensor of its own."""
        stem = self._prefix + self._names.stems[role]
        self._projection(role, stem, stem, outputs, inputs, shard, merge, Source(()), bias=bias)

    def fused(
        self, role: Role, outputs: int, inputs: int, shard: Shard, merge: str, source: Source, *, bias: bool
    ) -> None:
        """A linear layer that is part of the tensor of q, k and v. source: its rows there."""
        stem = self._prefix + self._names.stems[Role.QKV]
        self._projection(role, f"{stem}.{role}", stem, outputs, inputs, shard, merge, source, bias=bias)

    def _projection(
        self,
        role: Role,
        stem: str,
        stored: str,
        outputs: int,
        inputs: int,
        shard: Shard,
        merge: str,
        source: Source,
        *,
        bias: bool,
    ) -> None:
        """A bias of sharded outputs is sharded with them; one of summed outputs is whole."""
        weight = replace(source, names=(f"{stored}.weight",), transposed=self._names.transposed)
        self.weights[role] = self._param(role, f"{stem}.weight", (outputs, inputs), weight, shard, merge)
        if bias:
            of_bias = shard if shard.dim == 0 else WHOLE
            stored_bias = replace(source, names=(f"{stored}.bias",))
            self.biases[role] = self._param(
                role, f"{stem}.bias", (outputs,), stored_bias, of_bias, merge, init=Init.ZEROS
            )

    def _param(
        self,
        role: Role,
        name: str,
        shape: tuple[int, ...],
        source: Source,
        shard: Shard = WHOLE,
        merge: str | None = None,
        init: Init = Init.NORMAL,
    ) -> Param:
        return Param(
            name=name,
            shape=shape,
            role=role,
            source=source,
            shard=shard,
            layer=self._layer,
            merge=merge,
            init=init,
            expert=self._expert,
            takes_format=merge is not None and len(shape) == 2 and role is not Role.ROUTER,
        )


def _layer(hidden: int, spec: LayerSpec, layer: int, names: ParameterNames) -> LayerParams:
    found = _Group(names, names.layer_prefix.format(layer=layer), layer)
    found.norm(Role.ATTENTION_NORM, hidden, spec.norm)
    _attention(found, hidden, spec.attention, spec.norm, names.fused_qkv)
    if spec.place is Place.SANDWICH:
        found.norm(Role.ATTENTION_POST_NORM, hidden, spec.norm)
    found.norm(Role.MLP_NORM, hidden, spec.norm)
    experts: tuple[LayerParams, ...] = ()
    if isinstance(spec.mlp, Moe):
        found.linear(Role.ROUTER, spec.mlp.num_experts, hidden, WHOLE, "router", bias=False)
        experts = _experts(hidden, spec.mlp, layer, names)
    else:
        _mlp(found, hidden, spec.mlp)
    if spec.place is Place.SANDWICH:
        found.norm(Role.MLP_POST_NORM, hidden, spec.norm)
    return LayerParams(found.weights, found.biases, experts)


def _experts(hidden: int, spec: Moe, layer: int, names: ParameterNames) -> tuple[LayerParams, ...]:
    experts = []
    for index in range(spec.num_experts):
        prefix = names.layer_prefix.format(layer=layer) + names.expert_prefix.format(expert=index)
        found = _Group(names, prefix, layer, (index, spec.num_experts))
        _mlp(found, hidden, spec.expert)
        experts.append(LayerParams(found.weights, found.biases))
    return tuple(experts)


def _attention(found: _Group, hidden: int, spec: Gqa, norm: Norm, fused: FusedQkv) -> None:
    dim, q, kv = spec.head_dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    by_head, by_kv_head = Shard("tp", unit=dim), Shard("tp", unit=dim, replicate=True)
    starts = {Role.Q: 0, Role.K: q, Role.V: q + kv}
    for place, role in enumerate(starts):
        outputs, shard = (q, by_head) if role is Role.Q else (kv, by_kv_head)
        if fused is FusedQkv.APART:
            found.linear(role, outputs, hidden, shard, "qkv", bias=spec.qkv_bias)
            continue
        source = Source((), rows=q + 2 * kv, start=starts[role])
        if fused is FusedQkv.BY_HEAD:
            source = replace(source, start=place * dim, run=dim, stride=3 * dim)
        found.fused(role, outputs, hidden, shard, "qkv", source, bias=spec.qkv_bias)
    if spec.qk_norm:
        found.norm(Role.Q_NORM, dim, norm)
        found.norm(Role.K_NORM, dim, norm)
    found.linear(Role.O, hidden, q, Shard("tp", dim=1, unit=dim), "o", bias=spec.o_bias)


def _mlp(found: _Group, hidden: int, spec: Gated | Plain) -> None:
    for role in (Role.GATE, Role.UP) if isinstance(spec, Gated) else (Role.UP,):
        found.linear(role, spec.width, hidden, Shard("tp"), "up", bias=spec.bias)
    found.linear(Role.DOWN, hidden, spec.width, Shard("tp", dim=1), "down", bias=spec.bias)
