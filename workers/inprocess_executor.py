"""InProcessExecutor: one rank in the calling process. submit() queues a plan, wait() runs the next one.

Used for offline work, tests and benchmarks with one rank: no process, no channel, no serialization. Loads torch.
"""

import logging
from collections import deque

from configs.schema import EngineSettings
from workers.engine.executor import ExecutorReady
from workers.errors import GroupLost, SettingsError
from workers.messages import StepPlan, StepResult
from workers.rank.loading import load_single
from workers.rank.model_runner import ModelRunner

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

    def start(self) -> ExecutorReady:
        """Loads the model, sizes and allocates the KV cache, warms up. SettingsError when that cannot work."""
        loaded = load_single(self._settings)
        self._runner = loaded.build_runner(loaded.facts.num_blocks)
        facts = loaded.facts
        ready = ExecutorReady(
            num_blocks=facts.num_blocks,
            pipeline_parallel_size=1,
            device=facts.device,
            dtype=facts.dtype,
            threads=facts.threads,
            weight_bytes=facts.weight_bytes,
            block_bytes=facts.block_bytes,
            load_s=facts.load_s,
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
            return None
        try:
            result = self._runner.execute(self._plans.popleft())
        except BaseException as error:
            self._runner = None
            self._broken = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise  # interrupted in the middle of a step: the rows' state is unknown
            raise GroupLost(self._broken) from error
        assert result is not None
        return result

    def close(self) -> None:
        """Drops the model and the KV cache. Idempotent."""
        self._runner = None
        self._plans.clear()
