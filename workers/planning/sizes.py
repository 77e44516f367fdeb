"""Bytes on each rank, computed from an ArchSpec: weights as that rank's decoder will hold them, KV, adapters.

Torch-free. Used by `tandem plan`, by the placement of layers (workers/planning/placing.py) and by the launcher's
checks. Tests compare it with the loaded decoder's `weight_bytes` and the KV cache's `block_bytes` for every family and
degree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from tandem.parallel.mesh import Mesh, layer_range
from tandem.parallel.params import Param
from tandem.workers.models.spec.arch import ArchSpec, LayerSpec, Mla, Moe
from tandem.workers.models.spec.config.head_config import HeadSpec, MedusaParams
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.kv_layout import block_layouts, kv_layout, kv_layouts, layouts_of
from tandem.workers.models.spec.parameters import ParameterTable
from tandem.workers.models.spec.stage_taps import stage_taps

Draft = ArchSpec | HeadSpec | None


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes on one rank. may_stream: indices on the rank of the layers whose matrices may stream, which have equal
    shapes. layer_bytes: the matrices of one of them; the rest stays on the device. layer_rest_bytes: of all layers.
    norm_bytes: of norms, tables of positions and biases outside of layers."""

    num_layers: int
    may_stream: tuple[int, ...]
    layer_bytes: int
    layer_rest_bytes: int
    table_bytes: int
    packed_table_bytes: int
    norm_bytes: int

    @property
    def total_bytes(self) -> int:
        layers = len(self.may_stream) * self.layer_bytes + self.layer_rest_bytes
        return layers + self.table_bytes + self.packed_table_bytes + self.norm_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything but the matrices that may stream."""
        return self.total_bytes - len(self.may_stream) * self.layer_bytes


def rank_weights(spec: ArchSpec, mesh: Mesh, element_bytes: int, packs: bool) -> RankWeights:
    """Returns the bytes of weights on the rank at `mesh`.

    packs: dense matrices are packed (CPU, except float16), so a tied table is held twice where both the lookup and the
    head are on this rank; so it is where the head has a scheme of its own.
    """
    table, own = _table_of(spec), layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)
    matrices, all_bytes = [], 0
    for layer in (table.layers[index] for index in own):
        held = tuple(param.held_bytes(mesh, element_bytes) for param in layer.matrices)
        rest = sum(param.local_bytes(mesh, element_bytes) for param in layer if not param.is_matrix)
        matrices.append(held)
        all_bytes += sum(held) + rest
    kinds = {kind: [i for i, other in enumerate(matrices) if other == kind] for kind in dict.fromkeys(matrices)}
    most = max(kinds, key=lambda kind: sum(kind) * len(kinds[kind]))
    embedding = table.embedding.local_bytes(mesh, element_bytes)
    head = table.head.held_bytes(mesh, element_bytes)
    head_bias = 0 if table.head_bias is None else table.head_bias.local_bytes(mesh, element_bytes)
    first, last = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp_size - 1
    ties_here = table.head is table.embedding and first and last
    return RankWeights(
        num_layers=len(own),
        may_stream=tuple(kinds[most]),
        layer_bytes=sum(most),
        layer_rest_bytes=all_bytes - len(kinds[most]) * sum(most),
        table_bytes=embedding * first + head * (last and not ties_here),
        packed_table_bytes=head * (ties_here and (packs or table.head.scheme is not None)),
        norm_bytes=(_whole(table.entry) * first + _whole(table.final_norm) * last) * element_bytes + head_bias * last,
    )


@lru_cache(maxsize=1)
def _table_of(spec: ArchSpec) -> ParameterTable:
    """Returns parameters_of(), which takes a second for tens of thousands of experts and is asked for every stage of
    every layout that `tandem plan` compares."""
    return parameters_of(spec)


def _whole(params: Iterable[Param]) -> int:
    """Returns the elements of parameters that every rank of a stage holds."""
    return sum(param.num_elements for param in params)


def draft_bytes(draft: Draft, spec: ArchSpec, mesh: Mesh, element_bytes: int, packs: bool) -> int:
    """Returns the bytes of a draft model's or a head's weights, which are whole on the rank at `mesh`, with tables of
    the model that a head has none of and this rank not all of. packs: as for rank_weights()."""
    if draft is None:
        return 0
    if isinstance(draft, ArchSpec):
        return rank_weights(draft, Mesh(), element_bytes, packs).total_bytes
    own = sum(param.held_bytes(Mesh(), element_bytes) for param in draft.params)
    if isinstance(params := draft.params, MedusaParams):
        return own
    if params.embedding is None and mesh.world_size > 1:
        own += _table_of(spec).embedding.local_bytes(Mesh(), element_bytes)
    if params.head is None and mesh.tp_size > 1:
        own += _table_of(spec).head.held_bytes(Mesh(), element_bytes)
    return own


def tap_bytes(
    draft: Draft, spec: ArchSpec, mesh: Mesh, num_tokens: int, element_bytes: int, *, is_captured: bool = False
) -> int:
    """Returns the bytes of what a step keeps on the rank at `mesh` for a head that reads several layers, and of copies
    for the stage behind, of as many steps as may be under way. is_captured: of this stage's own layers alone."""
    if not isinstance(draft, HeadSpec) or mesh.tp_rank > 0:
        return 0
    taps, copies = stage_taps(draft.taps, spec.num_layers, mesh), mesh.pp_size * (mesh.pp_rank < mesh.pp_size - 1)
    count = len(taps.own) if is_captured else len(taps.heard) * (1 + copies)
    return count * num_tokens * spec.hidden_size * element_bytes


def kv_token_bytes(
    spec: ArchSpec, mesh: Mesh, kv_dtype: str, windows: tuple[int | None, ...] = (None,), draft: Draft = None
) -> int:
    """Returns the bytes of one token's planes in a block on the rank at `mesh`, scales included. windows: of the groups
    of layers. draft: the draft model of this rank, whose layers are whole there."""
    of_draft = () if draft is None else layouts_of(draft.layers, 1, windows)
    return sum(layout.token_bytes(kv_dtype) for layout in block_layouts((*kv_layouts(spec, mesh, windows), *of_draft)))


def adapter_bytes(spec: ArchSpec, mesh: Mesh, rank: int, element_bytes: int) -> int:
    """Returns the bytes of a LoRA adapter of `rank` on every linear of this rank's layers.

    A [rank, inputs] and B [outputs, rank] are sharded as the base matrix is: A by inputs, B by outputs, the other
    whole.
    """
    table = _table_of(spec)
    elements = sum(
        rank * sum(param.local_shape(mesh))
        for layer in layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)
        for param in table.layers[layer].adaptable
    )
    return elements * element_bytes


def activation_bytes(spec: ArchSpec, mesh: Mesh, max_num_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """Returns an estimate of a full step's bytes beside weights and KV, on a rank of the last stage.

    It counts the residual stream, the widest layer's input, merged outputs and result, and logits in float32 with the
    sampler's copies. A rank of whole experts has rows for every expert of a token, as it may hold all of them.
    """
    widest = max(_widest(layer, spec.hidden_size, mesh) for layer in dict.fromkeys(spec.layers))
    return max_num_tokens * (3 * spec.hidden_size + widest) * element_bytes + 3 * max_num_seqs * spec.vocab_size * 4


def _widest(layer: LayerSpec, hidden: int, mesh: Mesh) -> int:
    """Returns the elements of a token that a layer holds at once beside the residual stream."""
    width = layer.mlp.width // mesh.tp_size
    of_mlp = 3 * width
    if isinstance(layer.mlp, Moe):  # of every expert of a token: gate, up and their product, then that and the output
        width = layer.mlp.width if mesh.expert_parallel else width
        of_mlp = layer.mlp.top_k * max(3 * width, width + hidden) + 3 * (layer.mlp.shared or 0) // mesh.tp_size
    return max(_attention_width(layer, mesh.tp_size), of_mlp)


def _attention_width(layer: LayerSpec, tp_size: int) -> int:
    attention = layer.attention
    heads = attention.num_heads // tp_size
    kv = sum(plane.heads * plane.dim for plane in kv_layout(layer, tp_size).planes)
    if isinstance(attention, Mla):
        of_latents = attention.head_dim + attention.kv_rank  # a query and an output, in products with latents
        return 2 * ((attention.q_rank or 0) + kv) + heads * (attention.key_dim + of_latents + attention.v_dim)
    q = heads * attention.head_dim
    return 2 * (q + kv) + q
