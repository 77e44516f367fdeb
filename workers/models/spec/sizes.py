"""Bytes on each rank, computed from an ArchSpec: weights as that rank's decoder will hold them, KV, adapters.

Torch-free. Used by `tandem plan`, by the placement of layers (workers/planning/placing.py) and by the launcher's
checks. Tests compare it with the loaded decoder's `weight_bytes` and the KV cache's `block_bytes` for every family and
degree.
"""

from dataclasses import dataclass
from typing import Final

from tandem.parallel.mesh import Mesh, layer_range
from tandem.workers.models.spec.arch import ArchSpec

KV_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
KV_SCALE_BYTES: Final = {"int8": 4, "fp8_e4m3": 4}
"""Bytes of one token and head, keys and values each: quantized caches add a float32 scale to head_dim elements."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix of a layer, whole: inputs x outputs. by_rows: sharded over tp by inputs, else by outputs.

    local_outputs: this rank's outputs, also where they are no equal share (KV heads that several ranks hold).
    """

    inputs: int
    outputs: int
    by_rows: bool
    bias: bool
    local_outputs: int


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes on one rank. layer_bytes: the matrices of one layer, which may stream; the rest stays on the device."""

    num_layers: int
    layer_bytes: int
    layer_rest_bytes: int
    table_bytes: int
    packed_table_bytes: int
    norm_bytes: int

    @property
    def total_bytes(self) -> int:
        layers = self.num_layers * (self.layer_bytes + self.layer_rest_bytes)
        return layers + self.table_bytes + self.packed_table_bytes + self.norm_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything but the matrices of layers."""
        return self.total_bytes - self.num_layers * self.layer_bytes


def layer_linears(spec: ArchSpec, tp_size: int) -> tuple[Linear, ...]:
    """Returns q, k, v, o, gate, up and down, as one rank of tp_size holds them."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    local_kv = spec.local_kv_heads(tp_size) * spec.head_dim
    hidden, width = spec.hidden_size, spec.intermediate_size
    gate = Linear(hidden, width, False, spec.mlp_bias, width // tp_size)
    key = Linear(hidden, kv, False, spec.qkv_bias, local_kv)
    return (
        Linear(hidden, q, False, spec.qkv_bias, q // tp_size),
        key,
        key,
        Linear(q, hidden, True, spec.o_bias, hidden),
        gate,
        gate,
        Linear(width, hidden, True, spec.mlp_bias, hidden),
    )


def rank_weights(spec: ArchSpec, mesh: Mesh, element_bytes: int, packs: bool) -> RankWeights:
    """Returns the bytes of weights on the rank at `mesh`.

    packs: matrices are packed (CPU, except float16), so a tied table is held twice where both the lookup and the head
    are on this rank.
    """
    linears = layer_linears(spec, mesh.tp_size)
    matrices = sum((x.inputs // mesh.tp_size if x.by_rows else x.inputs) * x.local_outputs for x in linears)
    biases = sum(x.bias * x.local_outputs for x in linears)
    norms = 2 * spec.hidden_size + spec.qk_norm * 2 * spec.head_dim
    table = -(-spec.vocab_size // mesh.tp_size) * spec.hidden_size
    first, last = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp_size - 1
    ties_here = spec.tie_word_embeddings and first and last
    return RankWeights(
        num_layers=len(layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)),
        layer_bytes=matrices * element_bytes,
        layer_rest_bytes=(biases + norms) * element_bytes,
        table_bytes=table * (1 if ties_here else first + last) * element_bytes,
        packed_table_bytes=table * (ties_here and packs) * element_bytes,
        norm_bytes=spec.hidden_size * last * element_bytes,
    )


def kv_token_bytes(spec: ArchSpec, mesh: Mesh, kv_dtype: str) -> int:
    """Returns the bytes of one token's keys and values on the rank at `mesh`, scales included."""
    layers = len(layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size))
    head = spec.head_dim * KV_ELEMENT_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0)
    return 2 * layers * spec.local_kv_heads(mesh.tp_size) * head


def adapter_bytes(spec: ArchSpec, mesh: Mesh, rank: int, element_bytes: int) -> int:
    """Returns the bytes of a LoRA adapter of `rank` on every linear of this rank's layers.

    A [rank, inputs] and B [outputs, rank] are sharded as the base matrix is: A by inputs, B by outputs, the other
    whole.
    """
    elements = sum(
        rank * ((x.inputs // mesh.tp_size if x.by_rows else x.inputs) + x.local_outputs)
        for x in layer_linears(spec, mesh.tp_size)
    )
    return elements * len(layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)) * element_bytes


def activation_bytes(spec: ArchSpec, tp_size: int, max_num_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """Returns an estimate of a full step's bytes beside weights and KV, on the last stage.

    It counts the residual stream, the widest layer's input, merged outputs and result, and logits in float32 with the
    sampler's copies.
    """
    q = spec.num_heads * spec.head_dim // tp_size
    kv = spec.local_kv_heads(tp_size) * spec.head_dim
    width = spec.intermediate_size // tp_size
    widest = max(2 * (q + 2 * kv) + q, 3 * width)
    return max_num_tokens * (3 * spec.hidden_size + widest) * element_bytes + 3 * max_num_seqs * spec.vocab_size * 4
