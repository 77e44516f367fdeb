"""Collectives between CPU ranks of one node through shared memory, for the small tensors of a decode step.

groups.py uses them in place of gloo. The memory is anonymous (memfd): it has no name and ends with its last user. Every
rank writes its part, raises its flag, waits for the others' flags and reads all parts in rank order, so all ranks get
the same bits. This relies on x86's store order (a flag is never visible before the data), so other CPUs keep gloo.
"""

import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator

import torch

from tandem.configs.environment import may_share_memory
from tandem.parallel.exchange.collectives import Collectives, Pending, TorchCollectives

SLOT_BYTES = 2**20
LINE_BYTES = 64  # one cache line per flag
TOKEN_BYTES = 8
SPINS = 1_000  # some 50 us: longer than ranks with a core each wait for each other in a decode step
YIELDS = 1_000  # half a millisecond where nobody else wants the core
NAP_S, LONGEST_NAP_S, NAPS_IN_A_WAIT = 50e-6, 5e-3, 64
"""Naps grow with the wait, and are late by a 64th of it: who waits long uses no core, and can be told from who
computes (workers/rank/rank_watch.py)."""
TIMEOUT_S = 120.0


def segment_bytes(size: int) -> int:
    """Returns the segment's size: the token's line, then one flag line per rank, then two slots per rank."""
    return LINE_BYTES * (1 + size) + 2 * size * SLOT_BYTES


def can_share_memory() -> bool:
    """Returns whether ranks exchange through shared memory where they run on this machine alone."""
    return may_share_memory() and sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def open_segment(group: TorchCollectives, rank: int, size: int) -> mmap.mmap | None:
    """Returns a segment mapped by every rank of `group`, or None on all when any rank cannot map it (other node, other
    CPU).

    Rank 0 makes it and broadcasts (pid, descriptor, random token); the others map it through /proc and compare the
    token.
    """
    able = can_share_memory()
    total = segment_bytes(size)
    announced = torch.zeros(3, dtype=torch.int64)
    mine: mmap.mmap | None = None
    descriptor = -1
    if rank == 0 and able:
        descriptor = os.memfd_create("tandem-collectives", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, total)
        mine = mmap.mmap(descriptor, total)
        token = secrets.randbits(62)
        mine[:TOKEN_BYTES] = token.to_bytes(TOKEN_BYTES, "little")
        announced = torch.tensor([os.getpid(), descriptor, token])
    announced = group.broadcast(announced)
    if rank > 0 and able:
        pid, peer_descriptor, peer_token = announced.tolist()
        mine = _map_peer(pid, peer_descriptor, peer_token, total)
    failures = group.all_reduce(torch.tensor([mine is None], dtype=torch.int64))
    if descriptor >= 0:
        os.close(descriptor)
    return mine if int(failures) == 0 else None


def _map_peer(pid: int, descriptor: int, token: int, total: int) -> mmap.mmap | None:
    """Returns rank 0's segment, or None when the descriptor is another's (rank 0 is on another node or in another
    container)."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(opened).st_size != total:
            return None
        mapped = mmap.mmap(opened, total)
    except OSError:
        return None
    finally:
        os.close(opened)
    return mapped if int.from_bytes(mapped[:TOKEN_BYTES], "little") == token else None


class SharedMemoryCollectives:
    """The TP group's collectives. A tensor passes in pieces of SLOT_BYTES; point-to-point calls go to `others`.

    Each rank has two slots that take turns: it writes piece n + 2 only after all flags have reached n + 1, and raises
    its flag to n + 1 only after it has read piece n of every rank. spins(): whether a wait begins without
    sleeping; only for ranks with a core each.
    """

    def __init__(
        self, segment: mmap.mmap, rank: int, size: int, others: Collectives, spins: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._size = size
        self._others = others
        self._spins = spins
        self._count = 0
        view = memoryview(segment)
        flags_end = LINE_BYTES * (1 + size)
        self._flags = view[LINE_BYTES:flags_end].cast("q")
        self._stride = LINE_BYTES // 8
        slots = torch.frombuffer(segment, dtype=torch.uint8, offset=flags_end)
        self._slots = [list(pair) for pair in slots.view(size, 2, SLOT_BYTES)]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in rank order; half-precision tensors of more than two ranks are summed in float32 and rounded once."""
        flat = tensor.view(-1)
        for piece in self._pieces(flat):
            parts = self._exchange(piece)
            if self._size == 2:
                torch.add(parts[0], parts[1], out=piece)
                continue
            wide = torch.float32 if piece.dtype in (torch.bfloat16, torch.float16) else piece.dtype
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:  # torch.sum takes a tensor's last elements in another order
                total += part
            piece.copy_(total)
        return tensor

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        gathered = parts_R.view(self._size, -1)
        start = 0
        for piece in self._pieces(tensor.view(-1)):
            stop = start + piece.shape[0]
            torch.stack(self._exchange(piece), out=gathered[:, start:stop])
            start = stop
        return parts_R

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        if parts_R is not None:
            self.all_gather(parts_R, tensor)
            return
        for piece in self._pieces(tensor.view(-1)):
            self._exchange(piece)

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._others.isend(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        return self._others.recv(tensor, peer)

    def close(self) -> None:
        """Releases the memory, which ends when every rank has released it."""
        self._flags.release()
        self._slots.clear()
        self._others.close()

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        length = SLOT_BYTES // flat.element_size()
        return iter(flat.split(length)) if flat.shape[0] > length else iter((flat,))

    def _exchange(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Publishes `piece` and returns all ranks' pieces, valid until the next exchange."""
        self._count += 1
        turn = self._count & 1
        parts = [slots[turn][: piece.nbytes].view(piece.dtype) for slots in self._slots]
        if piece.shape[0]:
            parts[self._rank].copy_(piece)
        self._flags[self._rank * self._stride] = self._count
        for rank in range(self._size):
            self._wait(rank * self._stride, self._count)
        return parts

    def _wait(self, index: int, count: int) -> None:
        """Waits until a rank's flag has reached `count`: spins, then lets others have the core, as the rank that is
        waited for may need this one, then sleeps. TimeoutError after TIMEOUT_S, when the rank is probably dead."""
        flags, began_s = self._flags, 0.0
        tries = 0
        while flags[index] < count:
            tries = tries or (0 if self._spins() else SPINS + YIELDS)
            tries += 1
            if tries <= SPINS:
                continue
            if tries <= SPINS + YIELDS:
                os.sched_yield()
                continue
            waited_s = time.monotonic() - began_s if began_s else 0.0
            time.sleep(min(LONGEST_NAP_S, max(NAP_S, waited_s / NAPS_IN_A_WAIT)) if began_s else 0)
            began_s = began_s or time.monotonic()
            if waited_s > TIMEOUT_S:
                raise TimeoutError(f"tp rank {index // self._stride} has not come to a collective in {TIMEOUT_S:.0f} s")
