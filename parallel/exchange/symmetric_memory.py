"""Sums in one shot between GPUs of one node, through torch's symmetric memory: buffers that all of them have mapped.

Ranks need to see each other's GPUs: where Ray hides from each rank all but its own (its default), there is none, and
sums stay NCCL's. RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 in the environment of Ray's nodes has it hide none.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist

from tandem.parallel.exchange.collectives import Collectives
from tandem.parallel.exchange.small_sums import SIZES, OneShot, Seconds, all_have, with_small_sums

log = logging.getLogger("tandem.parallel")
RANKS: Final = (2, 4, 8)
"""Sizes of stages for which torch's kernel adds in rank order, so that all ranks have the same bits."""
DTYPES: Final = (torch.bfloat16, torch.float32)


class Shared(OneShot, Protocol):
    """Sums through memory that is there, and that the ranks have not mapped yet."""

    def join(self) -> None:
        """Maps that of all ranks, which call it at the same time."""
        ...


class SymmetricSums:
    """Through one buffer of the largest size, which is free again when the kernel has ended on all ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._group = group.group_name
        self._buffer = _symmetric_memory.empty(SIZES[-1] // 4, dtype=torch.float32, device=device)
        self._rendezvous = _symmetric_memory.rendezvous
        self._sum = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def join(self) -> None:
        self._rendezvous(self._buffer, self._group)

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in DTYPES and tensor.nbytes <= SIZES[-1] and tensor.nbytes % 16 == 0

    def sum(self, tensor: torch.Tensor) -> None:
        shared = self._buffer.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        self._sum(shared, tensor, "sum", self._group, tensor)


def symmetric_sums(
    group: dist.ProcessGroup,
    others: Collectives,
    size: int,
    device: torch.device,
    place: int,
    seconds_of: Seconds,
    make: Callable[[dist.ProcessGroup, torch.device], Shared] = SymmetricSums,
) -> Collectives:
    """Returns a stage's collectives with sums in one shot where its ranks can make them and where they are faster, else
    `others`. place: of the rank's GPU among those that it sees. Every rank of the stage calls it."""
    if not _see_each_other(others, size, device, place):
        return others
    one_shot = _tried(lambda: make(group, device))
    if not all_have(one_shot is not None, others, size, device):
        return others
    assert one_shot is not None
    return with_small_sums(_tried(partial(_joined, one_shot)), others, size, device, seconds_of)


def _joined(one_shot: Shared) -> Shared:
    one_shot.join()
    return one_shot


def _tried(make: Callable[[], Shared | None]) -> Shared | None:
    """Returns what it makes; None where torch, the driver or the container refuses."""
    try:
        return make()
    except Exception as error:
        log.info("sums are the library's: GPUs share no memory here: %s", error)
        return None


def _see_each_other(others: Collectives, size: int, device: torch.device, place: int) -> bool:
    """Tells whether all ranks are on one machine, each with a GPU of its own among those that all of them see: the same
    on each."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = (socket.gethostname(), boot.read_text() if boot.exists() else "", os.environ.get("CUDA_VISIBLE_DEVICES"))
    digest = hashlib.sha256(repr(words).encode()).digest()
    mine = torch.tensor([*digest, place], dtype=torch.int32, device=device)
    told = others.all_gather(mine.new_empty(size, len(mine)), mine).tolist()
    has_places = len({one[-1] for one in told}) == size
    return size in RANKS and has_places and all(one[:-1] == told[0][:-1] for one in told)
