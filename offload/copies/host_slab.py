"""The host tier's memory on one rank: a slab of slots, reserved before serving and pinned where the device copies.

Made by workers/rank/transfers/kv_lanes.py. The memory is the rank's own (an anonymous memfd) or belongs to the node's
host-tier process (offload/host/host_process.py), which outlives the rank. The coordinator decides what each slot holds.
"""

import mmap
import os
import weakref

import torch

from tandem.offload.copies.accelerator import Accelerator


class HostSlab:
    """A slab of num_slots slots of slot_bytes bytes each. `bytes_SB`: uint8 [slots, slot_bytes], a view of the
    memory."""

    def __init__(
        self,
        memory: mmap.mmap,
        num_slots: int,
        slot_bytes: int,
        accelerator: Accelerator,
        *,
        owner: object | None = None,
    ) -> None:
        """Wraps `memory` and pins exactly the bytes of its slots.

        owner: an object to keep alive as long as the memory is used. OSError when the memory cannot be pinned.
        """
        assert len(memory) >= num_slots * slot_bytes, "the slab is smaller than its slots"
        self.slot_bytes = slot_bytes
        self._memory: mmap.mmap | None = memory
        self._owner = owner
        self.bytes_SB = torch.frombuffer(memory, dtype=torch.uint8, count=num_slots * slot_bytes).view(num_slots, -1)
        accelerator.pin(self.bytes_SB)
        # Also where nobody calls close(): a later slab may get the addresses, which could not be pinned again.
        self._unpin = weakref.finalize(self, accelerator.unpin, self.bytes_SB)
        self._unpin.atexit = False

    @classmethod
    def allocate(cls, num_slots: int, slot_bytes: int, accelerator: Accelerator) -> "HostSlab":
        """Allocates the slab in this process and reserves every page of it now. OSError when there is not enough
        memory."""
        size = num_slots * slot_bytes
        descriptor = os.memfd_create("tandem-kv")
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return cls(memory, num_slots, slot_bytes, accelerator)

    def slot(self, number: int) -> memoryview:
        """Returns the bytes of one slot as a writable view."""
        assert self._memory is not None, "closed"
        start = number * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Unpins the memory, which is freed with its last view. Idempotent."""
        self._unpin()
        self._memory = None
