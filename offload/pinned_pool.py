"""The host tier's bytes on one rank: a slab of slots, reserved before serving, pinned where there is a GPU.

Made by workers/rank/kv_mover.py. The memory is the rank's own (an anonymous memfd) or the node's host-tier process's
(offload/host_process.py), which outlives the rank. Which slot holds what is the coordinator's business.
"""

import mmap
import os

import torch


class HostSlab:
    """num_slots x slot_bytes. `bytes_SB`: uint8 [slots, bytes of a slot], a view of the memory."""

    def __init__(
        self, memory: mmap.mmap, num_slots: int, slot_bytes: int, *, pin: bool, holder: object | None = None
    ) -> None:
        """holder: what must live as long as the memory is used."""
        assert len(memory) >= num_slots * slot_bytes, "the slab is smaller than its slots"
        self.slot_bytes = slot_bytes
        self._memory: mmap.mmap | None = memory
        self._holder = holder
        self.bytes_SB = torch.frombuffer(memory, dtype=torch.uint8, count=num_slots * slot_bytes).view(num_slots, -1)
        self._pinned = pin
        if pin:
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self.bytes_SB.data_ptr(), self.bytes_SB.numel(), 0))

    @classmethod
    def allocate(cls, num_slots: int, slot_bytes: int, *, pin: bool) -> "HostSlab":
        """Memory of this process, every page of it taken now. OSError when there is not enough."""
        size = num_slots * slot_bytes
        descriptor = os.memfd_create("tandem-kv")
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return cls(memory, num_slots, slot_bytes, pin=pin)

    def slot(self, number: int) -> memoryview:
        """One slot's bytes, writable."""
        assert self._memory is not None, "closed"
        start = number * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Unpins; the memory goes with its last view. Idempotent."""
        if self._memory is not None and self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes_SB.data_ptr())
        self._memory = None


def _check_cuda(error: object) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise OSError(f"the host slab could not be pinned: CUDA error {error}")
