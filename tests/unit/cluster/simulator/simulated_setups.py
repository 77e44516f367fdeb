"""Small simulations: groups of a few rows and blocks, over steps of round times."""

from typing import Any

from tandem.cluster.simulator.loads import SimulatedRequest, generated_rows, make_load
from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulated_group import GroupKind
from tandem.cluster.simulator.simulated_ranks import END, VOCAB_SIZE
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts
from tandem.configs.schema import CacheSettings, EngineSettings, LoraSettings, ModelSettings, SchedulerSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.executor import ExecutorReady

TIMES = FittedTimes(
    alone=WorkCosts(step_s=0.02, decode_s=0.0005, prefill_token_s=0.0001, context_token_s=1e-7),
    beside=WorkCosts(step_s=0.004, decode_s=0.0001, prefill_token_s=0.00002, context_token_s=2e-8),
)


def kind(
    *, blocks: int = 2000, host_slots: int = 0, step_log: str | None = None, kv_events: bool = True, **scheduler: Any
) -> GroupKind:
    """Groups with adapters, of 8 rows unless asked otherwise."""
    settings = EngineSettings(
        model=ModelSettings(model="none"),
        scheduler=SchedulerSettings(**{"max_num_seqs": 8, "max_num_batched_tokens": 512, **scheduler}),
        lora=LoraSettings(enable_lora=True, max_loras=4, max_cpu_loras=8),
        cache=CacheSettings(kv_events=kv_events),
        step_log=step_log,
    )
    ready = ExecutorReady(
        num_blocks=blocks, pipeline_parallel_size=1, device="none", dtype="none", threads=0, weight_bytes=0,
        block_bytes=2**20, load_s=0.0, adapter_pages=4,
    )  # fmt: skip
    facts = ModelFacts(16 * blocks, VOCAB_SIZE, (END,), "none", "none")
    return GroupKind(settings=settings, facts=facts, ready=ready, host_slots=host_slots)


def load(name: str = "trace", count: int = 60, rate: float = 4.0, seed: int = 0) -> list[SimulatedRequest]:
    return make_load(name, generated_rows(count, rate, seed), seed)


def setup(**changes: Any) -> Setup:
    """Two groups under sixty requests."""
    wanted: dict[str, Any] = {"kind": kind(), "times": TIMES, "groups": 2, "policy": "joint", **changes}
    return Setup(**{"load": load(), **wanted})
