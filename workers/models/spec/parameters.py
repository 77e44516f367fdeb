"""parameters(): every parameter of a model, as a table. The only place that knows what a layer consists of.

Decoder, checkpoint reader, sizes, planner, adapter room and PEFT reader take names, shapes and shards from it.
Torch-free; reads no file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tandem.parallel.params import WHOLE, Init, Param, Shard, Source
from tandem.workers.models.spec.arch import (
    ArchSpec,
    Gated,
    Gqa,
    LayerSpec,
    Mla,
    Moe,
    Norm,
    NormKind,
    NormPlace,
    Plain,
    QkNorm,
)
from tandem.workers.models.spec.parameter_names import FusedQkv, ParameterNames, Role

_PRE = (Role.ATTENTION_NORM, Role.MLP_NORM)
_POST = (Role.ATTENTION_POST_NORM, Role.MLP_POST_NORM)
NORMS_OF: Mapping[NormPlace, tuple[Role, ...]] = {
    NormPlace.PRE: _PRE,
    NormPlace.SANDWICH: (*_PRE, *_POST),
    NormPlace.POST: _POST,
    NormPlace.POST_SUM: _PRE,
    NormPlace.PARALLEL: (Role.ATTENTION_NORM,),
    NormPlace.PARALLEL_TWO: _PRE,
}
"""The norms of a layer."""


UNADAPTED = (Role.SHARED_GATE, Role.KV_B)
"""Linear layers that take no adapter."""


@dataclass(frozen=True, slots=True)
class NormParams:
    """The parameters of a norm, which may have none; a root-mean-square norm has no bias."""

    weight: Param | None = None
    bias: Param | None = None

    def __iter__(self) -> Iterator[Param]:
        yield from (param for param in (self.weight, self.bias) if param is not None)


@dataclass(frozen=True, slots=True)
class LayerParams:
    """The parameters of one layer. weights, biases: by role, those of norms too. experts: those of its experts; shared:
    those of the expert that all tokens pass."""

    weights: Mapping[Role, Param]
    biases: Mapping[Role, Param]
    experts: tuple["LayerParams", ...] = ()
    shared: "LayerParams | None" = None

    @property
    def all_experts(self) -> tuple["LayerParams", ...]:
        """Its experts, the shared one first."""
        return self.experts if self.shared is None else (self.shared, *self.experts)

    def __iter__(self) -> Iterator[Param]:
        yield from self.weights.values()
        yield from self.biases.values()
        for expert in self.all_experts:
            yield from expert

    def norm(self, role: Role) -> NormParams:
        """Returns the parameters of one of its norms."""
        return NormParams(self.weights.get(role), self.biases.get(role))

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
        return own + tuple(param for expert in self.all_experts for param in expert.matrices)

    @property
    def adaptable(self) -> tuple[Param, ...]:
        """The weights of the linear layers that LoRA adapters may change: not experts, what chooses them, or what
        latents are multiplied with by parts."""
        return tuple(p for p in self.weights.values() if p.is_matrix and p.role not in UNADAPTED)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a model. head: the embedding's parameter where that is tied, or one with the same source where
    the two are held in different forms."""

    embedding: Param
    positions: Param | None
    embedding_norm: NormParams | None
    layers: tuple[LayerParams, ...]
    final_norm: NormParams
    head: Param
    head_name: str
    head_bias: Param | None = None

    def __iter__(self) -> Iterator[Param]:
        """Yields each parameter once, in the order of the model."""
        yield self.embedding
        yield from self.entry
        for layer in self.layers:
            yield from layer
        yield from self.final_norm
        if self.head is not self.embedding:
            yield self.head
        if self.head_bias is not None:
            yield self.head_bias

    @property
    def entry(self) -> tuple[Param, ...]:
        """The parameters between the embedding and the first layer."""
        positions = () if self.positions is None else (self.positions,)
        return (*positions, *(self.embedding_norm or ()))

    @property
    def num_elements(self) -> int:
        """Parameters in the sense of a model's size, a tied table counted once."""
        is_twice = self.head is not self.embedding and self.head.source == self.embedding.source
        return sum(param.num_elements for param in self) - is_twice * self.head.num_elements


def parameters(spec: ArchSpec, names: ParameterNames) -> ParameterTable:
    """Returns the table of a model whose parameters have these names."""
    outside = _Group(names, "", None)
    size, by_vocabulary = (spec.vocab_size, spec.hidden_size), Shard("tp", pads=True)
    aliases = names.stored("", Role.HEAD, "weight") if spec.tie_word_embeddings else ()
    embedding = outside.table(Role.EMBEDDING, size, by_vocabulary, aliases)
    head = embedding if spec.tie_word_embeddings else outside.table(Role.HEAD, size, by_vocabulary)
    positions = embedding_norm = head_bias = None
    if spec.positions is not None:
        count = spec.positions.count + spec.positions.offset
        positions = outside.table(Role.POSITIONS, (count, spec.hidden_size), WHOLE)
    if spec.embedding_norm is not None:
        embedding_norm = outside.norm(Role.EMBEDDING_NORM, spec.hidden_size, spec.embedding_norm)
    if spec.head_bias:
        head_bias = outside.head_bias(spec.vocab_size, by_vocabulary)
    final_norm = NormParams()
    if spec.final_norm is not None:
        final_norm = outside.norm(Role.FINAL_NORM, spec.hidden_size, spec.final_norm)
    return ParameterTable(
        embedding=embedding,
        positions=positions,
        embedding_norm=embedding_norm,
        layers=tuple(_layer(spec.hidden_size, layer, i, names) for i, layer in enumerate(spec.layers)),
        final_norm=final_norm,
        head=head,
        head_name=names.stems[Role.HEAD],
        head_bias=head_bias,
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

    def within(self, prefix: str) -> "_Group":
        """Returns a view of the group that adds a prefix to names."""
        group = _Group(self._names, self._prefix + prefix, self._layer, self._expert)
        group.weights, group.biases = self.weights, self.biases
        return group

    def table(self, role: Role, shape: tuple[int, int], shard: Shard, aliases: tuple[str, ...] = ()) -> Param:
        """A table of vocabulary or positions. aliases: other names under which checkpoints store it."""
        names = self._names.stored("", role, "weight")
        return Param(name=names[0], shape=shape, role=role, source=Source((*names, *aliases)), shard=shard)

    def head_bias(self, vocab_size: int, shard: Shard) -> Param:
        """The bias of the logits."""
        names = self._names.stored("", Role.HEAD, "bias")
        return self._param(Role.HEAD, names[0], (vocab_size,), Source(names), shard, init=Init.ZEROS)

    @property
    def _is_stacked(self) -> bool:
        """True if one tensor has a matrix of all experts."""
        return self._names.stacked_experts or self._names.interleaved_experts

    def norm(self, role: Role, size: int, norm: Norm, shard: Shard = WHOLE, source: Source | None = None) -> NormParams:
        """A norm. source: where its weight is stored; None: in a tensor of its own."""
        if not norm.weight:
            return NormParams()
        names = self._names.stored(self._prefix, role, "weight")
        source = replace(source or Source(names), add=1.0 if norm.stores_offset else 0.0)
        weight = self.weights[role] = self._param(role, names[0], (size,), source, shard, init=Init.ONES)
        if norm.kind is not NormKind.LAYER or not norm.bias:
            return NormParams(weight)
        names = self._names.stored(self._prefix, role, "bias")
        bias = self.biases[role] = self._param(role, names[0], (size,), Source(names), init=Init.ZEROS)
        return NormParams(weight, bias)

    def norm_of_heads(self, role: Role, kind: QkNorm, num_heads: int, norm: Norm, order: Source, shard: Shard) -> None:
        """The norm of q or k, of num_heads heads. order: of the elements of a head."""
        dim = shard.unit
        names = self._names.stored(self._prefix, role, "weight")
        if kind is QkNorm.PER_HEAD:
            self.norm(role, dim, norm, source=replace(order, names=names))
            return
        source, part = replace(order, names=names), self._names.norm_of_head
        if kind is QkNorm.OWN and part is None:
            source = replace(source, shape=(num_heads, dim))
        elif kind is QkNorm.OWN and part is not None:
            stem = self._prefix + self._names.stems[role]
            parts = tuple(f"{stem}.{part.format(head=head)}.weight" for head in range(num_heads))
            source = replace(source, names=parts, joined=True)
        self.norm(role, num_heads * dim, norm, shard, source)

    def linear(
        self,
        role: Role,
        outputs: int,
        inputs: int,
        shard: Shard,
        merge: str,
        *,
        bias: bool,
        source: Source | None = None,
        within: Role | None = None,
    ) -> None:
        """A linear layer. source: its rows in the stored tensor, which is that of `within` where it is fused. A bias of
        sharded outputs is sharded with them; one of summed outputs is whole."""
        stem = self._names.stems[within or role]
        if self._expert is not None and self._is_stacked:  # the stem is that tensor's path within the layer
            stem = stem.rpartition(".")[2]
        stem = self._prefix + stem + ("" if within is None else f".{role}")
        self.weights[role] = self._param(
            role,
            f"{stem}.weight",
            (outputs, inputs),
            self._stored_weight(source or Source(()), within or role, outputs, inputs),
            shard,
            merge,
        )
        if bias:
            stored = self._stored_bias(source or Source(()), within or role, outputs)
            of_bias = shard if shard.dim == 0 else WHOLE
            self.biases[role] = self._param(role, f"{stem}.bias", (outputs,), stored, of_bias, merge, init=Init.ZEROS)

    def router(self, spec: Moe, hidden: int) -> None:
        """The router of experts: in float32 whatever the model's dtype, not among the matrices that may stream."""
        size, role = spec.num_experts, Role.ROUTER
        self._router_param(self.weights, role, "weight", (size, hidden), Init.NORMAL)
        if spec.router_bias:
            self._router_param(self.biases, role, "bias", (size,), Init.ZEROS)
        if spec.correction:
            self._router_param(self.weights, Role.ROUTER_CORRECTION, "e_score_correction_bias", (size,), Init.ZEROS)

    def sinks(self, num_heads: int) -> None:
        """The scores of a head's sink."""
        names = self._names.stored(self._prefix, Role.SINKS, "sinks")
        self.weights[Role.SINKS] = self._param(Role.SINKS, names[0], (num_heads,), Source(names), Shard("tp"))

    def _router_param(
        self, into: dict[Role, Param], role: Role, suffix: str, shape: tuple[int, ...], init: Init
    ) -> None:
        names = self._names.stored(self._prefix, role, suffix)
        into[role] = replace(self._param(role, names[0], shape, Source(names), init=init), dtype="float32")

    def _stored_weight(self, source: Source, stored: Role, outputs: int, inputs: int) -> Source:
        """Returns where a matrix is stored: in a tensor of its layer, or in the stack of all experts' tensors."""
        source = replace(source, transposed=self._names.transposed)
        if self._expert is None or not self._is_stacked:
            return replace(source, names=self._names.stored(self._prefix, stored, "weight"))
        index, count = self._expert
        prefix = self._names.layer_prefix.format(layer=self._layer)
        rows = source.rows or outputs
        if self._names.interleaved_experts:
            names, shape = self._names.stored_interleaved(prefix, stored, "weight"), (count, inputs, rows)
            return replace(source, names=names, index=index, shape=shape, transposed=True)
        names = self._names.stored(prefix, stored, "weight")
        return replace(source, names=names, index=index, shape=(count, rows, inputs))

    def _stored_bias(self, source: Source, stored: Role, outputs: int) -> Source:
        """Returns where a bias is stored, as _stored_weight does."""
        if self._expert is None or not self._names.interleaved_experts:
            return replace(source, names=self._names.stored(self._prefix, stored, "bias"))
        index, count = self._expert
        prefix = self._names.layer_prefix.format(layer=self._layer)
        names = self._names.stored_interleaved(prefix, stored, "bias")
        return replace(source, names=names, index=index, shape=(count, source.rows or outputs))

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
            packs=role is not Role.KV_B,
        )


def _layer(hidden: int, spec: LayerSpec, layer: int, names: ParameterNames) -> LayerParams:
    found = _Group(names, names.layer_prefix.format(layer=layer), layer)
    norms = NORMS_OF[spec.place]

    def norm(role: Role) -> None:
        if role in norms:
            found.norm(role, hidden, spec.norm)

    norm(Role.ATTENTION_NORM)
    if isinstance(spec.attention, Mla):
        _latent_attention(found, hidden, spec, spec.attention)
    else:
        _attention(found, hidden, spec, spec.attention, names.fused_qkv)
    norm(Role.ATTENTION_POST_NORM)
    norm(Role.MLP_NORM)
    experts: tuple[LayerParams, ...] = ()
    shared = None
    if isinstance(spec.mlp, Moe):
        found.router(spec.mlp, hidden)
        experts, shared = (
            _experts(hidden, spec.mlp, layer, names),
            _shared_expert(found, hidden, spec.mlp, layer, names),
        )
    else:
        _mlp(found.within(names.mlp_prefix), hidden, spec.mlp, names)
    norm(Role.MLP_POST_NORM)
    return LayerParams(found.weights, found.biases, experts, shared)


def _experts(hidden: int, spec: Moe, layer: int, names: ParameterNames) -> tuple[LayerParams, ...]:
    experts = []
    for index in range(spec.num_experts):
        prefix = names.layer_prefix.format(layer=layer) + names.expert_prefix.format(expert=index)
        found = _Group(names, prefix, layer, (index, spec.num_experts))
        _mlp(found, hidden, spec.expert, names)
        experts.append(LayerParams(found.weights, found.biases))
    return tuple(experts)


def _shared_expert(
    layer_group: _Group, hidden: int, spec: Moe, layer: int, names: ParameterNames
) -> LayerParams | None:
    if spec.shared_expert is None:
        return None
    if spec.shared_gated:
        layer_group.linear(Role.SHARED_GATE, 1, hidden, WHOLE, "shared_gate", bias=False)
    found = _Group(names, names.layer_prefix.format(layer=layer) + names.shared_prefix, layer)
    _mlp(found, hidden, spec.shared_expert, names)
    return LayerParams(found.weights, found.biases)


def _latent_attention(found: _Group, hidden: int, layer: LayerSpec, spec: Mla) -> None:
    """Heads are sharded. The projections to latents are not: each rank computes all of these and has them cached."""

    def kept_then_turned(kept: int) -> Source:
        """The order of a vector whose first elements stay as stored."""
        order = () if layer.position is None else layer.position.head_order(spec.rope_dim)
        return Source((), order=(*range(kept), *(kept + place for place in order)) if order else ())

    by_head, norm = Shard("tp", unit=spec.key_dim), replace(layer.norm, eps=spec.norm_eps)
    outputs, order = spec.num_heads * spec.key_dim, kept_then_turned(spec.nope_dim)
    if spec.q_rank is None:
        found.linear(Role.Q, outputs, hidden, by_head, "q", bias=False, source=order)
    else:
        found.linear(Role.Q_A, spec.q_rank, hidden, WHOLE, "latents", bias=spec.bias)
    latents = kept_then_turned(spec.kv_rank)
    found.linear(Role.KV_A, spec.head_dim, hidden, WHOLE, "latents", bias=spec.bias, source=latents)
    if spec.q_rank is not None:
        found.norm(Role.Q_A_NORM, spec.q_rank, norm)
        found.linear(Role.Q_B, outputs, spec.q_rank, by_head, "q", bias=False, source=order)
    found.norm(Role.KV_A_NORM, spec.kv_rank, norm)
    of_head = spec.nope_dim + spec.v_dim
    found.linear(Role.KV_B, spec.num_heads * of_head, spec.kv_rank, Shard("tp", unit=of_head), "kv_b", bias=False)
    by_value = Shard("tp", dim=1, unit=spec.v_dim)
    found.linear(Role.O, hidden, spec.num_heads * spec.v_dim, by_value, "o", bias=spec.bias)


def _attention(found: _Group, hidden: int, layer: LayerSpec, spec: Gqa, fused: FusedQkv) -> None:
    dim, q, kv = spec.head_dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    by_head, by_kv_head = Shard("tp", unit=dim), Shard("tp", unit=dim, replicate=True)
    order = Source((), order=() if layer.position is None else layer.position.head_order(dim))
    starts = {Role.Q: 0, Role.K: q, Role.V: q + kv}
    group = q // spec.num_kv_heads
    starts_by_head = {Role.Q: (0, group), Role.K: (group, dim), Role.V: (group + dim, dim)}
    for role in starts:
        outputs, shard = (q, by_head) if role is Role.Q else (kv, by_kv_head)
        source, within = Source(()) if role is Role.V else order, None
        if fused is not FusedQkv.APART:
            source, within = replace(source, rows=q + 2 * kv, start=starts[role]), Role.QKV
        if fused is FusedQkv.BY_HEAD:
            start, run = starts_by_head[role]
            source = replace(source, start=start, run=run, stride=group + 2 * dim)
        found.linear(role, outputs, hidden, shard, "qkv", bias=spec.qkv_bias, source=source, within=within)
    if spec.qk_norm is not None:
        norm = replace(layer.norm, bias=False)
        found.norm_of_heads(Role.Q_NORM, spec.qk_norm, spec.num_heads, norm, order, by_head)
        found.norm_of_heads(Role.K_NORM, spec.qk_norm, spec.num_kv_heads, norm, order, by_kv_head)
    if spec.sinks:
        found.sinks(spec.num_heads)
    found.linear(Role.O, hidden, q, Shard("tp", dim=1, unit=dim), "o", bias=spec.o_bias)


def _mlp(found: _Group, hidden: int, spec: Gated | Plain, names: ParameterNames) -> None:
    fused = Role.GATE_UP if Role.GATE_UP in names.stems else None
    for place, role in enumerate((Role.GATE, Role.UP) if isinstance(spec, Gated) else (Role.UP,)):
        source = Source((), rows=2 * spec.width, start=place * spec.width) if fused else None
        if fused and names.interleaved_experts:
            source = Source((), rows=2 * spec.width, start=place, run=1, stride=2)
        found.linear(role, spec.width, hidden, Shard("tp"), "up", bias=spec.bias, source=source, within=fused)
    found.linear(Role.DOWN, hidden, spec.width, Shard("tp", dim=1), "down", bias=spec.bias)
