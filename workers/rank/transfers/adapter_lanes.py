"""Lanes that move adapters on a rank: from their source to host memory, and from there to the device.

SourceLane carries out fetches, which may take minutes, PlaceLane what takes milliseconds. The lanes share the rank's
host copies. The coordinator decides which adapter moves, stays or goes. Opened by loading.py.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.configs.environment import adapter_cache_folder
from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.lora.device.host_copy import HostCopy, make_shard
from tandem.workers.lora.device.rank_adapters import RankAdapters
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.lora.peft.adapter_source import local_folder
from tandem.workers.lora.peft.base_tables import check_base_tables
from tandem.workers.lora.peft.peft_folder import PeftAdapter, adapter_digest, most_file_bytes, read_adapter
from tandem.workers.messages.errors import AdapterRefused, AdapterUnreadable
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import DropAdapter, Failure, FetchAdapter, PlaceAdapter
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.rank.transfers.lanes import ALL_MOVED, Lanes, Moved

log = logging.getLogger(__name__)
URL_LANES = 3
"""Several, so that not all remote sources wait for the slowest one."""

CopiesByDigest = dict[str, HostCopy]
"""Adapters by digest. Fetches add, a drop takes away, each on its own thread: single operations of a dict, which are
whole."""
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
        accelerator: Accelerator,
    ) -> None:
        """model_folder: the checkpoint, None where the weights are random."""
        self._spec = spec
        self._model_folder = model_folder
        self._slab = slab
        self._cache_folder = cache_folder
        self._dtype = dtype
        self._accelerator = accelerator
        self._most_bytes = most_file_bytes(spec, slab.shape.max_rank)

    def __call__(self, ref: AdapterRef) -> HostCopy:
        folder = local_folder(ref, self._cache_folder, most_bytes=self._most_bytes)
        try:
            adapter = self._read(folder, ref)
        except _ContentChanged:
            if ref.is_remote:  # the cached copy is stale
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self._model_folder is not None:
            check_base_tables(adapter, self._model_folder, self._spec)
        return make_shard(adapter, self._slab.shape, self._dtype, self._accelerator)

    def _read(self, folder: Path, ref: AdapterRef) -> PeftAdapter:
        """Reads the adapter; a changed content is _ContentChanged, as the request is not at fault."""
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


class SourceLane:
    """Fetches adapters: source -> host memory. A rank has several, for local and remote sources."""

    def __init__(self, read: ReadShard, copies: CopiesByDigest) -> None:
        self._read = read
        self._copies = copies

    def move(self, op: FetchAdapter) -> Moved:
        ref = op.adapter
        copy = self._copies.get(ref.digest)
        if copy is None:
            try:
                copy = self._read(ref)
            except AdapterUnreadable as problem:
                log.warning("adapter %s is not read from %s: %s", ref.name, ref.source, problem)
                return Moved([], Failure("source", str(problem)))
            except AdapterRefused as refusal:
                log.info("adapter %s from %s is refused: %s", ref.name, ref.source, refusal)
                return Moved([], Failure("content", str(refusal)))
            self._copies[ref.digest] = copy
        return Moved([], pages=copy.num_pages)

    def close(self) -> None:
        """The place lane owns the copies."""


class PlaceLane:
    """Places adapters: host memory -> device, whole when it is answered; drops them from host memory."""

    def __init__(self, slab: AdapterSlab, copies: CopiesByDigest, accelerator: Accelerator) -> None:
        self._slab = slab
        self._copies = copies
        self._accelerator = accelerator
        self._stream = accelerator.stream()

    def move(self, op: PlaceAdapter | DropAdapter) -> Moved:
        digest = op.adapter.digest
        if isinstance(op, DropAdapter):
            if (dropped := self._copies.pop(digest, None)) is not None:
                dropped.close()
            return ALL_MOVED
        copy = self._copies.get(digest)
        if copy is None:
            return Moved([], Failure("internal", f"adapter {op.adapter.name} is not in host memory"))
        try:
            with self._accelerator.use(self._stream):
                self._slab.put(copy, op.pages, op.slot)
        finally:
            self._stream.synchronize()  # also after an error: what was given out reads the host copy, writes the pages
        return Moved([], pages=copy.num_pages)

    def close(self) -> None:
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()


def open_adapter_lanes(lanes: Lanes, adapters: RankAdapters) -> None:
    """Opens the lanes that move a rank's adapters."""
    copies: CopiesByDigest = {}
    accelerator = adapters.platform.accelerator
    cache = adapter_cache_folder()
    read = ShardReader(adapters.spec, adapters.model_folder, adapters.slab, cache, adapters.dtype, accelerator)
    lanes.open("placement", accelerator, PlaceLane(adapters.slab, copies, accelerator))
    lanes.open("folder", accelerator, SourceLane(read, copies))
    lanes.open("url", accelerator, *(SourceLane(read, copies) for _ in range(URL_LANES)))
