"""The Protocol between an Engine and the ranks that run its plans. Torch-free; knows no transport.

Implemented by workers/executor/rank_group.py, whose launchers start the ranks: in this process (in_process_ranks.py),
as child processes (local_ranks.py), as Ray actors (cluster/group/ray_ranks.py).
"""

from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.workers.messages.handshake import CaptureReport
from tandem.workers.messages.step import ExpertTokens, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferOp, TransferResult

if TYPE_CHECKING:
    from tandem.offload.kv.tiered_store import TieredStore


class ExecutorReady(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of ranks that are ready. num_blocks: KV blocks that every rank holds (the least of all ranks).

    store: the tiers below the device; None: none. kernel_notes: startup messages about kernels that are missing, or
    were tuned, and what helps; tier_notes: about streamed weights, adapters, captures and the tiers, or why there are
    no tiers. kv_dtype: element type of the blocks; None:
    dtype. adapter_pages: device pages for LoRA adapters, the least of all ranks; 0: none. captures: of each rank, where
    they are made at the start.
    """

    num_blocks: int
    pipeline_parallel_size: int
    device: str
    dtype: str
    threads: int
    weight_bytes: int
    block_bytes: int
    load_s: float
    rank_pids: tuple[int, ...] = ()
    num_ranks: int = 1
    store: "TieredStore | None" = None
    kernel_notes: tuple[str, ...] = ()
    tier_notes: tuple[str, ...] = ()
    kv_dtype: str | None = None
    adapter_pages: int = 0
    captures: tuple[CaptureReport, ...] = ()


class Executor(Protocol):
    """Runs plans in order. Not thread-safe: all calls come from the engine's one thread."""

    def start(self) -> ExecutorReady:
        """Builds the ranks, loads weights, allocates KV. SettingsError if it cannot work, GroupLost if a rank dies."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan to every rank; returns at once. Plans run in the order of submission."""
        ...

    def transfer(self, op: TransferOp) -> None:
        """Hands an op to every rank; it runs beside the plans. CopyKV needs `store` in ExecutorReady, ops of adapters
        need adapter_pages."""
        ...

    def count_experts(self) -> None:
        """Asks for the loads of experts; each stage answers once with ExpertTokens, behind the plans submitted so
        far."""
        ...

    def poll(self, timeout_s: float) -> StepResult | TransferResult | ExpertTokens | None:
        """Returns the next message of the ranks, None after timeout_s. Results of steps come in plan order.

        GroupLost when a rank has died, is frozen or makes no progress.
        """
        ...

    def close(self) -> None:
        """Ends the ranks; idempotent; leaves no process behind."""
        ...
