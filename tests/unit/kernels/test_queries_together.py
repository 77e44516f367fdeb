"""Decode attention of several queries of a row: each gives the bits that it gives alone, wherever its context ends."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.kernels.cpu.attention.cpu_decode_attention import (
    CpuDecodeAttention,
    DecodeTable,
    DecodeWork,
    Queries,
    partitions,
)
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams

BLOCK = 16
HEADS, KV_HEADS = 6, 2


def attended(
    kernel: CpuDecodeAttention, queries: Queries, q_TND: torch.Tensor, kv: LayerKV, params: AttentionParams, most: int
) -> torch.Tensor:
    """The kernel's output with at most so many queries together."""
    table = DecodeTable(torch.arange(2 * 20, dtype=torch.int32).view(2, 20))
    work = DecodeWork(queries, params.window, BLOCK, most)
    kernel.reserve(work, HEADS, q_TND.shape[2])
    out_TND = torch.full_like(q_TND, 9.0)
    kernel.attend(q_TND, kv, out_TND, work, table, params)
    return out_TND


def of_rows(*rows: tuple[int, int]) -> Queries:
    """Queries of rows with so many queries behind so long a context, in the order of their tokens."""
    row = np.array([number for number, (count, _) in enumerate(rows) for _ in range(count)])
    end = np.array([context + 1 + place for count, context in rows for place in range(count)])
    return Queries(row, np.arange(len(row)), end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("window", [None, 100, 5])
@pytest.mark.parametrize("more", [{}, {"softcap": 20.0, "slopes": True}], ids=["plain", "cap and slopes"])
def test_queries_together_are_as_alone(
    dtype: torch.dtype, head_dim: int, window: int | None, more: dict[str, Any]
) -> None:
    """Contexts that end before, at and behind the place where a part of a context ends; five and seventeen queries."""
    kernel = CpuDecodeAttention.make(dtype, head_dim, dtype)
    if kernel is None:
        pytest.skip("no compiled kernel here")
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(2, 40, BLOCK, KV_HEADS, head_dim, generator=generator).to(dtype)
    slopes = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6) if "slopes" in more else None
    params = AttentionParams(scale=0.2, window=window, softcap=more.get("softcap"), slopes=slopes)
    for rows in (((5, 125), (5, 0)), ((17, 250), (1, 127)), ((2, 126), (8, 128))):
        queries = of_rows(*rows)
        kv = LayerKV(pool[0].clone(), pool[1].clone())
        q_TND = torch.randn(len(queries.row), HEADS, head_dim, generator=generator).to(dtype)
        alone = attended(kernel, queries, q_TND, kv, params, 1)
        assert alone.isfinite().all()
        for most in (3, kernel.together):
            assert torch.equal(attended(kernel, queries, q_TND, kv, params, most), alone), (rows, most)


def test_a_query_reads_nothing_behind_itself() -> None:
    """A rejected draft may leave what is no number: the queries before it do not see it, and stay as they are."""
    kernel = CpuDecodeAttention.make(torch.float32, 64, torch.float32)
    if kernel is None:
        pytest.skip("no compiled kernel here")
    pool = torch.randn(2, 40, BLOCK, KV_HEADS, 64, generator=torch.Generator().manual_seed(4))
    queries, params = of_rows((5, 60)), AttentionParams(scale=0.2)
    q_TND = torch.randn(5, HEADS, 64, generator=torch.Generator().manual_seed(5))
    clean = attended(kernel, queries, q_TND, LayerKV(pool[0].clone(), pool[1].clone()), params, 5)
    pool.flatten(1, 2)[:, 64] = torch.nan  # the last of the five
    out = attended(kernel, queries, q_TND, LayerKV(pool[0], pool[1]), params, 5)
    assert torch.equal(out[:4], clean[:4]) and out[4].isnan().all()


def test_queries_of_a_row_share_its_partitions() -> None:
    """A context is read once for all of them, or as often as groups of them are needed."""
    for count, most, groups in ((5, 8, 1), (17, 8, 3), (5, 1, 5)):
        tasks, rows = partitions(of_rows((count, 2000)), None, BLOCK, most)
        assert len(tasks) == groups * 16 and len(rows) == count
        assert tasks[:, 5].max() - tasks[:, 5].min() <= 1, "groups are even"
    tasks, _ = partitions(of_rows((1, 300), (1, 301)), None, BLOCK, 8)
    assert tasks[:, 5].max() == 1, "of one row"
