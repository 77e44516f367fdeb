"""The memory of captured steps on a device that replays them: which captures a start makes, and the bytes they keep.

Torch-free; read by `tandem plan`, by what sizes the KV pool, and by rank/start/captures.py, which makes them. All
captures share one pool for what a step computes, and the memory of its results; each keeps its arrays and what is
derived for those who come behind it.
"""

from collections.abc import Callable, Hashable
from itertools import product
from typing import Final, NamedTuple

from tandem.configs.schema import EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.planning.budget import ATTENTION_BYTES, GATHER_BYTES, MOST_PARTS
from tandem.workers.planning.resolve import kv_groups
from tandem.workers.planning.sizes import activation_bytes

DECODE_BUCKETS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), 768, 1024)
"""Tokens of captured steps without chunks of prompts."""
CHUNK_BUCKETS: Final = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of those with some. Steps of more tokens keep a device busy for longer than the host needs for them."""
PADDED_QUERIES: Final = 16
"""Tokens of a row of padding beside chunks; without them it has one."""
MAX_CAPTURES: Final = 128
OVERRUN: Final = 64
"""Tokens that a row may hold beyond --max-model-len: sampled before its end is known."""
NARROWEST_TOKENS: Final = 256
"""The context that the narrowest table of a captured step holds, where attention gathers all that the table has."""
ARRAY_BYTES: Final = 416
"""Bytes of a token in a step's arrays and its padding's, at most, and in what is derived."""
EDITS_EACH: Final = 8
"""Edits of logits that a captured step has room for, for each token that is sampled."""
EDITS_BESIDE: Final = 64
"""And beside them, so that one row alone may have as many."""
EDIT_BYTES: Final = 16
RULES_EACH: Final = 64
"""Integers of rules (sampling_rules.py) beside a mask, for each token that is sampled with some."""
RULES_BESIDE: Final = 2048
DRAW_BYTES: Final = 128
"""Bytes of a token in the arrays of a draw with rules, beside edits and rules."""
MOST_KEPT: Final = 32
"""Tokens with log probabilities whose logits change, of which the model's are kept."""
CANDIDATE_BYTES: Final = 4 * (16_384 + 1_024)
"""Bytes of a token that is sampled with top-k or top-p, while it is (triton_truncation.py)."""
LIST_BYTES: Final = 32
"""Bytes of an item of the list by which attention is cut."""
TABLE_BYTES: Final = 24
"""Bytes of an entry of block tables, while they are made."""


class CaptureSize(NamedTuple):
    """A capture: the tokens that it has room for, the blocks of a row, the rows, and the tokens that are sampled.
    by_shards: ranks of a stage draw them from their parts of the vocabulary."""

    num_tokens: int
    num_blocks: int
    has_adapters: bool
    has_chunks: bool
    num_rows: int
    num_samples: int
    by_shards: bool = False


def capture_sizes(
    settings: EngineSettings,
    max_model_len: int,
    key_of: Callable[[int, bool], Hashable | None],
    *,
    by_shards: bool = False,
) -> list[CaptureSize]:
    """Returns the captures that a start makes, the hot ones first: those of decode steps of all rows with their drafts,
    then those with chunks of prompts; for short contexts, then for longer ones. key_of: what tells the calls of
    attention apart whose block tables have so many blocks, with chunks or without, each key getting its widest table;
    None where they are not captured. by_shards: each of them also with a draw by shards."""
    if settings.model.enforce_eager:
        return []
    scheduler, samples, sizes = settings.scheduler, settings.most_samples, []
    most_tokens, adapted = scheduler.max_num_batched_tokens, (False, True) if settings.lora.enable_lora else (False,)
    for has_chunks, buckets, most in ((False, DECODE_BUCKETS, samples), (True, CHUNK_BUCKETS, most_tokens)):
        keys = {key_of(width, has_chunks): width for width in _table_widths(settings.cache.block_size, max_model_len)}
        keys.pop(None, None)
        own = [bucket for place, bucket in enumerate(buckets) if not place or buckets[place - 1] < most]
        if has_chunks and most <= PADDED_QUERIES:
            continue  # there are none
        kinds = product(enumerate(keys.values()), adapted, own, (True, False) if by_shards else (False,))
        for (place, width), has_adapters, tokens, parts in kinds:
            rows = min(tokens, scheduler.max_num_seqs) + tokens // PADDED_QUERIES if has_chunks else tokens
            size = CaptureSize(tokens, width, has_adapters, has_chunks, rows, min(tokens, samples), parts)
            sizes.append((place, size))
    return [size for _, size in sorted(sizes, key=lambda one: one[0])][:MAX_CAPTURES]


def most_edits(num_samples: int) -> int:
    """Returns the edits of logits that a capture has room for."""
    return EDITS_EACH * num_samples + EDITS_BESIDE


def most_numbers(num_samples: int, vocab_size: int) -> int:
    """Returns the integers of rules that a capture has room for: a mask for each token that is sampled, and beside it
    as many words or ids as are usual; one row alone may have all that a row may."""
    return num_samples * (-(-vocab_size // 32) + RULES_EACH) + RULES_BESIDE


def draw_bytes(num_samples: int, vocab_size: int) -> int:
    """Returns the most bytes of the arrays of a draw with rules."""
    numbers = 4 * most_numbers(num_samples, vocab_size)
    return num_samples * DRAW_BYTES + EDIT_BYTES * most_edits(num_samples) + numbers + 1024


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
    by_shards = mesh.tp_size > 1
    sizes = capture_sizes(settings, max_model_len, lambda num_blocks, has_chunks: has_chunks, by_shards=by_shards)
    if not sizes:
        return 0
    groups = kv_groups(settings, spec, max_model_len)
    tokens, samples = max(size.num_tokens for size in sizes), max(size.num_samples for size in sizes)
    logits = samples * spec.vocab_size * (4 + (3 if mesh.tp_size > 1 else 1) * element_bytes)  # gathered, in one piece
    sampling = samples * (CANDIDATE_BYTES + 4 * spec.vocab_size)  # and counts of a row's tokens
    sampling += draw_bytes(samples, spec.vocab_size) + 4 * MOST_KEPT * spec.vocab_size
    results = 2 * tokens * spec.hidden_size * element_bytes + logits + sampling
    gathers = _gather_bytes(spec, mesh, settings, element_bytes, max_model_len)
    tables = max(TABLE_BYTES * size.num_rows * size.num_blocks * groups.count for size in sizes)
    lists = LIST_BYTES * len({(layer.params.window, layer.attention) for layer in spec.layers})
    results += activation_bytes(spec, mesh, tokens, 0, element_bytes) + ATTENTION_BYTES
    results += lists * (1 + MOST_PARTS + 2 * tokens)  # where attention reads in place, cut by a list a kind of layer
    return results + max(tables, gathers) + sum(capture_bytes(size, groups) for size in sizes)


def capture_bytes(size: CaptureSize, groups: KVGroups) -> int:
    """Returns the most bytes that one capture keeps for itself."""
    return size.num_tokens * (ARRAY_BYTES + 8 * groups.count) + EDIT_BYTES * EDITS_BESIDE + 512


def _gather_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the bytes of tables and masks of decodes where attention gathers what they name."""
    size, first = settings.cache.block_size, kv_layouts(spec, mesh)[0].planes[0]
    most = max(1, GATHER_BYTES // (2 * size * first.heads * first.dim * element_bytes))
    blocks, windows = min(most_blocks(max_model_len, size), most), {layer.params.window for layer in spec.layers}
    return min(DECODE_BUCKETS[-1], settings.most_samples) * blocks * len(windows) * (TABLE_BYTES + 5 * size)
