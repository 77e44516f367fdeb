"""The memory of captured steps on a device that replays them: which captures a start makes, and the bytes they keep.

Torch-free; read by `tandem plan`, by what sizes the KV pool, and by rank/start/captures.py, which makes them. All
captures share one pool for what a step computes, and each keeps its static inputs, its outputs and what its attention
looks up.
"""

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from tandem.configs.schema import EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.planning.budget import ATTENTION_BYTES, GATHER_BYTES, MOST_PARTS
from tandem.workers.planning.resolve import kv_groups
from tandem.workers.planning.sizes import activation_bytes

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of captured steps."""
MAX_CAPTURES: Final = 128
OVERRUN: Final = 64
"""Tokens that a row may hold beyond --max-model-len: sampled before its end is known."""
NARROWEST_TOKENS: Final = 256
"""The context that the narrowest table of a captured step holds, where attention gathers all that the table has."""
LONG = 8
"""Bytes of an id, a slot or a length."""


class CaptureSize(NamedTuple):
    """A capture: of so many tokens, that attend to so many blocks each."""

    num_tokens: int
    num_blocks: int
    has_adapters: bool = False


def capture_sizes(
    settings: EngineSettings, max_model_len: int, key_of: Callable[[int], Hashable | None]
) -> list[CaptureSize]:
    """Returns the captures that a start makes, the hot ones first: those of decode steps of all rows with their drafts,
    for short contexts and for longer ones. key_of: what tells the calls of attention apart whose block tables have so
    many blocks, each key getting its widest table; None where they are not captured."""
    if settings.model.enforce_eager:
        return []
    most = min(BUCKETS[-1], settings.most_samples)
    buckets = [bucket for place, bucket in enumerate(BUCKETS) if not place or BUCKETS[place - 1] < most]
    widths = {key_of(width): width for width in _table_widths(settings.cache.block_size, max_model_len)}
    widths.pop(None, None)
    adapted = (False, True) if settings.lora.enable_lora else (False,)
    sizes = [CaptureSize(bucket, width, own) for width in widths.values() for own in adapted for bucket in buckets]
    return sizes[:MAX_CAPTURES]


def most_blocks(max_model_len: int, block_size: int) -> int:
    """Returns the most blocks of a row, in each group of layers."""
    return -(-(max_model_len + OVERRUN) // block_size)


def table_width(num_blocks: int, block_size: int) -> int:
    """Returns the blocks that each row of a captured step's table has room for, where attention gathers them: a power
    of two."""
    return 1 << (max(num_blocks, NARROWEST_TOKENS // block_size) - 1).bit_length()


def _table_widths(block_size: int, max_model_len: int) -> list[int]:
    """The powers of two below the blocks of a row, and these."""
    most, width, widths = most_blocks(max_model_len, block_size), table_width(1, block_size), []
    while width < most:
        widths.append(width)
        width *= 2
    return [*widths, most]


def graph_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the most bytes that a rank's captures take, whichever attention it has."""
    size, groups = settings.cache.block_size, kv_groups(settings, spec, max_model_len)
    plane = kv_layouts(spec, mesh)[0].planes[0]
    most_gathered = max(1, GATHER_BYTES // (2 * size * plane.heads * plane.dim * element_bytes))

    def gathered(num_blocks: int) -> Hashable | None:
        width = table_width(num_blocks, size)
        return width if width <= most_gathered else None

    kept = [
        capture_bytes(spec, groups, one.num_tokens, one.num_blocks, element_bytes)
        for one in capture_sizes(settings, max_model_len, gathered)
    ]
    in_place = capture_sizes(settings, max_model_len, lambda num_blocks: ())
    tables = [table_bytes(spec, groups, one.num_tokens, one.num_blocks, element_bytes) for one in in_place]
    if not in_place:
        return 0
    shared = activation_bytes(spec, mesh, max(one.num_tokens for one in in_place), 0, element_bytes) + ATTENTION_BYTES
    return shared + max(sum(kept), sum(tables))


def table_bytes(spec: ArchSpec, groups: KVGroups, num_tokens: int, num_blocks: int, element_bytes: int) -> int:
    """Return the bytes of a capture whose attention reads the cache in place, cut by a list for each kind of layer."""
    stream = 3 * spec.hidden_size * element_bytes
    rotary = len(spec.ropes) * 2 * spec.rope_dim * 4
    lists = 4 * LONG * len({(layer.params.window, layer.attention) for layer in spec.layers})
    of_token = stream + rotary + groups.count * (4 * num_blocks + LONG) + 4 * LONG + 2 * lists
    return num_tokens * of_token + lists * (1 + MOST_PARTS)


def capture_bytes(spec: ArchSpec, groups: KVGroups, num_tokens: int, num_blocks: int, element_bytes: int) -> int:
    """Returns the most bytes that one capture keeps: of so many tokens that attend to so many blocks each."""
    stream = 3 * spec.hidden_size * element_bytes  # an input and two outputs
    rotary = len(spec.ropes) * 2 * spec.rope_dim * 4
    positions = num_blocks * groups.block_size
    masks = len({layer.params.window for layer in spec.layers}) * positions * 4
    tables = LONG * (groups.count * (num_blocks + 1) + 2)  # with slots; lengths and the tokens' numbers
    return num_tokens * (stream + rotary + masks + tables + LONG) + LONG * positions
