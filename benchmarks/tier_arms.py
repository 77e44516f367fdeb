"""One arm of the multi-turn benchmark: the same turns, at the same times, on a fresh engine with given KV tiers.

Called by benchmarks/multiturn.py. The rank is a process of its own, as in a service, unless it is told otherwise. Turns
arrive by the clock whether or not earlier ones are done (an open loop).
"""

import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.engine_run import TimelineSink, drain, greedy_request, opened_engine, run_jobs
from benchmarks.machine import OtherCpu, family_cpu_s
from benchmarks.turns import BLOCK, Conversations, Turn
from benchmarks.workload import Job, Summary, Timeline, summarize
from configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from workers.engine.engine import Engine
from workers.engine.stats import EngineStats, OffloadStats
from workers.models.spec import ArchSpec

CONCURRENCY = 16
GIB = 2**30
KINDS = ("load", "store", "fetch", "spill")
PROBE_JOBS = 8


@dataclass(frozen=True)
class Machine:
    """What every arm shares: the model, its type and threads, the longest sequence, a rank in a process of its own."""

    folder: Path
    dtype: str
    threads: int
    max_model_len: int
    spawn: bool = False


@dataclass(frozen=True)
class Arm:
    """KV tiers of one arm, in blocks. None: no such tier. prefetch: loads begin as a request enters the queue; else
    when its turn comes."""

    name: str
    device_blocks: int
    host_blocks: int | None = None
    disk_blocks: int | None = None
    prefetch: bool = True


@dataclass(frozen=True)
class ArmResult:
    """hits: prompt tokens found at admission by where they came from. computed: prompt tokens that were computed;
    recomputed: those of them that an earlier turn had computed. copied_bytes, copy_bytes_per_s: by kind of copy.
    turn_ttft_ms: of each turn, in the trace's order. cpu_s: CPU seconds of this process and its rank."""

    name: str
    summary: Summary
    ttft_mean_ms: float
    turn_ttft_ms: list[float]
    hits: dict[str, int]
    computed: int
    recomputed: int
    copied_bytes: dict[str, int]
    copy_bytes_per_s: dict[str, float]
    failed_blocks: int
    preemptions: int
    cpu_s: float
    tier_notes: tuple[str, ...]
    other_cpu: float
    outputs: list[list[int]]


def block_bytes(spec: ArchSpec, dtype: str) -> int:
    """KV bytes of one block."""
    element = 4 if dtype == "float32" else 2
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * BLOCK * element


def arm_settings(machine: Machine, arm: Arm, bytes_of_block: int, disk_folder: Path | None) -> EngineSettings:
    """Settings of an arm; half a block more than asked, so that rounding GiB down does not take one."""
    gib = bytes_of_block / GIB
    cache = CacheSettings(
        block_size=BLOCK,
        num_blocks=arm.device_blocks,
        kv_offloading_gib=None if arm.host_blocks is None else (arm.host_blocks + 0.5) * gib,
        kv_disk_path=None if arm.disk_blocks is None else str(disk_folder),
        kv_disk_gib=None if arm.disk_blocks is None else (arm.disk_blocks + 0.5) * gib * 1.01,
    )
    return EngineSettings(
        model=ModelSettings(model=str(machine.folder), dtype=machine.dtype, max_model_len=machine.max_model_len),
        cache=cache,
        scheduler=SchedulerSettings(max_num_seqs=CONCURRENCY, async_scheduling=False, max_num_queued_reqs=2**31),
        device=DeviceSettings(device="cpu", cpu_threads=machine.threads),
    )


def tokens_per_s_uncached(machine: Machine, talk: Conversations, bytes_of_block: int) -> float:
    """Prompt and output tokens per second of some of the turns when nothing is cached: what load 1 means."""
    arm = Arm("probe", CONCURRENCY * (talk.longest_blocks + 4))
    settings = arm_settings(machine, arm, bytes_of_block, None)
    step = max(1, len(talk.turns) // PROBE_JOBS)
    jobs = [turn.job for turn in talk.turns[::step]]
    sink = TimelineSink()
    with opened_engine(settings, sink, spawn=machine.spawn) as (engine, _):
        warm(engine, sink)
        own = [Job([2, *job.prompt[1:]], job.output_len) for job in jobs]  # shares no block with the others
        for place, job in enumerate(own):
            job.prompt[0] = 3 + place
        start = time.perf_counter()
        run_jobs(engine, sink, own, CONCURRENCY, "probe")
        return sum(len(job.prompt) + job.output_len for job in own) / (time.perf_counter() - start)


def warm(engine: Engine, sink: TimelineSink) -> None:
    """Two jobs of tokens that no turn has; also what the engine learns of its own speed before it is measured."""
    run_jobs(engine, sink, [Job([2] * 96, 4), Job([1, *[2] * 95], 4)], 1, "warm")
    drain(engine)


def run_arm(
    machine: Machine, arm: Arm, talk: Conversations, span_s: float, bytes_of_block: int, disk: Path
) -> ArmResult:
    """All turns within span_s seconds of arrivals."""
    sink = TimelineSink()
    settings = arm_settings(machine, arm, bytes_of_block, disk)
    with opened_engine(settings, sink, spawn=machine.spawn, early_loads=arm.prefetch) as (engine, ready):
        assert ready.block_bytes == bytes_of_block, (ready.block_bytes, bytes_of_block)
        assert (arm.host_blocks is None) == (ready.store is None), ready.tier_notes
        warm(engine, sink)
        before = engine.stats()
        cpu_s = family_cpu_s()
        with OtherCpu() as other:
            timelines = _open_loop(engine, sink, talk.turns, span_s, arm.name)
        drain(engine)
        cpu_s = family_cpu_s() - cpu_s
        return _result(arm, talk, sink, timelines, (before, engine.stats()), ready.tier_notes, cpu_s, other.share)


def _open_loop(engine: Engine, sink: TimelineSink, turns: list[Turn], span_s: float, name: str) -> list[Timeline]:
    """Turns count as submitted when they were due, also when the engine's step kept them from being taken in."""
    start = time.perf_counter()
    timelines = [Timeline(start + turn.arrival * span_s) for turn in turns]
    ids = [f"turn-{index}" for index in range(len(turns))]
    sink.timelines.update(zip(ids, timelines, strict=True))
    ended_before, next_turn = len(sink.ended_ids), 0
    with tqdm(total=len(turns), desc=name, unit="turn", leave=False, mininterval=1.0) as bar:
        while bar.n < len(turns):
            while next_turn < len(turns) and timelines[next_turn].submitted_s <= time.perf_counter():
                engine.add_request(greedy_request(ids[next_turn], turns[next_turn].job))
                next_turn += 1
            if engine.has_work():
                engine.step()
            else:
                time.sleep(max(0.0, timelines[next_turn].submitted_s - time.perf_counter()))
            bar.update(len(sink.ended_ids) - ended_before - bar.n)
    return timelines


def _result(
    arm: Arm,
    talk: Conversations,
    sink: TimelineSink,
    timelines: list[Timeline],
    stats: tuple[EngineStats, EngineStats],
    notes: tuple[str, ...],
    cpu_s: float,
    other_cpu: float,
) -> ArmResult:
    before, after = stats
    found = sum(sink.cached[f"turn-{index}"] for index in range(len(talk.turns)))
    none = dict.fromkeys(KINDS, 0.0)
    copied, seconds, loaded, failed = dict.fromkeys(KINDS, 0), none, 0, 0
    if before.offload is not None and after.offload is not None:
        copied = _grown(before.offload, after.offload)
        seconds = {kind: after.offload.copy_s[kind] - before.offload.copy_s[kind] for kind in KINDS}
        loaded = after.offload.loaded_tokens - before.offload.loaded_tokens
        failed = after.offload.failed_blocks - before.offload.failed_blocks
    bytes_of_block = after.offload.block_bytes if after.offload is not None else 0
    from_disk = min(loaded, copied["fetch"] * BLOCK)
    computed = talk.prompt_tokens - found
    ttft_s = [t.token_times_s[0] - t.submitted_s for t in timelines]
    return ArmResult(
        name=arm.name,
        summary=summarize(timelines),
        ttft_mean_ms=1e3 * sum(ttft_s) / len(ttft_s),
        turn_ttft_ms=[1e3 * seconds for seconds in ttft_s],
        hits={"device": max(0, found - loaded), "host": loaded - from_disk, "disk": from_disk},
        computed=computed,
        recomputed=computed - (talk.prompt_tokens - talk.seen_tokens),
        copied_bytes={kind: blocks * bytes_of_block for kind, blocks in copied.items()},
        copy_bytes_per_s={
            kind: copied[kind] * bytes_of_block / seconds[kind] if seconds[kind] else 0.0 for kind in KINDS
        },
        failed_blocks=failed,
        preemptions=after.preemptions - before.preemptions,
        cpu_s=cpu_s,
        tier_notes=notes,
        other_cpu=other_cpu,
        outputs=[sink.tokens[f"turn-{index}"] for index in range(len(talk.turns))],
    )


def _grown(before: OffloadStats, after: OffloadStats) -> dict[str, int]:
    return {kind: after.blocks[kind] - before.blocks[kind] for kind in KINDS}
