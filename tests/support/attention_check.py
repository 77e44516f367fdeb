"""Random steps for attention backends, and the comparison of one with the reference."""

import dataclasses
import random

import torch

from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import LayerKV, as_indexable, encode
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.reference_attention import ReferenceAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
RELATIVE = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 0.0}  # a unit in the last place
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def random_batch(rng: random.Random, block_size: int, query_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    """Rows with shuffled blocks; block 0 belongs to nobody."""
    counts = [-(-length // block_size) for length in seq_lens]
    free = list(range(1, 1 + sum(counts)))
    rng.shuffle(free)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, (count, queries, length) in enumerate(zip(counts, query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks)
        places = range(length - queries, length)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in places]
        positions += places
        starts.append(len(slots))
    return ForwardBatch(
        input_ids_T=torch.zeros(len(slots), dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slot_mapping_T=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RN=table,
        logits_rows_S=torch.tensor(starts[1:]) - 1,
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        block_size=block_size,
    )


def check(
    backend: AttentionBackend,
    batch: ForwardBatch,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    slopes: tuple[float, ...] | None = None,
    sinks: tuple[float, ...] | None = None,
) -> None:
    """Same output as the oracle, and the same cache afterwards, for a layer of the second group, on the batch's device.
    Quantized: what is rounded to half precision on the way may differ by one more rounding."""
    generator, device = torch.Generator().manual_seed(0), batch.positions_T.device

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    own = GroupTable(batch.slot_mapping_T, batch.block_table_RN)
    batch = dataclasses.replace(batch, block_table_RN=torch.zeros_like(batch.block_table_RN), further_groups=(own,))
    num_heads, num_kv_heads = heads
    storage = kv_dtype or dtype
    tokens, blocks = batch.num_tokens, int(own.block_table_RN.max()) + 2
    # Strided views, as the decoder passes them: q, k and v are parts of one merged product.
    qkv = noise(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    planes = [plane for _ in "kv" for plane in encode(noise(blocks, batch.block_size, num_kv_heads, head_dim), storage)]
    outputs, caches, params = [], [], AttentionParams(head_dim**-0.5, window, softcap, slopes, sinks)
    for each in (backend, ReferenceAttention()):
        ops = CpuPlatform().fused_ops(dtype) if isinstance(each, CpuAttention) else TorchFusedOps()
        keys, key_scales, values, value_scales = (None if plane is None else plane.clone() for plane in planes)
        kv = LayerKV(keys, values, key_scales, value_scales)
        kv.group = 1
        ops.store(k, v, kv, batch.slot_mapping_T)
        outputs.append(each.prepare(batch).attend(q, k, v, kv, params))
        caches.append([as_indexable(plane) for plane in (keys, values, key_scales, value_scales) if plane is not None])
    assert all(torch.equal(ours, exact) for ours, exact in zip(*caches, strict=True))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=RELATIVE[dtype], atol=TOLERANCE[dtype])
