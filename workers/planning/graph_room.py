"""The memory of captured steps on a device that replays them: which captures a start makes, and the bytes they keep.

Torch-free; read by `tandem plan`, by what sizes the KV pool, and by rank/start/captures.py, which makes them. All
captures share one pool for what a step computes, and the memory of its results; each keeps its arrays and what is
derived for those who come behind it.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import Final, NamedTuple

from tandem.configs.schema import EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.head_config import HeadSpec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.planning.budget import ATTENTION_BYTES, GATHER_BYTES, MOST_PARTS
from tandem.workers.planning.resolve import draft_spec, drafts_here, kv_groups
from tandem.workers.planning.sizes import activation_bytes, tap_bytes

DECODE_BUCKETS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), 768, 1024)
"""Tokens of captured steps without chunks of prompts."""
CHUNK_BUCKETS: Final = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of those with some. Steps of more tokens keep a device busy for longer than the host needs for them."""
PADDED_QUERIES: Final = 16
"""Tokens of a row of padding beside chunks; without them it has one."""
MAX_CAPTURES: Final = 128
GUESS_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GUESS_PLACES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows, and guesses of each, of captured passes of a drafter: a pass costs its weights, whatever its rows are."""
DRAFT_QUERIES: Final = 2
"""Tokens that a draft model reads of a row at most, once it has guesses (drafters/draft_ahead.py)."""
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


class GuessSize(NamedTuple):
    """A capture of all passes of a drafter: the rows that it has room for, the most guesses of each, the tokens of the
    first pass, and the blocks of a row."""

    num_rows: int
    num_places: int
    num_tokens: int
    num_blocks: int

    @property
    def frame(self) -> CaptureSize:
        """The room for the arrays of the first pass; rows of padding have several tokens, as beside chunks."""
        rows = self.num_rows + -(-self.num_tokens // PADDED_QUERIES)
        return CaptureSize(self.num_tokens, self.num_blocks, False, True, rows, self.num_rows)


def guess_sizes(rows: int, places: int, num_blocks: int, *, reads_along: bool) -> list[GuessSize]:
    """Returns the captures of a drafter that guesses up to so many tokens of a row, of no more rows than there are.
    num_blocks: of a row, at most; reads_along: it reads what each step has computed, also in steps without drafts."""
    most, queries = DECODE_BUCKETS[-1], 1 + places if reads_along else DRAFT_QUERIES
    own_places = [0] * reads_along + [min(count, places) for count in _up_to(GUESS_PLACES, places)]
    kinds = product([min(count, rows) for count in _up_to(GUESS_ROWS, rows)], own_places)
    sizes = [GuessSize(count, place, min(count * queries, most), num_blocks) for count, place in kinds]
    return sizes[:MAX_CAPTURES]


def _up_to(buckets: Sequence[int], most: int) -> list[int]:
    """Returns the buckets up to the first one that holds `most`."""
    return [bucket for place, bucket in enumerate(buckets) if not place or buckets[place - 1] < most]


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
    size = settings.cache.block_size
    widths = table_widths(size, most_blocks(max_model_len, size))
    for has_chunks, buckets, most in ((False, DECODE_BUCKETS, samples), (True, CHUNK_BUCKETS, most_tokens)):
        keys = {key_of(width, has_chunks): width for width in widths}
        keys.pop(None, None)
        own = _up_to(buckets, most)
        if has_chunks and most <= PADDED_QUERIES:
            continue  # there are none
        kinds = product(enumerate(keys.values()), adapted, own, (True, False) if by_shards else (False,))
        for (place, width), has_adapters, tokens, parts in kinds:
            rows = min(tokens, scheduler.max_num_seqs) + tokens // PADDED_QUERIES if has_chunks else tokens
            own_size = CaptureSize(tokens, width, has_adapters, has_chunks, rows, min(tokens, samples), parts)
            sizes.append((place, own_size))
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


def table_widths(block_size: int, most: int) -> list[int]:
    """Returns the powers of two below the blocks of a row, at most so many, and these."""
    width, widths = table_width(1, block_size), []
    while width < most:
        widths.append(width)
        width *= 2
    return [*widths, most]


def graph_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the most bytes that a rank's captures take, whichever attention it has, those of its drafter's passes
    among them."""
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
    results += max(tables, gathers) + sum(capture_bytes(size, groups) for size in sizes)
    results += tap_bytes(draft_spec(settings), spec, mesh, tokens, element_bytes, is_captured=True)
    return results + _guess_bytes(spec, mesh, settings, element_bytes, max_model_len)


def _guess_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the most bytes that captured passes of the rank's drafter take: of a model or a head that is whole."""
    draft = draft_spec(settings) if drafts_here(mesh) and mesh.pp_size == 1 else None
    if draft is None:
        return 0
    reads_along, own = isinstance(draft, HeadSpec), draft.spec if isinstance(draft, HeadSpec) else draft
    blocks, groups = most_blocks(max_model_len, settings.cache.block_size), kv_groups(settings, spec, max_model_len)
    rows, places = settings.scheduler.max_num_seqs, settings.max_drafts
    sizes = guess_sizes(rows, places, blocks, reads_along=reads_along)
    rows, tokens = max(size.num_rows for size in sizes), max(size.num_tokens for size in sizes)
    kept = sum(capture_bytes(size.frame, groups) for size in sizes)
    taps = len(draft.taps) if isinstance(draft, HeadSpec) else 0
    read = tokens * (6 + taps) * spec.hidden_size * element_bytes  # what heads read of the model, and keep of rows
    logits = rows * (spec.vocab_size * (3 * 4 + element_bytes) + CANDIDATE_BYTES)
    arrays = tokens * ARRAY_BYTES + 8 * (rows + 1) * places
    if own is None:
        return kept + read + logits + arrays
    work = activation_bytes(own, Mesh(), tokens, rows, element_bytes) + ATTENTION_BYTES
    tables = max(TABLE_BYTES * size.frame.num_rows * size.num_blocks * groups.count for size in sizes)
    gathers = _gather_bytes(own, Mesh(), settings, element_bytes, max_model_len)
    return kept + read + logits + arrays + work + max(tables, gathers)


def capture_bytes(size: CaptureSize, groups: KVGroups) -> int:
    """Returns the most bytes that one capture keeps for itself."""
    return size.num_tokens * (ARRAY_BYTES + 8 * groups.count) + EDIT_BYTES * EDITS_BESIDE + 512


def _gather_bytes(spec: ArchSpec, mesh: Mesh, settings: EngineSettings, element_bytes: int, max_model_len: int) -> int:
    """Returns the bytes of tables and masks of decodes where attention gathers what they name."""
    size, first = settings.cache.block_size, kv_layouts(spec, mesh)[0].planes[0]
    most = max(1, GATHER_BYTES // (2 * size * first.heads * first.dim * element_bytes))
    blocks, windows = min(most_blocks(max_model_len, size), most), {layer.params.window for layer in spec.layers}
    return min(DECODE_BUCKETS[-1], settings.most_samples) * blocks * len(windows) * (TABLE_BYTES + 5 * size)
