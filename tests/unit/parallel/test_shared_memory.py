"""Shared-memory collectives between real processes against sums and gathers made here; gloo's too, by the same test."""

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.shared_memory import SLOT_BYTES, SharedMemoryCollectives
from tests.support.decoder_ranks import RankProcesses

SHAPES = [(1,), (3, 5), (16, 1024), (SLOT_BYTES // 2 + 7,), (3, SLOT_BYTES // 4), (0, 8)]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, round_: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * round_ + rank)).to(dtype)


def collect(shape: tuple[int, ...], dtype: torch.dtype, context: ParallelContext) -> list[torch.Tensor]:
    """On a rank: every collective once, through shared memory and over gloo, which groups of several machines have."""
    mine = part(context.tp_rank, shape, dtype)
    shared = context.tp.group
    assert isinstance(shared, SharedMemoryCollectives)
    results = [
        context.tp.all_reduce(mine.clone()),
        context.tp.all_gather(mine.new_empty(context.tp_size, *shape), mine),
    ]
    gloo = shared._others
    results += [gloo.all_reduce(mine.clone()), gloo.all_gather(mine.new_empty(context.tp_size, *shape), mine)]
    return results


def hammer(rounds: int, context: ParallelContext) -> float:
    """On a rank: many reductions in a row, each checked; a slot reused too early would show."""
    worst = 0.0
    for round_ in range(rounds):
        parts = [part(rank, (64,), torch.float32, round_) for rank in range(context.tp_size)]
        total = context.tp.all_reduce(parts[context.tp_rank].clone())
        worst = max(worst, float((total - torch.stack(parts).sum(0)).abs().max()))
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("tp_size", [2, 3])
def test_collectives_equal_their_definition(ranks: RankProcesses, tp_size: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        parts = [part(rank, shape, dtype) for rank in range(tp_size)]
        wide = torch.float32 if dtype.is_floating_point else dtype
        total = sum(p.to(wide) for p in parts).to(dtype)  # type: ignore[union-attr]
        for reduced, gathered, by_gloo, gathered_by_gloo in ranks.call(collect, tp_size, 1, shape, dtype):
            assert torch.equal(reduced, total)
            assert torch.equal(gathered, torch.stack(parts)) and torch.equal(gathered_by_gloo, torch.stack(parts))
            # gloo adds in an order of its own, and rounds each sum of half precision
            loose = 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
            torch.testing.assert_close(by_gloo, total, rtol=loose, atol=loose)


def test_no_slot_is_reused_too_early(ranks: RankProcesses) -> None:
    assert max(ranks.call(hammer, 3, 1, 2000)) < 1e-5
