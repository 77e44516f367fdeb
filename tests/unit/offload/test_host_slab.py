"""HostSlab: its memory is pinned once and unpinned once, by close() or with its last user."""

import gc

import pytest
import torch

from tandem.offload.copies.host_slab import HostSlab
from tandem.workers.platforms.cpu import HostAccelerator


class Pins(HostAccelerator):
    """Keeps the addresses that are pinned now, and refuses one that is, as CUDA does (error 712)."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()

    def pin(self, memory: torch.Tensor) -> None:
        if memory.data_ptr() in self.pinned:
            raise OSError("already pinned")
        self.pinned.add(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def test_close_unpins_once() -> None:
    pins = Pins()
    slab = HostSlab.allocate(3, 4096, pins)
    view = slab.bytes_SB
    assert pins.pinned == {view.data_ptr()}
    slab.close()
    slab.close()
    assert not pins.pinned
    view.fill_(7)  # its memory is there as long as somebody has it


def test_a_slab_that_nobody_closed_is_unpinned_before_its_addresses_are_used_again() -> None:
    """As in an engine that did not come to stand: its lanes were never made."""
    pins = Pins()
    for _ in range(20):
        slab = HostSlab.allocate(1, 2**20, pins)
        assert len(pins.pinned) == 1
        del slab
        gc.collect()
        assert not pins.pinned


def test_memory_that_cannot_be_pinned_is_an_error_and_nothing_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Pins()

    def refuse(memory: torch.Tensor) -> None:
        raise OSError("cannot be pinned")

    monkeypatch.setattr(pins, "pin", refuse)
    with pytest.raises(OSError, match="cannot be pinned"):
        HostSlab.allocate(1, 4096, pins)
    gc.collect()  # an unpin of what is not pinned would raise KeyError here
