"""Lanes that copy KV between a rank's tiers: device and host slab (MemoryLane), host slab and files (DiskLane).

Opened by loading.py once the KV is allocated.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.copies.kv_copies import BlockCopier, bytes_per_slot
from tandem.offload.host.host_process import attach, lease_soon
from tandem.offload.kv.disk_io import DiskBlockError, read_block, remove_block, write_block
from tandem.offload.kv.disk_tier import LOCK_NAME
from tandem.workers.kernels.kv_store import NOT_KNOWN
from tandem.workers.messages.handshake import RankTiers
from tandem.workers.messages.transfer import CopyKV, Failure
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.transfers.lanes import ALL_MOVED, Lanes, Moved
from tandem.workers.rank.transfers.load_gate import LoadGate

Counts = npt.NDArray[np.int32]
ATTACH_S = 10.0


class MemoryLane:
    """store and load: between the device and the host slab, with notice of each layer to the gate. drafted: of the
    device's KVCache; drafted_S: the same of the slots."""

    def __init__(self, copier: BlockCopier, slab: HostSlab, gate: LoadGate, drafted: Counts, drafted_S: Counts) -> None:
        self._copier = copier
        self._slab = slab
        self._gate = gate
        self._drafted, self._drafted_S = drafted, drafted_S

    def move(self, op: CopyKV) -> Moved:
        self._gate.begin(op.ticket)
        try:
            if op.kind == "store":
                self._drafted_S[op.slots] = self._drafted[op.block_ids]
                self._copier.store(op.block_ids, op.slots)
            else:
                assert op.kind == "load", op.kind
                self._drafted[op.block_ids] = self._drafted_S[op.slots]
                self._copier.load(op.slots, op.block_ids, self._gate.arrived)
        finally:
            self._gate.end(op.ticket)
        return ALL_MOVED

    def close(self) -> None:
        self._gate.close()
        self._slab.close()


class DiskLane:
    """spill and fetch: between the host slab and this rank's folder. drafted_S: as of MemoryLane."""

    def __init__(self, folder: Path, layout: bytes, slab: HostSlab, drafted_S: Counts) -> None:
        self._disk = folder
        self._layout = layout
        self._slab = slab
        self._drafted_S = drafted_S

    def move(self, op: CopyKV) -> Moved:
        failed: list[int] = []
        failure: Failure | None = None
        for place, (key, slot) in enumerate(zip(op.keys, op.slots, strict=True)):
            if failure is not None and failure.kind == "disk":
                failed.append(place)
                continue
            try:
                self._move_file(op, key, slot)
            except DiskBlockError as problem:
                failed.append(place)
                failure = Failure("source", str(problem))
            except OSError as problem:
                failed.append(place)
                failure = Failure("disk", str(problem))
        return Moved(failed, failure)

    def close(self) -> None:
        """The memory lane owns the slab."""

    def _move_file(self, op: CopyKV, key: bytes, slot: int) -> None:
        if op.kind == "fetch":
            self._drafted_S[slot] = NOT_KNOWN
            read_block(self._disk, key, self._layout, self._slab.slot(slot))
            return
        if key == op.keys[0]:
            for dropped in op.dropped:
                remove_block(self._disk, dropped)
        write_block(self._disk, key, self._layout, self._slab.slot(slot))


def open_kv_lanes(
    lanes: Lanes,
    rank: int,
    layers: Sequence[Sequence[torch.Tensor]],
    drafted: Counts,
    tiers: RankTiers,
    platform: Platform,
) -> tuple[LoadGate, bool]:
    """Opens the rank's lanes of KV; returns the gate of their loads, and RankReady.has_earlier. OSError or
    HostTierError without the memory. layers, drafted: of its KVCache."""
    if tiers.disk_folder is not None and not _is_the_coordinators(Path(tiers.disk_folder), tiers.disk_word):
        raise FileNotFoundError(
            f"--kv-disk-path: {tiers.disk_folder} of the coordinator is not on the node of this rank"
        )
    accelerator = platform.accelerator
    slot_bytes = bytes_per_slot([plane for layer in layers for plane in layer])
    slab, has_earlier = open_slab(rank, tiers, slot_bytes, accelerator)
    gate = LoadGate(accelerator, by_layer=platform.copies_beside)
    drafted_S = np.full(tiers.num_slots, NOT_KNOWN, np.int32)
    memory = MemoryLane(platform.kv_copier(layers, slab.bytes_SB), slab, gate, drafted, drafted_S)
    if tiers.disk_folder is not None:
        lanes.open("disk", accelerator, DiskLane(Path(tiers.disk_folder), tiers.layout, slab, drafted_S))
    lanes.open("memory", accelerator, memory)
    return gate, has_earlier


def _is_the_coordinators(folder: Path, word: bytes) -> bool:
    """A node's own disk may have a folder of that name, of a coordinator that was there."""
    try:
        return folder.is_dir() and (folder.parent / LOCK_NAME).read_bytes() == word
    except OSError:
        return False


def open_slab(rank: int, tiers: RankTiers, slot_bytes: int, accelerator: Accelerator) -> tuple[HostSlab, bool]:
    """Returns the rank's slab of host memory, and RankReady.has_earlier. OSError or HostTierError without it.

    On another node than the coordinator's the rank leases the slab, whose stamp tells whether the coordinator's index
    is about it; it has the new stamp before the index has, so that a kill in between leaves two that differ."""
    if tiers.host_socket is None:
        return HostSlab.allocate(tiers.num_slots, slot_bytes, accelerator), True
    socket, token, number, leased, has_earlier = Path(tiers.host_socket), tiers.host_token, tiers.host_slab, None, True
    if token is None:
        assert tiers.stamps is not None, "a slab of its own has a stamp"
        earlier, new = tiers.stamps
        layout = f"{tiers.layout.hex()}-{rank}"
        leased = lease_soon(socket, layout, len(new), [tiers.num_slots * slot_bytes])
        has_earlier = leased.index[:] == earlier
        leased.index[:] = new
        token, number = leased.token, 0
    held = attach(socket, token, number, ATTACH_S)
    return HostSlab(held.slab, tiers.num_slots, slot_bytes, accelerator, owner=(held, leased)), has_earlier
