"""A rank's lanes: every byte arrives, scattered and of any type; whatever fails is an answer, never the end."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.copies.kv_copies import CpuCopier, bytes_per_slot
from tandem.offload.kv.disk_io import SUFFIX
from tandem.workers.kernels.kv_store import NOT_KNOWN
from tandem.workers.messages.transfer import CopyKV, Failure, TransferResult, lane_of
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.transfers.kv_lanes import DiskLane, MemoryLane
from tandem.workers.rank.transfers.lanes import Lanes
from tandem.workers.rank.transfers.load_gate import LoadGate

LAYOUT = b"layout digest 16"
NUM_BLOCKS, NUM_SLOTS = 7, 5


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def planes_of(*dtypes: torch.dtype) -> list[torch.Tensor]:
    """Two planes a layer, of different sizes, cut from one slab as the cache is: their blocks lie far apart."""
    planes = []
    for number, dtype in enumerate(dtypes):
        shape = (NUM_BLOCKS, 2 + number, 3)
        planes.append(torch.randint(-100, 100, (2, *shape)).to(dtype)[number % 2])
    return planes


def by_layer(planes: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """`count` planes a layer."""
    return [planes[first : first + count] for first in range(0, len(planes), count)]


def slab_for(planes: list[torch.Tensor]) -> HostSlab:
    return HostSlab.allocate(NUM_SLOTS, bytes_per_slot(planes), HostAccelerator())


def drafted() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What a draft has read of blocks, nothing, and of slots, which nobody knows."""
    return np.zeros(NUM_BLOCKS, np.int32), np.full(NUM_SLOTS, NOT_KNOWN, np.int32)


def carried_out(lane: Any, *ops: CopyKV) -> list[TransferResult]:
    """The answers to these, in order."""
    done: list[TransferResult] = []
    lanes = Lanes(3, done.append)
    lanes.open(lane_of(ops[0]), HostAccelerator(), lane)
    for op in ops:
        lanes.put(op)
    lanes.close()
    assert all(result.rank == 3 for result in done)
    return done


def store(ticket: int, blocks: list[int], slots: list[int]) -> CopyKV:
    return CopyKV(ticket=ticket, kind="store", block_ids=blocks, slots=slots)


def load(ticket: int, slots: list[int], blocks: list[int]) -> CopyKV:
    return CopyKV(ticket=ticket, kind="load", block_ids=blocks, slots=slots)


def spill(ticket: int, keys: list[bytes], slots: list[int], dropped: list[bytes] | None = None) -> CopyKV:
    return CopyKV(ticket=ticket, kind="spill", keys=keys, slots=slots, dropped=dropped or [])


def fetch(ticket: int, keys: list[bytes], slots: list[int]) -> CopyKV:
    return CopyKV(ticket=ticket, kind="fetch", keys=keys, slots=slots)


# ---- memory ----


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.int8, torch.float32, torch.int8, torch.float16),
        (torch.float8_e4m3fn, torch.float32),
    ],
    ids=["fp32", "bf16", "int8 with scales", "fp8 with scales"],
)
def test_scattered_blocks_come_back_bit_for_bit_and_no_other_is_touched(dtypes):
    planes = planes_of(*dtypes)
    before = [plane.clone() for plane in planes]
    slab = slab_for(planes)
    copier = CpuCopier(by_layer(planes, 2), slab.bytes_SB)
    copier.store([6, 0, 3], [4, 1, 2])
    for plane in planes:
        plane.view(torch.uint8).fill_(0)
    layers: list[int] = []
    copier.load([1, 4], [5, 2], layers.append)
    assert layers == list(range(len(planes) // 2)), "each layer is said to be there once, in order"
    for plane, was in zip(planes, before, strict=True):
        now, was = plane.view(torch.uint8), was.view(torch.uint8)
        assert torch.equal(now[5], was[0]) and torch.equal(now[2], was[6])
        assert not now[[0, 1, 3, 4, 6]].any()


def test_what_a_draft_has_read_of_blocks_travels_with_them(tmp_path: Path) -> None:
    """But for blocks of files, of which nobody knows it."""
    planes = planes_of(torch.float32)
    slab, gate, (of_blocks, of_slots) = slab_for(planes), LoadGate(HostAccelerator()), drafted()
    of_blocks[:4] = [0, 3, 4, 2]
    lane = MemoryLane(CpuCopier([planes], slab.bytes_SB), slab, gate, of_blocks, of_slots)
    disk = DiskLane(tmp_path, LAYOUT, slab, of_slots)
    carried_out(lane, store(1, [1, 2, 3], [0, 1, 2]), load(2, [2, 0], [4, 5]))
    assert of_blocks[4:6].tolist() == [2, 3]
    carried_out(disk, spill(3, [key(1)], [1]), fetch(4, [key(1)], [0]))
    carried_out(lane, load(5, [0, 1, 3], [4, 5, 6]))
    assert of_blocks[4:7].tolist() == [NOT_KNOWN, 4, NOT_KNOWN]


def test_a_copy_that_fails_is_an_answer_and_the_next_one_works(monkeypatch):
    planes = planes_of(torch.float32, torch.float32)
    slab, gate = slab_for(planes), LoadGate(HostAccelerator())
    copier = CpuCopier([planes], slab.bytes_SB)
    whole, calls = copier.load, []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a hook says so")
        whole(*args)

    monkeypatch.setattr(copier, "load", broken)
    lane = MemoryLane(copier, slab, gate, *drafted())
    first, second, third = carried_out(lane, store(1, [1, 2], [0, 3]), load(2, [0, 3], [4, 5]), load(3, [3], [6]))
    assert first.failed == [] and first.failure is None and first.copy_s > 0
    assert second.failed == [0, 1] and second.failure == Failure("internal", "RuntimeError: a hook says so")
    assert third.failed == [] and torch.equal(planes[0][6], planes[0][2])
    gate.wait(2, 0)  # a step that counted on the failed load is not held up


def test_a_step_without_a_spare_core_waits_for_the_whole_load():
    gate, passed = LoadGate(HostAccelerator(), by_layer=False), threading.Event()
    gate.begin(1)
    gate.arrived(0)
    step = threading.Thread(target=lambda: (gate.wait(1, 0), passed.set()))
    step.start()
    gate.arrived(1)
    step.join(0.1)
    assert not passed.is_set()
    gate.end(1)
    step.join(60)
    assert passed.is_set()


def test_a_step_waits_for_its_layer_and_not_for_the_rest(monkeypatch):
    planes = planes_of(*[torch.float32] * 6)
    slab, gate = slab_for(planes), LoadGate(HostAccelerator())
    copier = CpuCopier(by_layer(planes, 2), slab.bytes_SB)
    whole, go_on, seen = copier.load, threading.Event(), []

    def halting(slots: Any, block_ids: Any, on_layer: Any) -> None:
        def told(layer: int) -> None:
            on_layer(layer)
            if layer == 1:
                assert go_on.wait(60)

        whole(slots, block_ids, told)

    monkeypatch.setattr(copier, "load", halting)
    done: list[TransferResult] = []
    lanes = Lanes(0, done.append)
    lanes.open("memory", HostAccelerator(), MemoryLane(copier, slab, gate, *drafted()))
    lanes.put(load(1, [0], [1]))
    turn = gate.in_turn(["a", "b", "c"], [1], range(3))
    seen = [next(turn), next(turn)]
    assert seen == ["a", "b"] and not done, "the load is still under way"
    go_on.set()
    assert next(turn) == "c"
    lanes.close()
    assert done[0].failed == []


# ---- files ----


@pytest.fixture
def disk(tmp_path: Path) -> tuple[DiskLane, HostSlab, Path]:
    slab = HostSlab.allocate(NUM_SLOTS, 64, HostAccelerator())
    for slot in range(NUM_SLOTS):
        slab.slot(slot)[:] = bytes([slot + 1]) * 64
    return DiskLane(tmp_path, LAYOUT, slab, drafted()[1]), slab, tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_slots_go_to_files_and_come_back(disk):
    lane, slab, folder = disk
    (done,) = carried_out(lane, spill(1, [key(7), key(8)], [1, 2]))
    assert done.failed == [] and len(files(folder)) == 2
    (done,) = carried_out(lane, fetch(2, [key(8), key(7)], [0, 4]))
    assert done.failed == []
    assert bytes(slab.slot(0)) == bytes([3]) * 64 and bytes(slab.slot(4)) == bytes([2]) * 64


def test_dropped_files_are_gone_before_new_ones_come(disk):
    lane, _, folder = disk
    carried_out(lane, spill(1, [key(1), key(2)], [0, 1]))
    carried_out(lane, spill(2, [key(3)], [2], dropped=[key(1), key(9)]))
    assert files(folder) == [key(2).hex() + SUFFIX, key(3).hex() + SUFFIX]


def test_missing_and_corrupt_files_fail_alone_and_are_no_fault_of_the_disk(disk):
    lane, slab, folder = disk
    carried_out(lane, spill(1, [key(1), key(2), key(3)], [0, 1, 2]))
    (place,) = folder.rglob(key(2).hex() + SUFFIX)
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(bytes(data))
    (done,) = carried_out(lane, fetch(2, [key(1), key(2), key(9), key(3)], [4, 3, 0, 1]))
    assert done.failed == [1, 2] and done.failure is not None and done.failure.kind == "source"
    assert bytes(slab.slot(4)) == bytes([1]) * 64 and bytes(slab.slot(1)) == bytes([3]) * 64
    assert not place.exists(), "a corrupt file is not read twice"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_is_reported_and_leaves_no_files(disk, monkeypatch, number):
    lane, _, folder = disk
    whole, calls = os.pwritev, []

    def failing(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return whole(*args)

    monkeypatch.setattr(os, "pwritev", failing)
    (done,) = carried_out(lane, spill(1, [key(1), key(2), key(3)], [0, 1, 2]))
    assert done.failed == [1, 2] and done.failure is not None and done.failure.kind == "disk"
    assert os.strerror(number) in done.failure.message
    assert len(calls) == 2, "what comes after the failure is not tried"
    assert files(folder) == [key(1).hex() + SUFFIX]


def test_a_file_of_another_layout_is_not_taken(disk):
    lane, slab, folder = disk
    carried_out(lane, spill(1, [key(1)], [0]))
    (done,) = carried_out(DiskLane(folder, b"another digest 1", slab, drafted()[1]), fetch(2, [key(1)], [3]))
    assert done.failed == [0] and done.failure is not None and done.failure.kind == "source"
