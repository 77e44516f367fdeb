"""The KV cache of a layer as data: which planes a token has there, and how wide they are.

Torch-free. Read by sizes and `tandem plan`, the cache (workers/rank/kv_cache.py) and the layout digest of lower tiers
(workers/executor/tiers.py); copiers follow the cache. Grouped-query attention has two equal planes, keys and values;
latent attention has one, which all tensor-parallel ranks hold.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tandem.parallel.mesh import Mesh, layer_range
from tandem.workers.models.spec.arch import ArchSpec, LayerSpec, Mla

KV_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
KV_SCALE_BYTES: Final = {"int8": 4, "fp8_e4m3": 4}
"""Bytes of one token and head of a plane: quantized caches add a float32 scale to its elements."""
MOST_GROUPS: Final = 8
"""Each group takes some microseconds of every step, and has a block table."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A vector of `dim` elements for each token and head, on one rank."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A layer's planes, in order. group: layers of one group share block tables (kv_windows)."""

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


def kv_windows(spec: ArchSpec, max_model_len: int, further: Sequence[LayerSpec] = ()) -> tuple[int | None, ...]:
    """Returns the window of each group of layers, for sequences of up to max_model_len tokens; None: none that matters.
    further: layers of a draft model, whose KV lies in the same blocks.

    Layers with one window form one group or several, so that groups have about as many layers each: the number of
    layers whose groups have the least padding of full layers, then of all, then are the fewest. Layers of unlike planes
    cannot share blocks of equal bytes: they form one group without a window.
    """
    layers = [*spec.layers, *further]
    counts = Counter(_window(layer, max_model_len) for layer in layers)
    if len(counts) == 1:
        return tuple(counts)
    if len({kv_layout(layer, 1) for layer in layers}) > 1:
        return (None,)

    def groups(window: int | None, size: int) -> int:
        return -(-counts[window] // size)

    def padding(size: int) -> tuple[int, int, int]:
        total = sum(groups(window, size) for window in counts)
        return groups(None, size) * size, total * size, total

    sizes = range(1, max(counts.values()) + 1)
    size = min((size for size in sizes if padding(size)[2] <= max(MOST_GROUPS, len(counts))), key=padding)
    order = sorted(counts, key=lambda window: (window is not None, window))
    return tuple(window for window in order for _ in range(groups(window, size)))


def _window(layer: LayerSpec, max_model_len: int) -> int | None:
    window = layer.params.window
    return None if window is None or window >= max_model_len else window


def kv_layouts(spec: ArchSpec, mesh: Mesh, windows: tuple[int | None, ...] = (None,)) -> tuple[KVLayout, ...]:
    """Returns the layouts of the layers of the rank at `mesh`, in order. windows: of the groups; layers of the stage
    with one window go to its groups in turn."""
    own = layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)
    return layouts_of([spec.layers[layer] for layer in own], mesh.tp_size, windows)


def layouts_of(layers: Sequence[LayerSpec], tp_size: int, windows: tuple[int | None, ...]) -> tuple[KVLayout, ...]:
    """Returns the layouts of these layers on one rank of a stage. windows: as for kv_layouts()."""
    layouts = tuple(kv_layout(layer, tp_size) for layer in layers)
    if len(windows) == 1:
        return layouts
    seen: Counter[int | None] = Counter()
    grouped = []
    for layer, layout in zip(layers, layouts, strict=True):
        window = layer.params.window
        window = window if window in windows else None
        groups = [group for group, other in enumerate(windows) if other == window]
        grouped.append(replace(layout, group=groups[seen[window] % len(groups)]))
        seen[window] += 1
    return tuple(grouped)


def planes_of(layouts: Sequence[KVLayout]) -> tuple[int, ...]:
    """Returns the place in the cache of each layer's planes: the i-th layers of all groups share their memory, as a
    block belongs to one group at a time."""
    seen: Counter[int] = Counter()
    places = []
    for layout in layouts:
        places.append(seen[layout.group])
        seen[layout.group] += 1
    return tuple(places)


def block_layouts(layouts: Sequence[KVLayout]) -> list[KVLayout]:
    """Returns the layouts that a block has memory for: those of all layers, or of as many as the largest group has."""
    places = planes_of(layouts)
    by_place = dict(zip(places, layouts, strict=True))
    assert len(by_place) == len(layouts) or len({layout.planes for layout in layouts}) == 1, "groups of unlike planes"
    return [by_place[place] for place in range(len(by_place))]


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
