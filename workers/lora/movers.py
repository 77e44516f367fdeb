"""How adapters move on a rank, on threads of their own: from their source to host memory, from there to the device.

Carries out AdapterMoves: SourceMover the fetches, which may take minutes, PlaceMover what takes milliseconds. The
rank's host copies are theirs together. Decides nothing: which adapter moves, stays or goes is the coordinator's
business.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from workers.adapter_source import local_folder
from workers.base_tables import check_base_tables
from workers.errors import AdapterRefused, AdapterUnreadable
from workers.lora.host_copy import HostCopy, cut_shard
from workers.lora.slab import AdapterSlab
from workers.messages import AdapterMove, AdapterRef
from workers.models.spec import ArchSpec
from workers.peft_folder import PeftAdapter, adapter_digest, most_file_bytes, read_adapter
from workers.rank.kv_mover import ALL_MOVED, Outcome

log = logging.getLogger(__name__)

HostCopies = dict[str, HostCopy]
"""By digest. Fetches add, a drop takes away, each on its own thread: single operations of a dict, which are whole."""
ReadShard = Callable[[AdapterRef], HostCopy]


class ShardReader:
    """An adapter's source to this rank's shard of it, checked whole. AdapterRefused when it may not be used,
    AdapterUnreadable when it is not there, or not any more in the version that is asked for."""

    def __init__(
        self,
        spec: ArchSpec,
        model_folder: Path | None,
        slab: AdapterSlab,
        cache_folder: Path,
        dtype: torch.dtype,
        *,
        pin: bool,
    ) -> None:
        """model_folder: the checkpoint, None where the weights are random."""
        self._spec = spec
        self._model_folder = model_folder
        self._slab = slab
        self._cache_folder = cache_folder
        self._dtype = dtype
        self._pin = pin
        self._most_bytes = most_file_bytes(spec, slab.shape.max_rank)

    def __call__(self, ref: AdapterRef) -> HostCopy:
        folder = local_folder(ref, self._cache_folder, most_bytes=self._most_bytes)
        try:
            adapter = self._read(folder, ref)
        except _ContentChanged:
            if ref.is_remote:  # the cache lies: what is there is of no use to anyone
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self._model_folder is not None:
            check_base_tables(adapter, self._model_folder, self._spec)
        return cut_shard(adapter, self._slab.shape, self._dtype, pin=self._pin)

    def _read(self, folder: Path, ref: AdapterRef) -> PeftAdapter:
        """What was listed. When something else lies there by now, that is no fault of the request's."""
        try:
            adapter = read_adapter(folder, self._spec, self._slab.shape.max_rank)
        except AdapterUnreadable:
            raise
        except AdapterRefused as refusal:
            if _has_digest(folder, ref.digest):
                raise
            raise _ContentChanged(f"its content has changed: {refusal}") from refusal
        if (found := adapter.facts.digest) != ref.digest:
            raise _ContentChanged(f"its content has changed: its digest is {found[:12]}, not {ref.digest[:12]}")
        return adapter


class _ContentChanged(AdapterUnreadable):
    """Its source has another version of it than the request is for."""


def _has_digest(folder: Path, digest: str) -> bool:
    try:
        return adapter_digest(folder) == digest
    except AdapterRefused:
        return False


class SourceMover:
    """fetch: source -> host memory. A rank has several, for what is near and what is far."""

    def __init__(self, read: ReadShard, copies: HostCopies) -> None:
        self._read = read
        self._copies = copies

    def move(self, move: AdapterMove) -> Outcome:
        assert move.kind == "fetch", move.kind
        digest = move.adapter.digest
        copy = self._copies.get(digest)
        if copy is None:
            try:
                copy = self._read(move.adapter)
            except AdapterUnreadable as problem:
                log.warning("adapter %s is not read from %s: %s", move.adapter.name, move.adapter.source, problem)
                return Outcome([], str(problem), disk_error=True)
            except AdapterRefused as refusal:
                log.info("adapter %s from %s is refused: %s", move.adapter.name, move.adapter.source, refusal)
                return Outcome([], str(refusal))
            self._copies[digest] = copy
        return Outcome([], pages=copy.num_pages)

    def close(self) -> None:
        """The copies are the place mover's."""


class PlaceMover:
    """place: host memory -> device, whole when it is answered. drop: out of host memory."""

    def __init__(self, slab: AdapterSlab, copies: HostCopies, device: torch.device) -> None:
        self._slab = slab
        self._copies = copies
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def move(self, move: AdapterMove) -> Outcome:
        digest = move.adapter.digest
        if move.kind == "drop":
            self._copies.pop(digest, None)
            return ALL_MOVED
        assert move.kind == "place", move.kind
        copy = self._copies.get(digest)
        if copy is None:
            return Outcome([], f"adapter {move.adapter.name} is not in host memory")
        if self._stream is None:
            self._slab.put(copy, move.pages, move.slot)
        else:
            with torch.cuda.stream(self._stream):
                self._slab.put(copy, move.pages, move.slot)
            self._stream.synchronize()
        return Outcome([], pages=copy.num_pages)

    def close(self) -> None:
        self._copies.clear()
