"""The memory of captured steps on a device that replays them: which steps there can be, and the bytes that they keep.

Torch-free; read by `tandem plan`, by what sizes the KV pool, and by workers/graphs/cuda_graphs.py. All captures share
one pool for what a step computes, and each keeps its static inputs, its outputs and what its attention looks up.
"""

from typing import Final

from tandem.configs.schema import EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.planning.budget import ATTENTION_BYTES, GATHER_BYTES
from tandem.workers.planning.resolve import kv_groups
from tandem.workers.planning.sizes import activation_bytes

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of captured steps."""
MAX_CAPTURES: Final = 64
LONG = 8
"""Bytes of an id, a slot or a length."""


def graph_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the most bytes that a rank's captures take; 0 where none are made (TP groups)."""
    if mesh.tp_size > 1:
        return 0
    most_tokens = min(BUCKETS[-1], settings.scheduler.max_num_batched_tokens)
    buckets = [bucket for place, bucket in enumerate(BUCKETS) if not place or BUCKETS[place - 1] < most_tokens]
    width, widths = 1, [1]
    limit = _most_blocks(spec, mesh, settings.cache.block_size, element_bytes, max_model_len)
    while 2 * width <= limit:
        width *= 2
        widths.append(width)
    groups = kv_groups(settings, spec, max_model_len)
    kept = [capture_bytes(spec, groups, bucket, width, element_bytes) for bucket in buckets for width in widths]
    tables = [table_blocks(1)]
    while tables[-1] * settings.cache.block_size < max_model_len:
        tables.append(table_blocks(tables[-1] + 1))
    in_place = [table_bytes(spec, groups, bucket, width, element_bytes) for bucket in buckets for width in tables]
    shared = activation_bytes(spec, mesh, buckets[-1], 0, element_bytes) + ATTENTION_BYTES
    return shared + max(sum(sorted(of, reverse=True)[:MAX_CAPTURES]) for of in (kept, in_place))


def table_blocks(num_blocks: int) -> int:
    """Returns the blocks that each row of a captured step's table has room for, where attention reads the cache in
    place: 16, or that times a power of four."""
    width = 16
    while width < num_blocks:
        width *= 4
    return width


def table_bytes(spec: ArchSpec, groups: KVGroups, num_tokens: int, num_blocks: int, element_bytes: int) -> int:
    """Return the bytes of a capture whose attention reads the cache in place."""
    stream = 3 * spec.hidden_size * element_bytes
    rotary = len(spec.ropes) * 2 * spec.rope_dim * 4
    return num_tokens * (stream + rotary + groups.count * (4 * num_blocks + LONG) + 4 * LONG)


def capture_bytes(spec: ArchSpec, groups: KVGroups, num_tokens: int, num_blocks: int, element_bytes: int) -> int:
    """Returns the most bytes that one capture keeps: of so many tokens that attend to so many blocks each."""
    stream = 3 * spec.hidden_size * element_bytes  # an input and two outputs
    rotary = len(spec.ropes) * 2 * spec.rope_dim * 4
    positions = num_blocks * groups.block_size
    masks = len({layer.params.window for layer in spec.layers}) * positions * 4
    tables = LONG * (groups.count * (num_blocks + 1) + 2)  # with slots; lengths and the tokens' numbers
    return num_tokens * (stream + rotary + masks + tables + LONG) + LONG * positions


def _most_blocks(spec: ArchSpec, mesh: Mesh, block_size: int, element_bytes: int, max_model_len: int) -> int:
    """The widest block table of a captured step: a power of two that holds a context, and is gathered at once."""
    first = kv_layouts(spec, mesh)[0].planes[0]
    gathered = max(1, GATHER_BYTES // (2 * block_size * first.heads * first.dim * element_bytes))
    blocks = -(-max_model_len // block_size)
    return min(gathered, 1 << (blocks - 1).bit_length())
