"""Reads the slices of coming parameters on threads, while the ones before them are converted and packed.

Called by load() (parallel/checkpoint.py). The threads do nothing but read bytes into memory that they are given: what
is computed stays on the rank's own thread. Memory is bounded, as Bounds says. Memory that nobody keeps is used again,
which saves the kernel from clearing new pages for each parameter; so few bytes ahead cost less than many.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.fresh_pages import provide_pages
from tandem.parallel.stored.slices import Slice, TensorBlock

PART_BYTES: Final = 16 * 2**20
"""Bytes that a thread reads at a time."""


def plain_memory(num_bytes: int) -> torch.Tensor:
    """Returns new memory of the host, uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class Bounds(NamedTuple):
    """Bytes of the groups that are held at once: the one that the caller has, and those read ahead of it. many: of any
    number of them. pair: of the caller's and the next one. A group that is larger is read alone. threads: that read.
    memory: makes what they read into."""

    many: int = 64 * 2**20
    pair: int = 2**30
    threads: int = 4
    memory: Callable[[int], torch.Tensor] = plain_memory


BESIDE_COPIES: Final = Bounds(many=512 * 2**20, threads=8)
"""Bounds where a device copies what was read: its link takes 30 to 60 GB/s, a thread reads 5 to 10 of cached files."""


@dataclass(slots=True)
class ReadSlices:
    """Slices and their bytes, uint8, one behind another. keep(): the memory belongs to the caller from now on."""

    slices: tuple[Slice, ...]
    data: torch.Tensor
    is_kept: bool = field(default=False)

    def keep(self) -> torch.Tensor:
        self.is_kept = True
        return self.data

    def bytes_of(self, place: int) -> torch.Tensor:
        """Returns the bytes of the slice at that place of `slices`."""
        first = sum(one.nbytes for one in self.slices[:place])
        return self.data[first : first + self.slices[place].nbytes]


class ReadAhead:
    """Reads groups of slices, those of one tensor each. most_bytes: the most that were held at once, those kept for
    reuse among them. SettingsError, with file and tensor, where bytes cannot be read."""

    def __init__(self, groups: Sequence[tuple[Slice, ...]], bounds: Bounds = Bounds()) -> None:
        self._coming = deque(groups)
        self._bounds = bounds
        self._files: dict[Path, int] = {}
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._spare_bytes = 0
        self._ahead_bytes = 0
        self.most_bytes = 0

    def __iter__(self) -> Iterator[ReadSlices]:
        """Yields each group when it has been read; the caller is done with it when it asks for the next."""
        pool = ThreadPoolExecutor(self._bounds.threads, "read ahead")
        reading: deque[tuple[ReadSlices, list[Future[None]]]] = deque()
        try:
            while self._coming or reading:
                while self._coming and self._may_begin(reading):
                    reading.append(self._begin(self._coming.popleft(), pool))
                found, futures = reading[0]
                for future in futures:
                    future.result()
                yield found
                reading.popleft()
                self._release(found)
        finally:
            pool.shutdown(cancel_futures=True)
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _may_begin(self, reading: deque[tuple[ReadSlices, list[Future[None]]]]) -> bool:
        """True if the next group may be read beside those that are."""
        held = self._ahead_bytes + _nbytes(self._coming[0])
        return not reading or held <= (self._bounds.pair if len(reading) == 1 else self._bounds.many)

    def _begin(self, slices: tuple[Slice, ...], pool: ThreadPoolExecutor) -> tuple[ReadSlices, list[Future[None]]]:
        is_new = not self._spare[_nbytes(slices)]
        data = self._room(_nbytes(slices))
        view, address = memoryview(data.numpy()), data.data_ptr()
        futures, first = [], 0
        for part in (part for one in slices for block in one.blocks for part in block.parts(PART_BYTES)):
            target = view[first : first + part.nbytes]
            new_at = address + first if is_new else None
            futures.append(pool.submit(_read, part, self._descriptor(part), target, new_at))
            first += part.nbytes
        return ReadSlices(slices, data), futures

    def _room(self, size: int) -> torch.Tensor:
        """Returns memory for a group, that of one of the same size if there is any to spare."""
        self._ahead_bytes += size
        if self._spare[size]:
            self._spare_bytes -= size
            return self._spare[size].pop()
        if self._ahead_bytes + self._spare_bytes > max(self._bounds.many, self.most_bytes):
            self._spare.clear()
            self._spare_bytes = 0
        self.most_bytes = max(self.most_bytes, self._ahead_bytes + self._spare_bytes)
        return self._bounds.memory(size)

    def _release(self, found: ReadSlices) -> None:
        """Takes note that the caller is done with a group."""
        size = _nbytes(found.slices)
        self._ahead_bytes -= size
        if not found.is_kept and self._ahead_bytes + self._spare_bytes + size <= self.most_bytes:
            self._spare[size].append(found.data)
            self._spare_bytes += size

    def _descriptor(self, block: TensorBlock) -> int:
        file = block.tensor.file
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(block, error.strerror) from error
        return self._files[file]


def _nbytes(slices: tuple[Slice, ...]) -> int:
    return sum(one.nbytes for one in slices)


def _read(block: TensorBlock, descriptor: int, target: memoryview, new_at: int | None) -> None:
    """new_at: the target's address where it is new memory."""
    if new_at is not None:
        provide_pages(new_at, target.nbytes)
    try:
        block.read(descriptor, target)
    except OSError as error:
        raise _unreadable(block, error.strerror) from error
    except EOFError as error:
        raise _unreadable(block, "the file ends before it does") from error


def _unreadable(block: TensorBlock, reason: str | None) -> SettingsError:
    tensor = block.tensor
    return SettingsError(f"cannot read {tensor.file}: tensor {tensor.name}: {reason}", "MODEL")
