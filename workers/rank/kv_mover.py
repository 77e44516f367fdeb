"""KVMover: a rank's copies between tiers, on a thread of its own, beside the steps.

Takes Transfer messages in order from an Inbox and answers each with TransferDone; a copy that fails is an answer too,
never the end of the rank. Made by loading.py once the KV is allocated; served ranks read a channel of their own
(ChannelInbox), the in-process executor a queue. Decides nothing about what moves.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import zmq

from offload.disk_io import DiskBlockError, read_block, remove_block, write_block
from offload.host_process import attach
from offload.pinned_pool import HostSlab
from offload.transfer import make_copier
from workers.channel import connect_dealer, mover_name
from workers.messages import RankTiers, Transfer, TransferDone

log = logging.getLogger(__name__)
ATTACH_S = 10.0


class Inbox(Protocol):
    """Where transfers come from and answers go; used by the mover's thread only."""

    def receive(self) -> Transfer | None:
        """Blocks for the next one; None: no more will come."""
        ...

    def send(self, done: TransferDone) -> None: ...

    def close(self) -> None: ...


class ChannelInbox:
    """A DEALER beside the rank's own, so that a transfer does not wait for the step under way."""

    def __init__(self, context: "zmq.Context[Any]", secret: str, endpoint: str, rank: int) -> None:
        self._socket = connect_dealer(context, secret, endpoint, mover_name(rank))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Transfer).decode

    def receive(self) -> Transfer | None:
        try:
            return self._decode(self._socket.recv())
        except zmq.ContextTerminated:  # the rank ends
            return None

    def send(self, done: TransferDone) -> None:
        self._socket.send(self._encode(done))

    def close(self) -> None:
        self._socket.close(linger=0)


class QueueInbox:
    """For a rank in this process. submit and take are the executor's; `arrived` is set when an answer is there."""

    def __init__(self) -> None:
        self._in: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[TransferDone] = queue.SimpleQueue()
        self.arrived = threading.Event()

    def submit(self, transfer: Transfer | None) -> None:
        self._in.put(transfer)

    def take(self) -> list[TransferDone]:
        """Answers so far."""
        self.arrived.clear()
        return [self._out.get() for _ in range(self._out.qsize())]

    def receive(self) -> Transfer | None:
        return self._in.get()

    def send(self, done: TransferDone) -> None:
        self._out.put(done)
        self.arrived.set()

    def close(self) -> None:
        """Nothing is held."""


class KVMover(threading.Thread):
    """Runs until its inbox ends. `tiers`: what the coordinator gave this rank."""

    def __init__(
        self, rank: int, planes: Sequence[torch.Tensor], slab: HostSlab, tiers: RankTiers, inbox: Inbox
    ) -> None:
        super().__init__(name="kv mover", daemon=True)
        self._rank = rank
        self._slab = slab
        self._copier = make_copier(planes, slab.bytes_SB)
        self._layout = tiers.layout
        self._disk = None if tiers.disk_folder is None else Path(tiers.disk_folder)
        self._inbox = inbox

    def run(self) -> None:
        self._inbox.send(TransferDone(rank=self._rank, ticket=0))
        try:
            while (transfer := self._inbox.receive()) is not None:
                self._inbox.send(self.move(transfer))
        except zmq.ZMQError:
            log.debug("the mover's channel is gone")
        finally:
            self._inbox.close()
            self._slab.close()

    def move(self, transfer: Transfer) -> TransferDone:
        """Moves one ticket's bytes. Never raises: what failed is in the answer."""
        started_s = time.perf_counter()
        failed: list[int] = []
        error, disk_error = None, False
        try:
            if transfer.kind == "store":
                self._copier.store(transfer.block_ids, transfer.slots)
            elif transfer.kind == "load":
                self._copier.load(transfer.slots, transfer.block_ids)
            else:
                failed, error, disk_error = self._move_files(transfer)
        except Exception as problem:
            log.exception("transfer %d (%s) failed", transfer.ticket, transfer.kind)
            failed, error = list(range(len(transfer.slots))), f"{type(problem).__name__}: {problem}"
        return TransferDone(
            rank=self._rank,
            ticket=transfer.ticket,
            failed=failed,
            error=error,
            disk_error=disk_error,
            copy_s=time.perf_counter() - started_s,
        )

    def _move_files(self, transfer: Transfer) -> tuple[list[int], str | None, bool]:
        """Places that failed, why the last one did, and whether the disk as a whole is at fault."""
        assert self._disk is not None, "this rank has no disk folder"
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
        return failed, error, disk_error

    def _move_file(self, transfer: Transfer, key: bytes, slot: int) -> None:
        assert self._disk is not None
        if transfer.kind == "fetch":
            read_block(self._disk, key, self._layout, self._slab.slot(slot))
            return
        if key == transfer.keys[0]:
            for dropped in transfer.dropped:
                remove_block(self._disk, dropped)
        write_block(self._disk, key, self._layout, self._slab.slot(slot))


def open_slab(rank: int, tiers: RankTiers, slot_bytes: int, device: torch.device) -> HostSlab:
    """The memory of this rank's host slots. OSError or HostTierError when it cannot be had."""
    pin = device.type == "cuda"
    if tiers.host_socket is None or tiers.host_token is None:
        return HostSlab.allocate(tiers.num_slots, slot_bytes, pin=pin)
    held = attach(Path(tiers.host_socket), tiers.host_token, rank, ATTACH_S)
    return HostSlab(held.slab, tiers.num_slots, slot_bytes, pin=pin, holder=held)
