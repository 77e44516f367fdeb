"""LAUNCHES: calls of all Triton kernels of the tree as layers make them, on CPU tensors, for tools/check_kernels.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.code_launches import CODE_LAUNCHES

if TYPE_CHECKING:
    from tandem.workers.kernels.triton.triton_attention import Multiprocessors


SHARED_KIB: Mapping[int, int] = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB of shared memory of a multiprocessor, by compute capability: kernels choose tiles by it."""


def multiprocessors() -> "Multiprocessors":
    """Returns those of the target that is compiled for."""
    from triton.runtime.driver import driver

    from tandem.workers.kernels.triton.triton_attention import H100, Multiprocessors

    return Multiprocessors(H100.number, SHARED_KIB[int(driver.active.get_current_target().arch)] * 2**10)


class LoraShape(NamedTuple):
    """A call of grouped LoRA: widths in elements, `room` ranks of a table. offset: elements before x in its memory."""

    dtype: str
    inputs: int
    outputs: tuple[int, ...]
    room: int
    offset: int


LORA_SHAPES = (
    LoraShape("bfloat16", 4096, (4096, 1024, 1024), 64, 0),
    LoraShape("bfloat16", 4095, (1001,), 33, 1),
    LoraShape("float16", 4096, (12288, 12288), 16, 0),
    LoraShape("float32", 2048, (2048,), 8, 0),
)
"""Each dtype; one and several projections; sizes and addresses that are multiples of 16 and ones that are not: Triton
makes variants of those that the kernel does not exclude. Other sizes change constants only."""


def launch_lora(shape: LoraShape) -> None:
    """Calls TritonLora as a layer does: single tokens, then tiles of tokens."""
    import torch

    from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables
    from tandem.workers.kernels.triton.triton_lora import TOKEN_STEP, TritonLora

    dtype, starts = getattr(torch, shape.dtype), torch.zeros(2, shape.room, dtype=torch.int64)
    ranks, scales = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    places = [sum(shape.outputs[:i]) for i in range(len(shape.outputs))]
    projections = [
        ProjectionTables(starts, starts, ranks, scales, shape.inputs, outputs, start)
        for outputs, start in zip(shape.outputs, places, strict=True)
    ]
    for tokens in (1, TOKEN_STEP + 1):
        x_TI = torch.empty(shape.offset + tokens * shape.inputs, dtype=dtype)[shape.offset :].view(tokens, -1)
        y_TO = torch.empty(tokens, sum(shape.outputs), dtype=dtype)
        rows = AdapterRows(torch.zeros(tokens, dtype=torch.int32), [(0, tokens, 0)])
        TritonLora().add(y_TO, x_TI, torch.empty(4096, dtype=dtype), projections, rows)


class ExpertShape(NamedTuple):
    """A mixture of experts: widths in elements; biased: experts have biases."""

    dtype: str
    hidden: int
    width: int
    experts: int
    biased: bool


EXPERT_SHAPES = (
    ExpertShape("bfloat16", 2048, 768, 128, False),
    ExpertShape("bfloat16", 2880, 2880, 32, True),
    ExpertShape("float16", 4096, 14336, 8, False),
    ExpertShape("float32", 1001, 333, 5, True),
)
"""Each dtype, with and without biases, sizes that are multiples of 16 and ones that are not."""


def launch_experts(shape: ExpertShape, candidate: int = 0) -> None:
    """Calls TritonExperts as a layer does, with few and with many rows for each expert. candidate: the number of the
    tile, 0 for the default."""
    import torch

    from tandem.parallel.context import ParallelContext
    from tandem.parallel.expert_methods import ExpertParams, Groups
    from tandem.parallel.linear_methods import as_given, plain
    from tandem.parallel.params import Param, Source
    from tandem.workers.kernels.triton.tiles import FEW, MANY, TunedTiles, experts_use, words
    from tandem.workers.kernels.triton.triton_experts import MANY_FROM, TritonExperts

    def param(*size: int) -> Param:
        return Param(name="x.weight", shape=size, role="x", source=Source(("x.weight",)), merge="x")

    dtype = getattr(torch, shape.dtype)
    chosen = {}
    for has_many, table in ((False, FEW[dtype.itemsize]), (True, MANY[dtype.itemsize])):
        use = experts_use(dtype, shape.experts, shape.width, shape.hidden, has_many=has_many)
        if candidate < len(table):
            chosen[words(use)] = table[candidate]
    ops = TritonExperts(plain, as_given, tiles=TunedTiles(chosen))
    biases = (param(shape.width),) if shape.biased else ()
    one = ExpertParams((param(shape.width, shape.hidden),), biases)
    method = ops.method([one] * shape.experts, ParallelContext.single())
    for slot in method.slots():
        slot.accept(torch.empty(slot.params[0].shape, dtype=dtype))
    for tokens in (1, MANY_FROM * shape.experts):
        if not any(use.endswith("few" if tokens == 1 else "many") for use in chosen):
            continue
        order, ends = torch.zeros(2 * tokens, dtype=torch.int32), torch.zeros(shape.experts, dtype=torch.int32)
        groups = Groups(order, order, ends, 2)
        for gathers in (True, False):
            x = torch.empty((1 if gathers else 2) * tokens, shape.hidden, dtype=dtype)
            method.apply(x, groups, gathers=gathers)
        y_PH, weight_TK = torch.empty(2 * tokens, shape.hidden, dtype=dtype), torch.zeros(tokens, 2)
        base, gate = torch.empty(tokens, shape.hidden, dtype=dtype), torch.empty(tokens, 1, dtype=dtype)
        for more in ((), (base,), (base, gate)):
            ops.combine(y_PH, weight_TK, groups, *more)


class AttentionShape(NamedTuple):
    """A layer's attention: dtypes of queries and cache, elements of a head, query heads of each of two KV heads.
    is_plain: without window, soft-cap, slopes and sinks; else with all of them."""

    dtype: str
    kv_dtype: str
    dim: int
    group: int
    is_plain: bool


ATTENTION_SHAPES = (
    AttentionShape("bfloat16", "bfloat16", 128, 4, True),
    AttentionShape("bfloat16", "float8_e4m3fn", 128, 8, True),
    AttentionShape("bfloat16", "int8", 80, 1, False),
    AttentionShape("bfloat16", "bfloat16", 256, 2, False),
    AttentionShape("float16", "float16", 64, 7, True),
    AttentionShape("float16", "int8", 128, 71, False),
    AttentionShape("float32", "float32", 96, 3, False),
    AttentionShape("float32", "float32", 128, 17, True),
)
"""Each dtype of queries and of caches, both sizes of tiles; one query head of each KV head, more than a tile has."""


def launch_attention(shape: AttentionShape, candidate: int = 0) -> None:
    """Attends as a layer does: decodes of few rows and of many, and chunks. candidate: the number of the tile, 0 for
    the default."""
    import torch

    from tandem.workers.attention.triton_paged import CHUNKS, DECODES
    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.tiles import TunedTiles, attention_class, attention_use, words
    from tandem.workers.kernels.triton.triton_attention import FEWEST_ROWS, Kept, Rows, attend_chunks, chunk_tiles
    from tandem.workers.kernels.triton.triton_decode import WorkLists, attend_decodes, decode_tiles
    from tandem.workers.models.spec.arch import AttentionParams

    dtype, kv_dtype, heads = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), 2 * shape.group
    plane = torch.zeros(4, 16, 2, shape.dim, dtype=kv_dtype)
    scales = None if kv_dtype.itemsize > 1 else torch.zeros(4, 16, 2)
    kv = LayerKV(plane, plane, scales, scales)
    each = (1.0,) * heads
    params = AttentionParams(1.0) if shape.is_plain else AttentionParams(1.0, 100, 5.0, each, each)
    of, chosen = attention_class(dtype.itemsize, shape.dim, scales is not None), {}
    here = multiprocessors()
    for kernel, table in (
        ("attend_parts", decode_tiles(of, dtype, here)),
        ("attend_tiles", chunk_tiles(of, here)),
    ):
        use = attention_use(kernel, dtype, shape.dim, shape.group, kv_dtype)
        if candidate < len(table):
            chosen[words(use)] = table[candidate]
    kernels = ("attend_parts", 1, DECODES), ("attend_parts", FEWEST_ROWS + 1, DECODES), ("attend_tiles", 2, CHUNKS)
    for kernel, num_rows, queries in kernels:
        if not any(use.startswith(kernel) for use in chosen):
            continue
        tokens = num_rows * queries.start
        q_TND = torch.empty(tokens, heads, shape.dim, dtype=dtype)
        table = torch.zeros(num_rows, 16, dtype=torch.int32)
        rows = Rows(torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64), table)
        if queries is CHUNKS:
            attend_chunks(q_TND, kv, torch.empty_like(q_TND), rows, params, Kept(here, TunedTiles(chosen)), queries)
        else:
            lists = WorkLists(rows.starts, rows.positions_T, queries)
            attend_decodes(q_TND, kv, torch.empty_like(q_TND), rows, params, Kept(here, TunedTiles(chosen)), lists)


class LatentShape(NamedTuple):
    """A layer's attention over latents: dtypes of queries and cache, heads, elements of a latent and of a key that
    rotate."""

    dtype: str
    kv_dtype: str
    heads: int
    rank: int
    rope: int


LATENT_SHAPES = (
    LatentShape("bfloat16", "bfloat16", 16, 512, 64),
    LatentShape("float16", "float16", 5, 512, 64),
    LatentShape("bfloat16", "float8_e4m3fn", 16, 512, 64),
    LatentShape("bfloat16", "int8", 128, 512, 64),
    LatentShape("float16", "int8", 16, 512, 64),
    LatentShape("float16", "float8_e4m3fn", 16, 512, 64),
    LatentShape("bfloat16", "bfloat16", 40, 256, 32),
    LatentShape("float16", "int8", 40, 256, 32),
    LatentShape("bfloat16", "bfloat16", 7, 100, 20),
    LatentShape("float16", "float8_e4m3fn", 7, 128, 64),
    LatentShape("float32", "float32", 17, 128, 64),
)
"""Each dtype of queries and of caches, each size of tiles; fewer heads than a tile has rows, as many, and more."""


def launch_latents(shape: LatentShape) -> None:
    """Attends as a layer does: decodes, and chunks."""
    import torch

    from tandem.workers.attention.triton_paged import CHUNKS, DECODES
    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.triton_attention import Kept, Rows
    from tandem.workers.kernels.triton.triton_decode import WorkLists
    from tandem.workers.kernels.triton.triton_latents import LatentQueries, attend_latent_chunks, attend_latent_decodes

    dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    scales = None if kv_dtype.itemsize > 1 else torch.zeros(4, 16, 1)
    plane = torch.zeros(4, 16, 1, shape.rank + shape.rope, dtype=kv_dtype)
    kv, table = LayerKV(plane, plane, scales, scales), torch.zeros(2, 16, dtype=torch.int32)
    for lengths in (DECODES, CHUNKS):
        tokens = 2 * lengths.start
        q_TNL = torch.empty(tokens, shape.heads, shape.rank, dtype=dtype)
        queries = LatentQueries(q_TNL, torch.empty(tokens, shape.heads, 128 + shape.rope, dtype=dtype), shape.rope, 1.0)
        rows = Rows(torch.zeros(3, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64), table)
        if lengths is CHUNKS:
            attend_latent_chunks(queries, kv, torch.empty_like(q_TNL), rows, Kept(multiprocessors()), lengths)
        else:
            lists = WorkLists(rows.starts, rows.positions_T, lengths)
            attend_latent_decodes(queries, kv, torch.empty_like(q_TNL), rows, Kept(multiprocessors()), lists)


class GatherShape(NamedTuple):
    """A gather of contexts: dtypes of queries and cache, elements of a head."""

    dtype: str
    kv_dtype: str
    dim: int


GATHER_SHAPES = (
    GatherShape("bfloat16", "bfloat16", 128),
    GatherShape("bfloat16", "float8_e4m3fn", 128),
    GatherShape("bfloat16", "int8", 256),
    GatherShape("float16", "float16", 80),
    GatherShape("float16", "int8", 64),
    GatherShape("float16", "float8_e4m3fn", 8),
    GatherShape("bfloat16", "float32", 72),
)
"""Each dtype of queries and of caches, as far as the flash kernel takes them; the smallest and the widest heads."""


def launch_gather(shape: GatherShape) -> None:
    """Gathers as prompts do: all heads, and one of them."""
    import torch

    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.triton_gather import gather

    kv_dtype = getattr(torch, shape.kv_dtype)
    plane = torch.zeros(4, 16, 2, shape.dim, dtype=kv_dtype)
    scales = None if shape.kv_dtype not in ("int8", "float8_e4m3fn") else torch.zeros(4, 16, 2)
    kv, rows = LayerKV(plane, plane, scales, scales), torch.zeros(3, dtype=torch.int32)
    for heads in (2, 1):
        out = torch.empty(2, 100, heads, shape.dim, dtype=getattr(torch, shape.dtype))
        gather(kv, rows, rows[1:], torch.zeros(2, 16, dtype=torch.int32), out, 2 - heads)


class FewRowsShape(NamedTuple):
    """A product of a row: outputs and inputs of the weight."""

    dtype: str
    outputs: int
    inputs: int
    biased: bool


FEW_ROWS_SHAPES = (FewRowsShape("bfloat16", 1024, 4096, False), FewRowsShape("float16", 1000, 1080, True))
"""Both dtypes; inputs that tiles divide and ones that they do not; biases added by each of the kernels."""


def launch_few_rows(shape: FewRowsShape) -> None:
    """Multiplies by all plans that a start may measure."""
    import torch

    from tandem.workers.kernels.triton.triton_few_rows import few_rows_plans, multiply_few_rows

    dtype = getattr(torch, shape.dtype)
    x_TI, bias = torch.empty(1, shape.inputs, dtype=dtype), torch.empty(shape.outputs, dtype=dtype)
    for plan in few_rows_plans(shape.outputs, shape.inputs, 132):
        weight_OI = torch.empty(shape.outputs, shape.inputs, dtype=dtype)
        multiply_few_rows(x_TI, weight_OI, bias if shape.biased else None, plan)


def launch_sampling() -> None:
    """Edits logits and draws as a step does, with one row and with many."""
    import numpy as np
    import torch

    from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens
    from tandem.workers.kernels.sampling_ops import Draws, RandomRows
    from tandem.workers.kernels.sampling_rules import HEADER, SamplingRules
    from tandem.workers.kernels.step_arrays import sending_with
    from tandem.workers.kernels.triton.sampling.triton_sampling import PROGRAMS, TritonSampling

    kinds = [torch.float32] * 3 + [torch.int64] + [torch.int32] * 3 + [torch.float32]
    for rows, vocab in ((1, 151_936), (PROGRAMS, 50_257)):
        zeros, ones = np.zeros(rows), np.ones(rows)
        draws = Draws.of(
            np.arange(rows),
            temperature=ones,
            top_k=zeros.astype(np.int64),
            top_p=ones,
            min_p=zeros,
            seed=zeros.astype(np.uint64),
            choice=zeros.astype(np.int64),
        )
        draw = TritonSampling().prepare_draw(draws, sending_with(lambda host: host))
        ids_S = torch.zeros(rows, dtype=torch.int64)
        draw(torch.zeros(rows, vocab), torch.zeros(rows), ids_S, torch.zeros_like(ids_S))
        random = RandomRows.sent(draws, sending_with(lambda host: host))
        TritonSampling().greatest(torch.zeros(rows, vocab), vocab, torch.zeros(rows), torch.zeros_like(ids_S), random)
        numbers = LogitEdits[torch.Tensor](*(torch.zeros(rows, dtype=kind) for kind in kinds))
        tokens = RowTokens(torch.zeros(rows, 64, dtype=torch.int32), ids_S, ids_S)
        counts = torch.zeros(rows, vocab, dtype=torch.int32)
        logits = torch.zeros(rows, vocab)
        rules = SamplingRules(torch.zeros(rows, dtype=torch.int32), torch.zeros(HEADER, dtype=torch.int32))
        noted = TritonSampling().keep_logits(logits, rules, logits[:1])
        TritonSampling().edit_all(logits, tokens, numbers, counts, rules)
        TritonSampling().report(logits, ids_S, rules, logits[:1], noted)


class FusedShape(NamedTuple):
    """A layer's small operations: dtypes of activations and cache, widths in elements, heads of q and of k, elements of
    a head. is_plain: RMSNorms, a rotation, a gated activation; else LayerNorms, norms of heads, no gate. offset:
    elements before each row of activations in its memory."""

    dtype: str
    kv_dtype: str
    hidden: int
    width: int
    heads: tuple[int, int]
    dim: int
    is_plain: bool
    offset: int


FUSED_SHAPES = (
    FusedShape("bfloat16", "bfloat16", 4096, 14336, (32, 8), 128, True, 0),
    FusedShape("bfloat16", "float8_e4m3fn", 16384, 53248, (128, 8), 128, True, 0),
    FusedShape("bfloat16", "int8", 2560, 10240, (32, 32), 80, False, 0),
    FusedShape("bfloat16", "float8_e4m3fn", 2304, 9216, (8, 4), 256, False, 0),
    FusedShape("float16", "int8", 4544, 18176, (71, 1), 64, True, 0),
    FusedShape("float16", "float16", 1001, 3003, (3, 1), 66, False, 1),
    FusedShape("float32", "float32", 8192, 28672, (12, 12), 512, False, 0),
    FusedShape("float32", "float8_e4m3fn", 576, 1536, (9, 3), 64, True, 1),
)
"""Each dtype of activations and of caches; the widest rows and heads; sizes and addresses that are multiples of 16 and
ones that are not."""


def launch_fused(shape: FusedShape) -> None:
    """Calls TritonFusedOps as layers do: the first of a stage, whose residual has nothing to add, and later ones; with
    and without norms of heads, rotations and a cache."""
    import torch

    from tandem.workers.kernels.kv_store import LayerKV
    from tandem.workers.kernels.triton.triton_fused_ops import TritonFusedOps
    from tandem.workers.models.spec.arch import Activation

    dtype, kv_dtype, ops = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype), TritonFusedOps()
    (q_heads, kv_heads), dim = shape.heads, shape.dim

    def rows(*size: int) -> torch.Tensor:
        return torch.empty(shape.offset + math.prod(size), dtype=dtype)[shape.offset :].view(size)

    for x_TH in (None, rows(2, shape.hidden)):
        if shape.is_plain:
            ops.add_rms_norm(x_TH, rows(2, shape.hidden), rows(shape.hidden), 1e-6)
        else:
            for weight, bias in ((None, None), (rows(shape.hidden), None), (rows(shape.hidden), rows(shape.hidden))):
                ops.add_layer_norm(x_TH, rows(2, shape.hidden), weight, bias, 1e-6)
    for kind in Activation:
        ops.activate(rows(2, shape.width), kind, gated=shape.is_plain)
    qk_TSD, v_TKD = rows(2, q_heads + 2 * kv_heads, dim).split((q_heads + kv_heads, kv_heads), dim=1)
    plane = torch.zeros(4, 16, kv_heads, dim, dtype=kv_dtype)
    scales = None if kv_dtype.itemsize > 1 else torch.zeros(4, 16, kv_heads)
    kv, slots = LayerKV(plane, plane, scales, scales), torch.zeros(2, dtype=torch.int64)
    weight, angle = None if shape.is_plain else rows(q_heads + kv_heads, dim), rows(2, 1, dim)
    ops.norm_rotate(qk_TSD, weight, 1e-6, angle, angle)
    for angles in ((angle, angle), (None, None)):
        ops.rotate_store(qk_TSD, v_TKD, weight, 1e-6, *angles, kv, slots)


LAUNCHES: Mapping[str, Callable[[], None]] = {
    **{f"lora {number}": partial(launch_lora, shape) for number, shape in enumerate(LORA_SHAPES)},
    **{f"attention {number}": partial(launch_attention, shape) for number, shape in enumerate(ATTENTION_SHAPES)},
    **{f"latents {number}": partial(launch_latents, shape) for number, shape in enumerate(LATENT_SHAPES)},
    **{f"experts {number}": partial(launch_experts, shape) for number, shape in enumerate(EXPERT_SHAPES)},
    **{f"gather {number}": partial(launch_gather, shape) for number, shape in enumerate(GATHER_SHAPES)},
    **{f"few rows {number}": partial(launch_few_rows, shape) for number, shape in enumerate(FEW_ROWS_SHAPES)},
    **CODE_LAUNCHES,
    "sampling": launch_sampling,
    **{f"fused {number}": partial(launch_fused, shape) for number, shape in enumerate(FUSED_SHAPES)},
}
"""Every module that launches kernels has entries, which together launch all variants that it can choose. Each is a job
of its own, so that they fill all cores."""


def candidate_launches() -> dict[str, Callable[[], None]]:
    """Returns entries for the tiles that are no defaults, by shape and number of a candidate."""
    from tandem.workers.kernels.triton import tiles

    def numbers(*tables: Mapping[Any, Sequence[object]]) -> range:
        return range(1, max(len(candidates) for table in tables for candidates in table.values()))

    entries: dict[str, Callable[[], None]] = {}
    for number in numbers(tiles.CHUNKS, tiles.DECODES):
        for place, shape in enumerate(ATTENTION_SHAPES):
            entries[f"attention {place}, tile {number}"] = partial(launch_attention, shape, number)
    for number in numbers(tiles.FEW, tiles.MANY):
        for place, each in enumerate(EXPERT_SHAPES):
            entries[f"experts {place}, tile {number}"] = partial(launch_experts, each, number)
    return entries
