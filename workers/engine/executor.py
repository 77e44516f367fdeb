"""The Protocol between an Engine and the ranks that run its plans. Torch-free; knows no transport.

Three implementations: workers/inprocess_executor.py (one rank, same process), workers/local_executor.py (spawned
processes), cluster/ray_executor.py (Ray actors). The last two share workers/rank/rank_worker.py and the handshake.
"""

from typing import Protocol

import msgspec

from offload.tiered_store import TieredStore
from workers.messages import AdapterMove, StepPlan, StepResult, Transfer, TransferDone


class ExecutorReady(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks turned out to be. num_blocks: KV blocks that every rank holds (the least of all ranks).

    store: the tiers below the device, when there are any; tier_notes: what was chosen for them, or why there are none;
    before that, what was chosen for weights that stream.
    kv_dtype: what the blocks hold, None: dtype.
    adapter_pages: device pages for LoRA adapters, the least of all ranks; 0: none.
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
    store: TieredStore | None = None
    tier_notes: tuple[str, ...] = ()
    kv_dtype: str | None = None
    adapter_pages: int = 0


class Executor(Protocol):
    """Runs plans in order. Not thread-safe: start, submit, wait and close are called from the engine's one thread."""

    def start(self) -> ExecutorReady:
        """Builds the ranks, loads weights, allocates KV. SettingsError if it cannot work, GroupLost if a rank dies."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan to every rank; returns at once. Plans run in the order of submission."""
        ...

    def wait(self, timeout_s: float) -> StepResult | None:
        """The next result in plan order, or None after timeout_s or when a transfer is done. GroupLost when a rank has
        died."""
        ...

    def transfer(self, transfer: Transfer | AdapterMove) -> None:
        """Hands a move between tiers to every rank; it runs beside the plans. Transfers only with `store` in the
        answer, AdapterMoves only with adapter_pages."""
        ...

    def transfers_done(self) -> list[TransferDone]:
        """What ranks have answered since the last call."""
        ...

    def close(self) -> None:
        """Ends the ranks; idempotent; leaves no process behind."""
        ...
