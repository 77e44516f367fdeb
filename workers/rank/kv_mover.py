"""A rank's copies between tiers, on threads of their own, beside the steps.

Each takes messages in order from an Inbox and answers with TransferDone; a copy that fails is an answer too, never the
end of the rank. Those of KV are here, those of adapters in workers/lora/movers.py. Made by loading.py once the KV is
allocated; served ranks read channels of their own (ChannelInbox), the in-process executor queues. Decides nothing about
what moves.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import zmq

from offload.disk_io import DiskBlockError, read_block, remove_block, write_block
from offload.host_process import attach
from offload.pinned_pool import HostSlab
from offload.transfer import BlockCopier, bytes_per_slot, make_copier
from workers.channel import MoverKind
from workers.messages import AdapterMove, RankTiers, Transfer, TransferDone
from workers.rank.load_gate import LoadGate
from workers.rank.mover_inbox import Inbox

log = logging.getLogger(__name__)
ATTACH_S = 10.0


class Outcome(NamedTuple):
    """Places of a ticket whose bytes did not arrive, why the last one did not, whether the disk as a whole failed (of
    an adapter: whether it was not its content, so that the words are not for clients); the device pages that a fetched
    adapter takes."""

    places: list[int]
    error: str | None = None
    disk_error: bool = False
    pages: int = 0


ALL_MOVED = Outcome([])
M_contra = TypeVar("M_contra", contravariant=True)


class Mover(Protocol[M_contra]):
    """Moves the bytes of some kinds of tickets."""

    def move(self, transfer: M_contra) -> Outcome:
        """May raise: then all of it has failed."""
        ...

    def close(self) -> None: ...


class MoverThread(threading.Thread):
    """Carries out one inbox's transfers in order until it ends. A rank has one for memory and one for its disk, so that
    a load never waits for a file; and more for adapters (workers/channel.py)."""

    def __init__(self, rank: int, mover: Mover[Any], inbox: Inbox) -> None:
        super().__init__(name=type(mover).__name__, daemon=True)
        self._rank = rank
        self._mover = mover
        self._inbox = inbox

    def run(self) -> None:
        self._inbox.send(TransferDone(rank=self._rank, ticket=0))
        try:
            while (transfer := self._inbox.receive()) is not None:
                self._inbox.send(self.carry_out(transfer))
        except zmq.ZMQError:
            log.debug("the mover's channel is gone")
        finally:
            self._inbox.close()
            self._mover.close()

    def carry_out(self, transfer: Transfer | AdapterMove) -> TransferDone:
        """One ticket's answer. Never raises: what failed is in it."""
        started_s = time.perf_counter()
        try:
            outcome = self._mover.move(transfer)
        except Exception as problem:
            log.exception("transfer %d (%s) failed", transfer.ticket, transfer.kind)
            places = list(range(len(transfer.slots))) if isinstance(transfer, Transfer) else []
            outcome = Outcome(
                places, f"{type(problem).__name__}: {problem}", disk_error=isinstance(transfer, AdapterMove)
            )
        return TransferDone(
            rank=self._rank,
            ticket=transfer.ticket,
            failed=outcome.places,
            error=outcome.error,
            disk_error=outcome.disk_error,
            copy_s=time.perf_counter() - started_s,
            pages=outcome.pages,
        )


class MemoryMover:
    """store and load: between the device and the host slab, telling the gate of each layer."""

    def __init__(self, copier: BlockCopier, slab: HostSlab, gate: LoadGate) -> None:
        self._copier = copier
        self._slab = slab
        self._gate = gate

    def move(self, transfer: Transfer) -> Outcome:
        self._gate.begin(transfer.ticket)
        try:
            if transfer.kind == "store":
                self._copier.store(transfer.block_ids, transfer.slots)
            else:
                assert transfer.kind == "load", transfer.kind
                self._copier.load(transfer.slots, transfer.block_ids, self._gate.arrived)
        finally:
            self._gate.end(transfer.ticket)
        return ALL_MOVED

    def close(self) -> None:
        self._gate.close()
        self._slab.close()


class DiskMover:
    """spill and fetch: between the host slab and this rank's folder."""

    def __init__(self, folder: Path, layout: bytes, slab: HostSlab) -> None:
        self._disk = folder
        self._layout = layout
        self._slab = slab

    def move(self, transfer: Transfer) -> Outcome:
        failed: list[int] = []
        error, disk_error = None, False
        for place, (key, slot) in enumerate(zip(transfer.keys, transfer.slots, strict=True)):
            try:
                if disk_error:
                    raise OSError(error)
                self._move_file(transfer, key, slot)
            except DiskBlockError as problem:
                failed.append(place)
                error = str(problem)
            except OSError as problem:
                failed.append(place)
                error, disk_error = error or str(problem), True
        return Outcome(failed, error, disk_error)

    def close(self) -> None:
        """The slab is the memory mover's."""

    def _move_file(self, transfer: Transfer, key: bytes, slot: int) -> None:
        if transfer.kind == "fetch":
            read_block(self._disk, key, self._layout, self._slab.slot(slot))
            return
        if key == transfer.keys[0]:
            for dropped in transfer.dropped:
                remove_block(self._disk, dropped)
        write_block(self._disk, key, self._layout, self._slab.slot(slot))


def open_movers(
    rank: int,
    planes: Sequence[torch.Tensor],
    num_layers: int,
    tiers: RankTiers,
    inbox: Callable[[MoverKind], Inbox],
    beside: bool,
) -> tuple[LoadGate, list[MoverThread]]:
    """The rank's movers, ready to start, and the gate of their loads. OSError or HostTierError without the memory.

    beside: copies take nothing from a step that runs (workers/rank/loading.py).
    """
    device = planes[0].device
    slab = _open_slab(rank, tiers, bytes_per_slot(planes), device)
    gate = LoadGate(device, by_layer=beside)
    memory = MemoryMover(make_copier(planes, num_layers, slab.bytes_SB), slab, gate)
    movers = [MoverThread(rank, memory, inbox("memory"))]
    if tiers.disk_folder is not None:
        disk = DiskMover(Path(tiers.disk_folder), tiers.layout, slab)
        movers.insert(0, MoverThread(rank, disk, inbox("disk")))
    return gate, movers


def _open_slab(rank: int, tiers: RankTiers, slot_bytes: int, device: torch.device) -> HostSlab:
    pin = device.type == "cuda"
    if tiers.host_socket is None or tiers.host_token is None:
        return HostSlab.allocate(tiers.num_slots, slot_bytes, pin=pin)
    held = attach(Path(tiers.host_socket), tiers.host_token, rank, ATTACH_S)
    return HostSlab(held.slab, tiers.num_slots, slot_bytes, pin=pin, holder=held)
