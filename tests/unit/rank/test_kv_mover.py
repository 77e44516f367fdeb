"""A rank's movers: every byte arrives, scattered and of any type; whatever fails is an answer, never the end."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.disk_io import SUFFIX
from offload.pinned_pool import HostSlab
from offload.transfer import CpuCopier, bytes_per_slot
from workers.messages import Transfer, TransferDone
from workers.rank.kv_mover import DiskMover, MemoryMover, MoverThread
from workers.rank.load_gate import LoadGate

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


def slab_for(planes: list[torch.Tensor]) -> HostSlab:
    return HostSlab.allocate(NUM_SLOTS, bytes_per_slot(planes), pin=False)


class Answers:
    """An Inbox that gives out what it was made with and keeps the answers."""

    def __init__(self, *transfers: Transfer) -> None:
        self.transfers, self.done = list(transfers), list[TransferDone]()

    def receive(self) -> Transfer | None:
        return self.transfers.pop(0) if self.transfers else None

    def send(self, done: TransferDone) -> None:
        self.done.append(done)

    def close(self) -> None: ...


def carried_out(mover: Any, *transfers: Transfer) -> list[TransferDone]:
    """The answers to these, without the mover's first word."""
    inbox = Answers(*transfers)
    thread = MoverThread(3, mover, inbox)
    thread.start()
    thread.join(60)
    assert inbox.done[0] == TransferDone(rank=3, ticket=0) and all(done.rank == 3 for done in inbox.done)
    return inbox.done[1:]


def store(ticket: int, blocks: list[int], slots: list[int]) -> Transfer:
    return Transfer(ticket=ticket, kind="store", block_ids=blocks, slots=slots)


def load(ticket: int, slots: list[int], blocks: list[int]) -> Transfer:
    return Transfer(ticket=ticket, kind="load", block_ids=blocks, slots=slots)


def spill(ticket: int, keys: list[bytes], slots: list[int], dropped: list[bytes] | None = None) -> Transfer:
    return Transfer(ticket=ticket, kind="spill", keys=keys, slots=slots, dropped=dropped or [])


def fetch(ticket: int, keys: list[bytes], slots: list[int]) -> Transfer:
    return Transfer(ticket=ticket, kind="fetch", keys=keys, slots=slots)


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
    copier = CpuCopier(planes, len(planes) // 2, slab.bytes_SB)
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


def test_a_copy_that_fails_is_an_answer_and_the_next_one_works(monkeypatch):
    planes = planes_of(torch.float32, torch.float32)
    slab, gate = slab_for(planes), LoadGate(torch.device("cpu"))
    copier = CpuCopier(planes, 1, slab.bytes_SB)
    whole, calls = copier.load, []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a hook says so")
        whole(*args)

    monkeypatch.setattr(copier, "load", broken)
    mover = MemoryMover(copier, slab, gate)
    first, second, third = carried_out(mover, store(1, [1, 2], [0, 3]), load(2, [0, 3], [4, 5]), load(3, [3], [6]))
    assert first.failed == [] and first.error is None and first.copy_s > 0
    assert second.failed == [0, 1] and second.error == "RuntimeError: a hook says so" and not second.disk_error
    assert third.failed == [] and torch.equal(planes[0][6], planes[0][2])
    gate.wait(2, 0)  # a step that counted on the failed load is not held up


def test_a_step_without_a_spare_core_waits_for_the_whole_load():
    gate, passed = LoadGate(torch.device("cpu"), by_layer=False), threading.Event()
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
    slab, gate = slab_for(planes), LoadGate(torch.device("cpu"))
    copier = CpuCopier(planes, 3, slab.bytes_SB)
    whole, go_on, seen = copier.load, threading.Event(), []

    def halting(slots: Any, block_ids: Any, on_layer: Any) -> None:
        def told(layer: int) -> None:
            on_layer(layer)
            if layer == 1:
                assert go_on.wait(60)

        whole(slots, block_ids, told)

    monkeypatch.setattr(copier, "load", halting)
    inbox = Answers(load(1, [0], [1]))
    thread = MoverThread(0, MemoryMover(copier, slab, gate), inbox)
    thread.start()
    turn = gate.in_turn(["a", "b", "c"], [1])
    seen = [next(turn), next(turn)]
    assert seen == ["a", "b"] and len(inbox.done) == 1, "the load is still under way"
    go_on.set()
    assert next(turn) == "c"
    thread.join(60)
    assert inbox.done[1].failed == []


# ---- files ----


@pytest.fixture
def disk(tmp_path: Path) -> tuple[DiskMover, HostSlab, Path]:
    slab = HostSlab.allocate(NUM_SLOTS, 64, pin=False)
    for slot in range(NUM_SLOTS):
        slab.slot(slot)[:] = bytes([slot + 1]) * 64
    return DiskMover(tmp_path, LAYOUT, slab), slab, tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_slots_go_to_files_and_come_back(disk):
    mover, slab, folder = disk
    (done,) = carried_out(mover, spill(1, [key(7), key(8)], [1, 2]))
    assert done.failed == [] and len(files(folder)) == 2
    (done,) = carried_out(mover, fetch(2, [key(8), key(7)], [0, 4]))
    assert done.failed == []
    assert bytes(slab.slot(0)) == bytes([3]) * 64 and bytes(slab.slot(4)) == bytes([2]) * 64


def test_dropped_files_are_gone_before_new_ones_come(disk):
    mover, _, folder = disk
    carried_out(mover, spill(1, [key(1), key(2)], [0, 1]))
    carried_out(mover, spill(2, [key(3)], [2], dropped=[key(1), key(9)]))
    assert files(folder) == [key(2).hex() + SUFFIX, key(3).hex() + SUFFIX]


def test_missing_and_corrupt_files_fail_alone_and_are_no_fault_of_the_disk(disk):
    mover, slab, folder = disk
    carried_out(mover, spill(1, [key(1), key(2), key(3)], [0, 1, 2]))
    (place,) = folder.rglob(key(2).hex() + SUFFIX)
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(bytes(data))
    (done,) = carried_out(mover, fetch(2, [key(1), key(2), key(9), key(3)], [4, 3, 0, 1]))
    assert done.failed == [1, 2] and not done.disk_error and done.error is not None
    assert bytes(slab.slot(4)) == bytes([1]) * 64 and bytes(slab.slot(1)) == bytes([3]) * 64
    assert not place.exists(), "a corrupt file is not read twice"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_said_to_and_leaves_no_remains(disk, monkeypatch, number):
    mover, _, folder = disk
    whole, calls = os.pwritev, []

    def failing(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return whole(*args)

    monkeypatch.setattr(os, "pwritev", failing)
    (done,) = carried_out(mover, spill(1, [key(1), key(2), key(3)], [0, 1, 2]))
    assert done.failed == [1, 2] and done.disk_error and os.strerror(number) in (done.error or "")
    assert len(calls) == 2, "what comes after the failure is not tried"
    assert files(folder) == [key(1).hex() + SUFFIX]


def test_a_file_of_another_layout_is_not_taken(disk):
    mover, slab, folder = disk
    carried_out(mover, spill(1, [key(1)], [0]))
    (done,) = carried_out(DiskMover(folder, b"another digest 1", slab), fetch(2, [key(1)], [3]))
    assert done.failed == [0] and not done.disk_error
