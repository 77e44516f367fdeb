"""InProcessExecutor: one rank in the calling process. submit() queues a plan, wait() runs the next one.

Used for offline work, tests and benchmarks with one rank: no process, no channel, no serialization. Loads torch.
"""

import logging
from collections import deque

from configs.schema import EngineSettings
from workers.channel import MoverKind, mover_of
from workers.engine.executor import ExecutorReady
from workers.errors import GroupLost, SettingsError
from workers.messages import AdapterMove, StepPlan, StepResult, Transfer, TransferDone
from workers.rank.kv_mover import MoverThread
from workers.rank.loading import LoadedRank, load_single
from workers.rank.memory import available_bytes
from workers.rank.model_runner import ModelRunner
from workers.rank.mover_inbox import Answers, QueueInbox
from workers.start_notes import adapter_notes, weight_notes
from workers.tiers import NoTiersBecause, OpenTiers, device_bytes, no_tiers, open_tiers

MOVER_END_S = 5.0
log = logging.getLogger(__name__)


class InProcessExecutor:
    """Executor with one rank. Sets torch's thread count for this process, as a rank process would."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.parallel.ranks_per_group != 1:
            raise SettingsError(
                "one process holds one rank; more need LocalExecutor or a cluster", "--tensor-parallel-size"
            )
        self._settings = settings
        self._runner: ModelRunner | None = None
        self._plans: deque[StepPlan] = deque()
        self._broken: str | None = None
        self._tiers: OpenTiers | None = None
        self._answers = Answers()
        self._inboxes: dict[MoverKind, QueueInbox] = {}
        self._movers: list[MoverThread] = []

    def start(self) -> ExecutorReady:
        """Loads the model, sizes and allocates the KV cache, warms up. SettingsError when that cannot work."""
        loaded = load_single(self._settings)
        self._runner = loaded.build_runner(loaded.facts.num_blocks)
        self._movers = loaded.open_adapter_movers(self._inbox)
        for mover in self._movers:
            mover.start()
        facts, offload_gib = loaded.facts, self._settings.device.cpu_offload_gib
        notes = (*weight_notes([facts], offload_gib), *adapter_notes([facts]), *self._open_tiers(loaded))
        ready = ExecutorReady(
            num_blocks=facts.num_blocks,
            pipeline_parallel_size=1,
            device=facts.device,
            dtype=facts.dtype,
            threads=facts.threads,
            weight_bytes=facts.weight_bytes,
            block_bytes=facts.block_bytes,
            load_s=facts.load_s,
            store=None if self._tiers is None else self._tiers.store,
            tier_notes=notes,
            kv_dtype=facts.kv_dtype,
            adapter_pages=facts.adapter_pages,
        )
        log.info("one rank in process: %s", ready)
        return ready

    def submit(self, plan: StepPlan) -> None:
        if self._broken is not None:
            raise GroupLost(self._broken)
        self._plans.append(plan)

    def wait(self, timeout_s: float) -> StepResult | None:
        """Runs the oldest plan submitted; None when there is none. GroupLost when a step failed, now or before."""
        if self._broken is not None:
            raise GroupLost(self._broken)
        if not self._plans or self._runner is None:
            if self._movers:
                self._answers.arrived.wait(timeout_s)
            return None
        try:
            result = self._runner.execute(self._plans.popleft())
        except BaseException as error:
            self._drop_runner()
            self._broken = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise  # interrupted in the middle of a step: the rows' state is unknown
            raise GroupLost(self._broken) from error
        assert result is not None
        return result

    def transfer(self, transfer: Transfer | AdapterMove) -> None:
        if self._broken is not None:
            raise GroupLost(self._broken)
        self._inboxes[mover_of(transfer)].submit(transfer)

    def transfers_done(self) -> list[TransferDone]:
        return self._answers.take()

    def close(self) -> None:
        """Ends the movers after their present copies, drops the model and the KV cache. Idempotent."""
        for inbox in self._inboxes.values():
            inbox.submit(None)
        for mover in self._movers:
            mover.join(MOVER_END_S)  # a disk that hangs holds up nobody
        self._movers.clear()
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None
        self._drop_runner()
        self._plans.clear()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _open_tiers(self, loaded: LoadedRank) -> tuple[str, ...]:
        """The tiers below the device, and what there is to say of them."""
        assert self._runner is not None
        facts = loaded.facts
        on_device = device_bytes(facts, facts.num_blocks) if facts.device == "cpu" else 0
        tiers = open_tiers(self._settings, [facts], available_bytes() - on_device)
        if isinstance(tiers, NoTiersBecause):
            return tiers.notes
        try:
            movers = loaded.open_movers(self._runner, tiers.ranks[0], self._inbox)
        except OSError as error:
            tiers.close()
            return no_tiers(str(error)).notes
        self._tiers = tiers
        for mover in movers:
            mover.start()
        self._movers += movers
        return tiers.notes

    def _inbox(self, kind: MoverKind) -> QueueInbox:
        inbox = self._inboxes[kind] = QueueInbox(self._answers)
        return inbox
