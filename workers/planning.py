"""What a model needs on each rank and what then fits, before anything is loaded: the arithmetic of `tandem plan`.

Torch-free and pure: settings, an ArchSpec and sizes of memories in, plain numbers out. `least_bytes` also decides on a
real rank how many layers must stream (workers/rank/placing.py). Ranks of one stage hold the same, so a stage is planned
once. CPU ranks share one memory, CUDA ranks have a device each.
"""

from dataclasses import dataclass, replace

from configs.errors import SettingsError
from configs.schema import Device, EngineSettings
from offload.disk_io import file_bytes
from offload.placement import LayerPlacement, bytes_to_save, place_layers
from parallel.mesh import Mesh
from workers.adapter_pages import AdapterRoom, adapter_room
from workers.models.sizes import RankWeights, activation_bytes, adapter_bytes, kv_token_bytes, rank_weights
from workers.models.spec import ArchSpec
from workers.rank.memory import CPU_SHARE, GIB
from workers.resolve import DTYPE_BYTES
from workers.start_notes import pool_notes

CONVERSATION_TOKENS = 2048
MOST_TP = 8
"""Ranks that commonly share a node: beyond, all-reduces of every layer cross the network."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is. device_bytes: of one CUDA device, or of the machine that all CPU ranks share. host_bytes: None
    where it is not known (planning for another machine). The tiers are of the whole group."""

    device: Device
    device_bytes: int
    host_bytes: int | None = None
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One rank of a stage, in bytes; kv_budget_bytes may be negative: that much is lacking. adapter_bytes: of an
    adapter of --max-lora-rank on every linear; adapter_room: what is set aside for adapters."""

    stage: int
    weights: RankWeights
    placement: LayerPlacement
    activation_bytes: int
    kv_token_bytes: int
    kv_budget_bytes: int
    adapter_bytes: int
    adapter_room: AdapterRoom

    @property
    def device_weight_bytes(self) -> int:
        return self.weights.fixed_bytes + self.placement.device_bytes


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A place for KV: its bytes over all ranks, the tokens that fit, and how many whole conversations that is."""

    tier: str
    size_bytes: int
    tokens: int
    full_conversations: int
    short_conversations: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit, and the flag to change."""

    flag: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of tp_size x pp_size ranks. notes: what a start would say of it, though it fits."""

    tp_size: int
    pp_size: int
    max_model_len: int
    stages: tuple[StagePlan, ...]
    tiers: tuple[TierPlan, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def device_tokens(self) -> int:
        return self.tiers[0].tokens


def plan_group(
    settings: EngineSettings, spec: ArchSpec, memory: Memory, dtype: str, kv_dtype: str, max_model_len: int
) -> GroupPlan:
    """The plan of one group as `settings` cut it. dtype, kv_dtype and max_model_len are resolved; the cut is valid."""
    tp_size = settings.parallel.tensor_parallel_size
    pp_size = settings.parallel.pipeline_parallel_size
    meshes = [Mesh(tp_size, pp_size, stage * tp_size) for stage in range(pp_size)]
    stages = tuple(_stage(settings, spec, memory, mesh, dtype, kv_dtype, max_model_len) for mesh in meshes)
    if memory.device == "cpu":
        stages = _share_machine(settings, stages, memory, tp_size, max_model_len)
    tiers = _tiers(settings, stages, memory, tp_size, max_model_len)
    problems = [
        *_problems(settings, stages, memory, max_model_len),
        *_host_problems(stages, memory, tp_size, tiers[0].size_bytes),
    ]
    notes = pool_notes(settings.cache, max_model_len)
    return GroupPlan(tp_size, pp_size, max_model_len, stages, tiers, tuple(problems), notes)


def least_bytes(
    settings: EngineSettings, spec: ArchSpec, mesh: Mesh, dtype: str, kv_dtype: str, max_model_len: int
) -> int:
    """What must fit on a device beside the weights: the KV that was asked for, else one context's, room for adapters,
    and a step at its fullest."""
    cache, scheduler = settings.cache, settings.scheduler
    block = cache.block_size * kv_token_bytes(spec, mesh, kv_dtype)
    kv = cache.kv_cache_memory_bytes or -(-max_model_len // cache.block_size) * block
    if cache.num_blocks is not None:
        kv = cache.num_blocks * block
    tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    adapters = adapter_room(settings.lora, spec, mesh, DTYPE_BYTES[dtype]).device_bytes
    return kv + adapters + activation_bytes(spec, mesh.tp_size, tokens, seqs, DTYPE_BYTES[dtype])


def cuts(spec: ArchSpec, num_ranks: int) -> list[tuple[int, int]]:
    """Every (tp, pp) of num_ranks ranks that the model allows, the most tensor parallel first."""
    found = []
    for tp_size in range(num_ranks, 0, -1):
        if num_ranks % tp_size:
            continue
        try:
            spec.check_parallel(tp_size, num_ranks // tp_size)
        except SettingsError:
            continue
        found.append((tp_size, num_ranks // tp_size))
    return found


def best_of(plans: list[GroupPlan]) -> GroupPlan | None:
    """Of the plans that fit: none that streams while another need not, tensor parallel within a node before stages
    (a token passes through all stages in turn), then the most KV."""
    fitting = [plan for plan in plans if plan.fits]
    return min(fitting, key=_preference, default=None)


def _preference(plan: GroupPlan) -> tuple[bool, bool, int, int]:
    streams = any(stage.placement.streamed for stage in plan.stages)
    return streams, plan.tp_size > MOST_TP, plan.pp_size, -plan.device_tokens


def _stage(
    settings: EngineSettings,
    spec: ArchSpec,
    memory: Memory,
    mesh: Mesh,
    dtype: str,
    kv_dtype: str,
    max_model_len: int,
) -> StagePlan:
    """One rank of the stage at `mesh`. On CPU the KV budget is set later, when all ranks are known."""
    element, scheduler = DTYPE_BYTES[dtype], settings.scheduler
    weights = rank_weights(spec, mesh, element, packs=memory.device == "cpu" and dtype != "float16")
    save, budget = int(settings.device.cpu_offload_gib * GIB), 0
    if memory.device == "cuda":
        budget = int(settings.cache.gpu_memory_utilization * memory.device_bytes)
        needed = weights.total_bytes + least_bytes(settings, spec, mesh, dtype, kv_dtype, max_model_len)
        save = bytes_to_save(needed, budget, save)
    placement = place_layers(weights.num_layers, weights.layer_bytes, save)
    tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    activations = activation_bytes(spec, mesh.tp_size, tokens, seqs, element)
    room = adapter_room(settings.lora, spec, mesh, element)
    return StagePlan(
        stage=mesh.pp_rank,
        weights=weights,
        placement=placement,
        activation_bytes=activations,
        kv_token_bytes=kv_token_bytes(spec, mesh, kv_dtype),
        kv_budget_bytes=budget - weights.fixed_bytes - placement.device_bytes - activations - room.device_bytes,
        adapter_bytes=adapter_bytes(spec, mesh, settings.lora.max_lora_rank, element),
        adapter_room=room,
    )


def _share_machine(
    settings: EngineSettings, stages: tuple[StagePlan, ...], memory: Memory, tp_size: int, max_model_len: int
) -> tuple[StagePlan, ...]:
    """KV budgets of CPU ranks: what was asked for, else 40 % of what weights leave of the machine, over all
    ranks, and no more than max_num_seqs contexts need."""
    left = memory.device_bytes - _machine_weights(stages, tp_size)
    share = (left if settings.cache.kv_cache_memory_bytes else int(CPU_SHARE * left)) // (tp_size * len(stages))
    blocks = settings.scheduler.max_num_seqs * -(-max_model_len // settings.cache.block_size)

    def budget(stage: StagePlan) -> int:
        return min(share, blocks * settings.cache.block_size * stage.kv_token_bytes)

    return tuple(replace(stage, kv_budget_bytes=budget(stage)) for stage in stages)


def _machine_weights(stages: tuple[StagePlan, ...], tp_size: int) -> int:
    """Of all CPU ranks, in whatever part of the one memory they are, with their room for adapters."""
    return tp_size * sum(
        stage.weights.total_bytes + stage.placement.buffer_bytes + stage.adapter_room.device_bytes for stage in stages
    )


def _blocks(settings: EngineSettings, stages: tuple[StagePlan, ...]) -> int:
    """KV blocks that every rank can hold."""
    cache = settings.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    return min(
        max(0, min(stage.kv_budget_bytes, cache.kv_cache_memory_bytes or stage.kv_budget_bytes))
        // (stage.kv_token_bytes * cache.block_size)
        for stage in stages
    )


def _tiers(
    settings: EngineSettings, stages: tuple[StagePlan, ...], memory: Memory, tp_size: int, max_model_len: int
) -> tuple[TierPlan, ...]:
    size = settings.cache.block_size
    block_bytes = tp_size * sum(stage.kv_token_bytes for stage in stages) * size
    file_size = tp_size * sum(file_bytes(stage.kv_token_bytes * size) for stage in stages)
    device_blocks = _blocks(settings, stages)
    blocks = {
        "device": device_blocks,
        "host": memory.host_tier_bytes // block_bytes,
        "disk": memory.disk_tier_bytes // file_size,
    }
    sizes = {
        "device": device_blocks * block_bytes,
        "host": memory.host_tier_bytes,
        "disk": memory.disk_tier_bytes,
    }
    full, short = (-(-tokens // size) for tokens in (max_model_len, min(CONVERSATION_TOKENS, max_model_len)))
    return tuple(TierPlan(t, sizes[t], count * size, count // full, count // short) for t, count in blocks.items())


def _problems(
    settings: EngineSettings, stages: tuple[StagePlan, ...], memory: Memory, max_model_len: int
) -> list[Problem]:
    """What does not fit on the device, the gravest first; one problem a cause."""
    cache = settings.cache
    fullest = min(stages, key=lambda stage: stage.kv_budget_bytes / stage.kv_token_bytes)
    tokens = _blocks(settings, stages) * cache.block_size
    found = []
    if fullest.kv_budget_bytes < 0:
        found.append(_no_room_for_weights(settings, fullest, memory))
    elif (asked := _asked_kv(settings, fullest)) and asked[1] > fullest.kv_budget_bytes:
        left = gib(fullest.kv_budget_bytes)
        found.append(
            Problem(asked[0], f"{gib(asked[1])} of KV on a rank of stage {fullest.stage}, {left} are left for it")
        )
    elif tokens < max_model_len and cache.num_blocks is None:
        message = f"one context of {max_model_len} tokens needs more KV than fits; --max-model-len {tokens} would do"
        found.append(Problem("--max-model-len", message))
    return found


def _host_problems(stages: tuple[StagePlan, ...], memory: Memory, tp_size: int, pool_bytes: int) -> list[Problem]:
    """Streamed weights, the host tier and copies of adapters, against what the host has left: all of it on a GPU
    machine."""
    kept, tier = tp_size * sum(stage.placement.host_bytes for stage in stages), memory.host_tier_bytes
    copies = tp_size * sum(stage.adapter_room.host_bytes for stage in stages)
    if memory.device == "cpu":
        left = max(0, memory.device_bytes - _machine_weights(stages, tp_size) - pool_bytes)
        if tier > left:
            message = f"{gib(tier)} of host tier, {gib(left)} are left beside weights and the device's KV"
            return [Problem("--kv-offloading-size", message)]
        if tier + copies > left:
            message = f"{gib(copies)} of adapters, {gib(left - tier)} are left beside weights and KV"
            return [Problem("--max-cpu-loras", message)]
    elif memory.host_bytes is not None and kept + tier > memory.host_bytes:
        message = f"{gib(kept)} of weights and {gib(tier)} of KV in a host with {gib(memory.host_bytes)}"
        return [Problem("--cpu-offload-gb" if kept else "--kv-offloading-size", message)]
    elif memory.host_bytes is not None and kept + tier + copies > memory.host_bytes:
        message = f"{gib(copies)} of adapters and {gib(kept + tier)} of others in a host with {gib(memory.host_bytes)}"
        return [Problem("--max-cpu-loras", message)]
    return []


def _asked_kv(settings: EngineSettings, stage: StagePlan) -> tuple[str, int] | None:
    """The flag that sizes the pool, and its bytes on a rank of the stage; None when the pool takes what is left."""
    cache = settings.cache
    if cache.num_blocks is not None:
        return "--num-gpu-blocks-override", cache.num_blocks * cache.block_size * stage.kv_token_bytes
    if cache.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes", cache.kv_cache_memory_bytes
    return None


def _no_room_for_weights(settings: EngineSettings, stage: StagePlan, memory: Memory) -> Problem:
    """A rank lacks memory before the first token of KV."""
    if memory.device == "cpu":
        return Problem("MODEL", f"its weights leave nothing of the machine's {gib(memory.device_bytes)} for KV")
    streamed = len(stage.placement.streamed)
    return Problem(
        "--tensor-parallel-size",
        f"a rank of stage {stage.stage} lacks {gib(-stage.kv_budget_bytes)}: {gib(stage.device_weight_bytes)} of "
        f"weights and {gib(stage.activation_bytes)} of activations for {settings.cache.gpu_memory_utilization:g} of "
        f"{gib(memory.device_bytes)}, with {streamed} of {stage.placement.num_layers} layers in host memory",
    )


def gib(size: int) -> str:
    """For people: 1.2 GiB, 310 MiB, 12 KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 2**10:.3g} KiB"
