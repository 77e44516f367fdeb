"""Messages between coordinator and ranks for start and end of a rank, and the unions of all messages of each side.

Encoded as in request.py. workers/executor/rank_group.py has their order.
"""

from typing import Final

import msgspec

from tandem.workers.messages.step import (
    AskActivity,
    CountExperts,
    ExpertTokens,
    RankActivity,
    StepPlan,
    StepResult,
)
from tandem.workers.messages.transfer import TransferOp, TransferResult


class RankTiers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tiers below the device for one rank."""

    num_slots: int  # host slots, of the rank's own block_bytes each
    layout: bytes  # digest of everything that the meaning of stored bytes depends on (workers/executor/tiers.py)
    host_socket: str | None = None  # the host memory process that holds the slots; None: the rank allocates them
    host_token: str | None = None  # the token of the coordinator's lease; None: the rank leases its slab itself
    host_slab: int = 0  # the rank's slab in that lease
    stamps: tuple[bytes, bytes] | None = None  # of a slab that the rank leases: what it must bear, and what it gets
    disk_folder: str | None = None  # the rank's folder; None: no disk tier
    disk_word: bytes = b""  # what the lock above the folder holds where that is the coordinator's


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a rank: its number, process id and host address. Ranks with equal hosts share a machine."""

    rank: int
    pid: int
    host: str


class FindModel(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Order to every rank to find the model's files on its machine, or to download them. model: ModelSettings as
    msgpack, as pin_model() returns them (workers/planning/model_source.py)."""

    model: bytes


class RankFetching(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="fetching"):
    """Progress of a rank for which the model is downloaded: bytes of its weights on the rank's machine, and in all."""

    rank: int
    fetched_bytes: int
    total_bytes: int


class RankFound(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="found"):
    """Answer of a rank that has the model's files on its machine."""

    rank: int


class RankSetup(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="setup"):
    """Order to a rank to load its shard. master_*: torch.distributed's address."""

    settings: bytes  # EngineSettings as msgpack
    world_size: int
    master_address: str
    master_port: int | None  # None, for rank 0: it binds a free port of master_address and answers with RankListening
    # the most ranks that may share this rank's machine, ranks of other groups included; memory is divided by it, and
    # threads where the system does not tell which ranks are there
    ranks_on_node: int
    probe_endpoint: str | None = None  # where to echo probes (workers/rank/rank_watch.py)


class RankListening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """Port on which rank 0 of several listens for the rendezvous; the setups of the others carry it."""

    rank: int
    port: int


class RankLoading(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="loading"):
    """Progress of a rank that reads its weights: bytes of its own shard read so far, and in all."""

    rank: int
    loaded_bytes: int
    total_bytes: int


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="loaded"):
    """Facts of a rank whose weights are in memory. Sizes are of this rank alone, in bytes; load_s in seconds."""

    rank: int
    num_blocks: int  # the most KV blocks that this rank can hold, of block_bytes each
    weight_bytes: int
    block_bytes: int
    device: str
    dtype: str
    threads: int
    load_s: float
    is_in_host_memory: bool  # the device's memory is the machine's
    free_host_bytes: int = 0  # that its machine has left
    kv_dtype: str | None = None  # element type of KV, by --kv-cache-dtype's names; None: dtype
    resident_layers: int = 0
    streamed_layers: int = 0
    host_weight_bytes: int = 0  # the part of weight_bytes that the streamed_layers keep in host memory
    buffer_bytes: int = 0  # of the device, through which that part passes
    adapter_pages: int = 0  # device pages for LoRA adapters, of adapter_page_bytes each; 0: --enable-lora is off
    adapter_page_bytes: int = 0
    kernel_notes: tuple[str, ...] = ()  # lines for the user about kernels that are missing, or were tuned
    kv_layout: str = ""  # the planes of its layers, in words
    num_kv_groups: int = 1  # groups of layers, each with blocks of its own for every token


class AllocateKV(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Order to every rank to allocate its KV, warm up and answer RankReady.

    num_blocks: KV blocks, the least that any rank can hold. tiers: the tiers below the device to open; None: none.
    """

    num_blocks: int
    tiers: RankTiers | None = None


ELSEWHERE: Final = "on another rank of the stage"
"""Failure of a capture on a rank that could have made it; the other rank says why."""


class CaptureReport(msgspec.Struct, frozen=True, array_like=True):
    """The captures that the ranks of a stage have made together. failures: why steps, named in words, could not be
    captured and run eagerly. seconds and num_bytes: of this rank."""

    num_captures: int
    failures: dict[str, str]
    seconds: float
    num_bytes: int


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Answer of a rank that is ready for steps. `tiers_error`: why it could not open the lower tiers, or None.
    captures: of a device whose captures are made at the start. has_earlier: its host slab is the one that the
    coordinator's index of an earlier group is about."""

    rank: int
    tiers_error: str | None = None
    captures: CaptureReport | None = None
    has_earlier: bool = True


class RankFailed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="failed"):
    """Failure that ends a rank, for the user to read. `flag` names the setting to change, when a change would help.
    by_step: whether the step under way may have caused it. is_planned: the rank was told to end."""

    rank: int
    message: str
    flag: str | None = None
    by_step: bool = True
    is_planned: bool = False


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Order to every rank to finish and exit with status 0."""


ToLanes = TransferOp | AskActivity
"""Messages that a rank takes beside its steps."""

ToRank = FindModel | RankSetup | AllocateKV | StepPlan | CountExperts | ToLanes | Shutdown


FromRank = (
    Hello
    | RankFetching
    | RankFound
    | RankListening
    | RankLoading
    | RankLoaded
    | RankReady
    | RankFailed
    | StepResult
    | ExpertTokens
    | RankActivity
    | TransferResult
)
