"""Sums in one shot: which ranks use them, up to how many bytes, and never where one of them cannot or sums wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import Collectives
from tandem.parallel.exchange.small_sums import SIZES, SmallSums, crossover
from tandem.parallel.exchange.symmetric_memory import symmetric_sums
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.tuning import call_timer
from tandem.workers.tuning.call_timer import CALLS, REPEATS, queued_seconds
from tests.support.thread_ranks import ThreadRanks

KIB = 2**10
CPU = torch.device("cpu")


class Shot:
    """The sum of the ranks' tensors, by the threads' exchange; counts its calls. off: is added to it."""

    def __init__(self, share: Callable[[Any], list[Any]], off: float = 0.0, refuses: bool = False) -> None:
        self._share, self._off, self._refuses = share, off, refuses
        self.num_sums = 0
        self.has_joined = False

    def join(self) -> None:
        if self._refuses:
            raise RuntimeError("cuMemMap: not supported")
        self.has_joined = True

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is not torch.float16

    def sum(self, tensor: torch.Tensor) -> None:
        assert self.has_joined
        self.num_sums += 1
        parts = self._share(tensor.clone())
        tensor.copy_(torch.stack(parts).sum(0) + self._off)


def opened(context: ParallelContext, share: Any, makes: Callable[[int, Any], Shot], faster_to: list[int]) -> Any:
    """Opens the sums of a rank, whose device sums in one shot faster up to so many bytes, by rank."""
    made: list[Shot] = []

    def make(group: Any, device: torch.device) -> Shot:
        made.append(makes(context.rank, share))
        return made[0]

    def seconds_of(call: Callable[[], object]) -> float:
        before = made[0].num_sums
        call()
        size_bytes = sizes.pop(0)
        is_shot = made[0].num_sums > before
        return 2.0 if is_shot and size_bytes > faster_to[context.rank] else 1.0 if is_shot else 1.5

    sizes = [*SIZES, *SIZES]
    group: Any = None
    sums = symmetric_sums(group, context.tp.group, context.tp_size, CPU, context.rank, seconds_of, make)
    return sums, made


def summed(faster_to: list[int], context: ParallelContext, share: Any) -> Any:
    sums, made = opened(context, share, lambda rank, share: Shot(share), faster_to)
    before = made[0].num_sums
    cases = [(8 * KIB, torch.bfloat16), (64 * KIB, torch.bfloat16), (8 * KIB, torch.float16)]
    results = [
        sums.all_reduce(torch.full((size // 2,), context.rank + 1.0).to(dtype))[0].item() for size, dtype in cases
    ]
    strided = sums.all_reduce(torch.ones(64, 2)[:, 0])
    return getattr(sums, "most_bytes", 0), results, made[0].num_sums - before, strided.tolist() == [2.0] * 64


def test_ranks_sum_small_tensors_in_one_shot_up_to_what_is_faster_on_all() -> None:
    told = ThreadRanks().call(summed, 2, 1, [256 * KIB, 32 * KIB])
    assert told == [(32 * KIB, [3.0, 3.0, 3.0], 1, True)] * 2, "larger, half-precision and strided ones are the others'"


@pytest.mark.parametrize(
    ("ranks", "makes"),
    [
        (2, lambda rank, share: Shot(share, off=float(rank))),  # one rank's sums are wrong
        (2, lambda rank, share: Shot(share, refuses=rank == 1)),
        (2, lambda rank, share: [Shot(share)][rank]),  # one has no memory for it
        (3, lambda rank, share: Shot(share)),  # torch adds in another order
    ],
    ids=["wrong", "not mapped", "not made", "three"],
)
def test_the_library_sums_where_any_rank_cannot(ranks: int, makes: Callable[[int, Any], Shot]) -> None:
    def chosen(context: ParallelContext, share: Any) -> bool:
        return opened(context, share, makes, [2**30] * ranks)[0] is context.tp.group

    assert ThreadRanks().call(chosen, ranks, 1) == [True] * ranks


def test_ranks_that_do_not_see_each_others_gpus_are_not_asked() -> None:
    def chosen(context: ParallelContext, share: Any) -> bool:
        def make(group: Any, device: torch.device) -> Any:
            raise AssertionError("made")

        group: Any = None
        # Ray hides all others, so that each rank calls its own the first
        return symmetric_sums(group, context.tp.group, 2, CPU, 0, lambda call: 1.0, make) is context.tp.group

    assert ThreadRanks().call(chosen, 2, 1) == [True, True]


def test_one_shot_has_to_be_faster_for_all_smaller_sums_too() -> None:
    slow = [2.0] * len(SIZES)
    assert crossover([1.0] * len(SIZES), slow) == SIZES[-1]
    assert crossover([1.0, 1.0, 3.0, *[1.0] * (len(SIZES) - 3)], slow) == SIZES[1]
    assert crossover([2.0] * len(SIZES), slow) == 0


def test_all_else_is_the_librarys() -> None:
    def gathered(context: ParallelContext, share: Any) -> Any:
        others: Collectives = context.tp.group
        sums = SmallSums(Shot(share), KIB, others)
        mine = torch.tensor([context.rank])
        parts = torch.zeros(2, 1, dtype=torch.int64) if context.rank == 0 else None
        sums.gather(parts, mine)
        everybodys = sums.all_gather(torch.zeros(2, 1, dtype=torch.int64), mine)
        if context.rank == 0:
            sums.isend(torch.tensor([7]), 1).wait()
            got = None
        else:
            got = sums.recv(torch.tensor([0]), 0).item()
        sums.close()
        return everybodys.view(-1).tolist(), None if parts is None else parts.view(-1).tolist(), got

    assert ThreadRanks().call(gathered, 2, 1) == [([0, 1], [0, 1], None), ([0, 1], None, 7)]


def test_every_rank_makes_as_many_calls_behind_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_timer, "AHEAD", 64)  # CPUs without products of bf16 take minutes for a device's
    calls: list[int] = []
    seconds = queued_seconds(HostAccelerator(), CPU, lambda: calls.append(1))
    assert 0 <= seconds < 1 and len(calls) == CALLS * (2 + REPEATS)
