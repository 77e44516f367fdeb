"""Sums of small tensors in one kernel, beside a library's for larger ones. Which is faster is measured at the start.

An all-reduce of a decode step is a few hundred KiB at most, and NCCL's takes its latency rather than its bytes. In a
sum in one shot each rank reads what all others have written into memory that they share, and adds it up itself: one
wait, but ranks - 1 times the bytes. (The idea is that of vLLM's custom all-reduce and TensorRT-LLM's one-shot kernel.)
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from tandem.parallel.exchange.collectives import Collectives, Pending

log = logging.getLogger("tandem.parallel")
SIZES: Final = tuple(2**n for n in range(12, 21))
"""Bytes of the sums that are timed, 4 KiB to 1 MiB: 1 to 128 tokens of 4,096 numbers in bf16."""


class OneShot(Protocol):
    """Sums in one kernel over the ranks of a stage."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Returns whether it sums tensors of this dtype and these many bytes. The same on every rank."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """Overwrites a contiguous tensor with the sum of the ranks', bit-equal on each."""
        ...


Seconds = Callable[[Callable[[], object]], float]
"""Returns the seconds that a device needs for a call. It makes as many calls on every rank."""


class SmallSums:
    """Collectives of a stage: sums of at most `most_bytes` in one shot, all else by `others`."""

    def __init__(self, one_shot: OneShot, most_bytes: int, others: Collectives) -> None:
        self._one_shot = one_shot
        self._others = others
        self.most_bytes = most_bytes

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes > self.most_bytes or not tensor.is_contiguous() or not self._one_shot.takes(tensor):
            return self._others.all_reduce(tensor)
        self._one_shot.sum(tensor)
        return tensor

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return self._others.all_gather(parts_R, tensor)

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        self._others.gather(parts_R, tensor)

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._others.isend(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        return self._others.recv(tensor, peer)

    def close(self) -> None:
        self._others.close()


def with_small_sums(
    one_shot: OneShot | None, others: Collectives, size: int, device: torch.device, seconds_of: Seconds
) -> Collectives:
    """Returns the collectives that a stage's `size` ranks sum with, the same on each: `others` where one of them has no
    one_shot, where its sums are wrong, or where it is slower for the smallest. Every rank calls it."""
    if not all_have(one_shot is not None, others, size, device):
        return others
    assert one_shot is not None
    if not all_have(_is_right(one_shot, others, device), others, size, device):
        log.warning("sums in one shot differ from those of the library, and are not used")
        return others
    most_bytes = crossover(*_slowest(one_shot, others, size, device, seconds_of))
    if not most_bytes:
        return others
    log.info("sums of up to %d KiB are made in one shot", most_bytes // 1024)
    return SmallSums(one_shot, most_bytes, others)


def crossover(ours_s: Sequence[float], theirs_s: Sequence[float]) -> int:
    """Returns the greatest of SIZES up to which one shot is faster for each of them; 0 for none."""
    most_bytes = 0
    for size_bytes, ours, theirs in zip(SIZES, ours_s, theirs_s, strict=True):
        if ours >= theirs:
            break
        most_bytes = size_bytes
    return most_bytes


def all_have(mine: bool, others: Collectives, size: int, device: torch.device) -> bool:
    """Returns whether each of the `size` ranks says so. Every rank calls it."""
    return int(others.all_reduce(torch.tensor([mine], dtype=torch.int32, device=device))) == size


def _is_right(one_shot: OneShot, others: Collectives, device: torch.device) -> bool:
    """Tells whether sums of small whole numbers, which no order rounds, are the library's: of the least and the
    largest."""
    right = True
    for size_bytes in (SIZES[0], SIZES[-1]):
        for _ in range(2):
            mine = torch.randint(-8, 9, (size_bytes // 2,), device=device).to(torch.bfloat16)
            expected = others.all_reduce(mine.clone())
            one_shot.sum(mine)
            right &= torch.equal(mine, expected)
    return right


def _slowest(
    one_shot: OneShot, others: Collectives, size: int, device: torch.device, seconds_of: Seconds
) -> tuple[list[float], list[float]]:
    """The seconds of one_shot and of the others for each of SIZES, those of the rank that took longest."""
    mine = []
    for sum_of in (one_shot.sum, others.all_reduce):
        for size_bytes in SIZES:
            tensor = torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device=device)
            mine.append(seconds_of(lambda tensor=tensor, sum_of=sum_of: sum_of(tensor)))  # type: ignore[misc]
    times = torch.tensor(mine, dtype=torch.float32, device=device)
    slowest = others.all_gather(times.new_empty(size, len(mine)), times).amax(0).tolist()
    return slowest[: len(SIZES)], slowest[len(SIZES) :]
