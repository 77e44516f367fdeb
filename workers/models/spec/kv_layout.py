"""The KV cache of a layer as data: which planes a token has there, and how wide they are.

Torch-free. Read by sizes and `tandem plan`, the cache (workers/rank/kv_cache.py) and the layout digest of lower tiers
(workers/executor/tiers.py); copiers follow the cache. Grouped-query attention has two equal planes, keys and values;
latent attention has one, which all tensor-parallel ranks hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tandem.parallel.mesh import Mesh, layer_range
from tandem.workers.models.spec.arch import ArchSpec, LayerSpec, Mla

KV_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
KV_SCALE_BYTES: Final = {"int8": 4, "fp8_e4m3": 4}
"""Bytes of one token and head of a plane: quantized caches add a float32 scale to its elements."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A vector of `dim` elements for each token and head, on one rank."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A layer's planes, in order. group: layers of one group share block tables; 0 until windows have their own."""

    planes: tuple[Plane, ...]
    group: int = 0

    @classmethod
    def keys_and_values(cls, heads: int, dim: int) -> "KVLayout":
        return cls((Plane(heads, dim), Plane(heads, dim)))

    def token_bytes(self, kv_dtype: str) -> int:
        """Returns the bytes of a token in a cache of this type, by --kv-cache-dtype's names, scales included."""
        element, scale = KV_ELEMENT_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0)
        return sum(plane.heads * (plane.dim * element + scale) for plane in self.planes)


def kv_layout(layer: LayerSpec, tp_size: int) -> KVLayout:
    """Returns a layer's layout on one rank. With more ranks than KV heads each head is held by several ranks."""
    attention = layer.attention
    if isinstance(attention, Mla):
        return KVLayout((Plane(attention.num_kv_heads, attention.head_dim),))
    return KVLayout.keys_and_values(max(1, attention.num_kv_heads // tp_size), attention.head_dim)


def kv_layouts(spec: ArchSpec, mesh: Mesh) -> tuple[KVLayout, ...]:
    """Returns the layouts of the layers of the rank at `mesh`, in order."""
    own = layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)
    return tuple(kv_layout(spec.layers[layer], mesh.tp_size) for layer in own)


def described(layouts: Sequence[KVLayout]) -> str:
    """Returns the layouts in words that are equal for equal layouts alone: what stored bytes depend on."""
    runs: list[tuple[KVLayout, int]] = []
    for layout in layouts:
        if runs and runs[-1][0] == layout:
            runs[-1] = layout, runs[-1][1] + 1
        else:
            runs.append((layout, 1))
    return " ".join(
        f"{count}x{layout.group}:{'+'.join(f'{plane.heads}*{plane.dim}' for plane in layout.planes)}"
        for layout, count in runs
    )
