"""Predicts the memory of each rank and the KV that fits, from settings, an ArchSpec and sizes of memory. Torch-free.

It is the arithmetic of `tandem plan`; on a real rank `least_bytes` also decides how many layers must stream. Ranks of
one stage hold equal amounts, so a stage is planned once. CPU ranks share one memory, CUDA ranks have a device each.
"""

from dataclasses import dataclass, replace

from tandem.configs.errors import SettingsError
from tandem.configs.platform_facts import PLATFORM_FACTS
from tandem.configs.schema import Device, EngineSettings
from tandem.offload.kv.disk_io import file_bytes
from tandem.offload.kv.kv_groups import KVGroups
from tandem.offload.weights.layer_placement import LayerPlacement, bytes_to_save, place_layers
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.head_config import HeadSpec
from tandem.workers.planning.adapter_room import AdapterRoom, adapter_room
from tandem.workers.planning.budget import ATTENTION_BYTES, CPU_SHARE, GIB
from tandem.workers.planning.graph_room import graph_bytes
from tandem.workers.planning.resolve import DTYPE_BYTES, draft_spec, drafts_here, kv_groups
from tandem.workers.planning.sizes import (
    RankWeights,
    activation_bytes,
    adapter_bytes,
    draft_bytes,
    kv_token_bytes,
    rank_weights,
    tap_bytes,
)
from tandem.workers.planning.start_notes import pool_notes

CONVERSATION_TOKENS = 2048
MOST_TP = 8
"""Ranks that commonly share a node. With more, the all-reduces of every layer cross the network."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes of memory in bytes. device_bytes: of one CUDA device, or of the machine that all CPU ranks share.
    host_bytes: None where it is not known (a plan for another machine). Tiers are those of the whole group."""

    device: Device
    device_bytes: int
    host_bytes: int | None = None
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0

    @property
    def is_shared(self) -> bool:
        """The device's memory is the machine's, which all its ranks share."""
        return PLATFORM_FACTS[self.device].shares_memory


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The memory of one rank of a stage, in bytes. kv_token_bytes: of a token in a KV block; kv_layers_bytes: of its KV
    in all layers, the same where they form one group. draft_bytes, draft_token_bytes: weights of the draft model, and
    its part of kv_token_bytes, which only the first rank of the stage has. kv_budget_bytes: negative when memory is
    lacking. adapter_bytes: of one adapter of --max-lora-rank on every linear layer. adapter_room: the memory reserved
    for adapters. graph_bytes: of captured steps, with the KV block that their padding writes."""

    stage: int
    weights: RankWeights
    placement: LayerPlacement
    activation_bytes: int
    kv_token_bytes: int
    kv_layers_bytes: int
    kv_budget_bytes: int
    adapter_bytes: int
    adapter_room: AdapterRoom
    graph_bytes: int
    draft_bytes: int = 0
    draft_token_bytes: int = 0

    @property
    def device_weight_bytes(self) -> int:
        return self.weights.fixed_bytes + self.placement.device_bytes + self.draft_bytes


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier of KV: its bytes over all ranks, and the tokens and whole conversations that fit."""

    tier: str
    size_bytes: int
    tokens: int
    full_conversations: int
    short_conversations: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why the model does not fit, and the flag to change."""

    flag: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one group of tp_size x pp_size ranks. notes: warnings that its start would log too. kv_groups: of its
    layers; tokens_kept_whole: KV tokens of the device's blocks if no layer gave any back."""

    tp_size: int
    pp_size: int
    max_model_len: int
    stages: tuple[StagePlan, ...]
    tiers: tuple[TierPlan, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    kv_groups: KVGroups
    tokens_kept_whole: int

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def device_tokens(self) -> int:
        return self.tiers[0].tokens


def plan_group(
    settings: EngineSettings, spec: ArchSpec, memory: Memory, dtype: str, kv_dtype: str, max_model_len: int
) -> GroupPlan:
    """Plans one group with the TP x PP of `settings`, which must divide the model. dtype, kv_dtype and max_model_len
    are resolved ones."""
    tp_size = settings.parallel.tensor_parallel_size
    pp_size = settings.parallel.pipeline_parallel_size
    experts = settings.parallel.enable_expert_parallel
    groups = kv_groups(settings, spec, max_model_len)
    meshes = [Mesh(tp_size, pp_size, stage * tp_size, experts) for stage in range(pp_size)]
    stages = tuple(_stage(settings, spec, memory, mesh, dtype, kv_dtype, max_model_len) for mesh in meshes)
    if memory.is_shared:
        stages = _share_machine(settings, stages, memory, tp_size, groups.needed(max_model_len))
    tiers = _tiers(settings, stages, memory, tp_size, max_model_len, groups)
    problems = [
        *_problems(settings, stages, memory, max_model_len, groups),
        *_host_problems(stages, memory, tp_size, tiers[0].size_bytes, int(settings.device.cpu_offload_gib * GIB)),
    ]
    notes = (*spec.remarks, *pool_notes(settings.cache, max_model_len, groups))
    whole = _kept_whole(settings, stages)
    return GroupPlan(tp_size, pp_size, max_model_len, stages, tiers, tuple(problems), notes, groups, whole)


def least_bytes(
    settings: EngineSettings, spec: ArchSpec, mesh: Mesh, dtype: str, kv_dtype: str, max_model_len: int
) -> int:
    """Bytes that a device must hold beside the weights: the KV of the flags, else of one context, the reserve for
    adapters, the activations of the largest step, and what captured steps take."""
    cache, scheduler = settings.cache, settings.scheduler
    groups = kv_groups(settings, spec, max_model_len)
    draft = _draft_of(settings, mesh)
    block = cache.block_size * kv_token_bytes(spec, mesh, kv_dtype, groups.windows, draft)
    kv = cache.kv_cache_memory_bytes or groups.needed(max_model_len) * block
    if cache.num_blocks is not None:
        kv = cache.num_blocks * block
    tokens, seqs = scheduler.max_num_batched_tokens, settings.most_samples
    adapters = adapter_room(settings.lora, spec, mesh, DTYPE_BYTES[dtype]).device_bytes
    activations = activation_bytes(spec, mesh, tokens, seqs, DTYPE_BYTES[dtype])
    activations += tap_bytes(draft_spec(settings), spec, mesh, tokens, DTYPE_BYTES[dtype])
    graphs = _graph_bytes(settings, spec, mesh, dtype, kv_dtype, max_model_len, replays=True)
    drafts = draft_bytes(draft, spec, mesh, DTYPE_BYTES[dtype], packs=False)
    return kv + drafts + adapters + activations + ATTENTION_BYTES + _row_bytes(settings, max_model_len) + graphs


def _graph_bytes(
    settings: EngineSettings,
    spec: ArchSpec,
    mesh: Mesh,
    dtype: str,
    kv_dtype: str,
    max_model_len: int,
    *,
    replays: bool,
) -> int:
    """Bytes of captured steps on a device with memory of its own, and of the KV block that their padding writes.
    replays: steps are captured, as they are without streamed layers."""
    scratch = settings.cache.block_size * kv_token_bytes(spec, mesh, kv_dtype)
    return scratch + (graph_bytes(spec, mesh, settings, DTYPE_BYTES[dtype], max_model_len) if replays else 0)


def _draft_of(settings: EngineSettings, mesh: Mesh) -> ArchSpec | HeadSpec | None:
    """Returns the draft model of the rank at `mesh`; None where it runs none."""
    return draft_spec(settings) if drafts_here(mesh) else None


def _row_bytes(settings: EngineSettings, max_model_len: int) -> int:
    """Bytes of the rows' block tables and tokens on a device with memory of its own."""
    blocks = -(-max_model_len // settings.cache.block_size)
    return 4 * settings.scheduler.max_num_seqs * (blocks + max_model_len)


def layouts(spec: ArchSpec, num_ranks: int, *, expert_parallel: bool = False) -> list[tuple[int, int]]:
    """All (tp, pp) with tp * pp == num_ranks that divide the model, the largest tp first."""
    found = []
    for tp_size in range(num_ranks, 0, -1):
        if num_ranks % tp_size:
            continue
        try:
            spec.check_parallel(tp_size, num_ranks // tp_size, expert_parallel=expert_parallel)
        except SettingsError:
            continue
        found.append((tp_size, num_ranks // tp_size))
    return found


def best_of(plans: list[GroupPlan]) -> GroupPlan | None:
    """Chooses among the plans that fit; None when there is none. Plans without streamed layers come first, then those
    with tensor parallelism within a node and few stages (a token passes through all in turn), then the most KV."""
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
    """Plans one rank of the stage at `mesh`. On CPU, _share_machine sets the KV budget later."""
    element, scheduler = DTYPE_BYTES[dtype], settings.scheduler
    packs = dtype in PLATFORM_FACTS[memory.device].packs
    weights = rank_weights(spec, mesh, element, packs)
    save, budget = int(settings.device.cpu_offload_gib * GIB), 0
    if not memory.is_shared:
        budget = int(settings.cache.gpu_memory_utilization * memory.device_bytes)
        needed = weights.total_bytes + least_bytes(settings, spec, mesh, dtype, kv_dtype, max_model_len)
        save = bytes_to_save(needed, budget, save)
    placement = place_layers(weights.num_layers, weights.layer_bytes, save, weights.may_stream)
    tokens, seqs = scheduler.max_num_batched_tokens, settings.most_samples
    activations = activation_bytes(spec, mesh, tokens, seqs, element)
    activations += tap_bytes(draft_spec(settings), spec, mesh, tokens, element)
    room = adapter_room(settings.lora, spec, mesh, element)
    graphs = 0
    if not memory.is_shared:
        activations += ATTENTION_BYTES + _row_bytes(settings, max_model_len)
        graphs = _graph_bytes(settings, spec, mesh, dtype, kv_dtype, max_model_len, replays=not placement.streamed)
    draft, windows = _draft_of(settings, mesh), kv_groups(settings, spec, max_model_len).windows
    of_draft = draft_bytes(draft, spec, mesh, element, packs)
    held = weights.fixed_bytes + placement.device_bytes + of_draft + activations + room.device_bytes + graphs
    token_bytes = kv_token_bytes(spec, mesh, kv_dtype, windows, draft)
    return StagePlan(
        stage=mesh.pp_rank,
        weights=weights,
        placement=placement,
        activation_bytes=activations,
        kv_token_bytes=token_bytes,
        kv_layers_bytes=kv_token_bytes(spec, mesh, kv_dtype, draft=draft),
        kv_budget_bytes=budget - held,
        adapter_bytes=adapter_bytes(spec, mesh, settings.lora.max_lora_rank, element),
        adapter_room=room,
        graph_bytes=graphs,
        draft_bytes=of_draft,
        draft_token_bytes=token_bytes - kv_token_bytes(spec, mesh, kv_dtype, windows),
    )


def _share_machine(
    settings: EngineSettings, stages: tuple[StagePlan, ...], memory: Memory, tp_size: int, context_blocks: int
) -> tuple[StagePlan, ...]:
    """Sets the KV budgets of CPU ranks: equal parts of the memory that weights leave. Where no flag sizes the cache, of
    40 % of it, and at most the KV of max_num_seqs contexts, of context_blocks each."""
    left = memory.device_bytes - _machine_weights(stages, tp_size)
    cache, ranks = settings.cache, tp_size * len(stages)
    blocks = settings.scheduler.max_num_seqs * context_blocks

    def budget(stage: StagePlan) -> int:
        if cache.num_blocks is not None or cache.kv_cache_memory_bytes is not None:
            return left // ranks
        return min(int(CPU_SHARE * left) // ranks, blocks * cache.block_size * stage.kv_token_bytes)

    return tuple(replace(stage, kv_budget_bytes=budget(stage)) for stage in stages)


def _machine_weights(stages: tuple[StagePlan, ...], tp_size: int) -> int:
    """Bytes of the weights, buffers and adapter pages of all CPU ranks."""
    of_drafts = sum(stage.draft_bytes for stage in stages)
    return of_drafts + tp_size * sum(
        stage.weights.total_bytes + stage.placement.buffer_bytes + stage.adapter_room.device_bytes for stage in stages
    )


def _blocks(settings: EngineSettings, stages: tuple[StagePlan, ...]) -> int:
    """The number of KV blocks that every rank can hold."""
    cache = settings.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    return min(
        max(0, min(stage.kv_budget_bytes, cache.kv_cache_memory_bytes or stage.kv_budget_bytes))
        // (stage.kv_token_bytes * cache.block_size)
        for stage in stages
    )


def _kept_whole(settings: EngineSettings, stages: tuple[StagePlan, ...]) -> int:
    """The KV tokens of the device's blocks, if their bytes held every token in all layers."""
    size, blocks = settings.cache.block_size, _blocks(settings, stages)
    return min(blocks * stage.kv_token_bytes // stage.kv_layers_bytes for stage in stages) * size


def _tiers(
    settings: EngineSettings,
    stages: tuple[StagePlan, ...],
    memory: Memory,
    tp_size: int,
    max_model_len: int,
    groups: KVGroups,
) -> tuple[TierPlan, ...]:
    """The tiers device, host and disk, with the KV of all ranks of the group."""
    size = settings.cache.block_size
    ranks = [stage.kv_token_bytes - stage.draft_token_bytes * (rank > 0) for stage in stages for rank in range(tp_size)]
    block_bytes = size * sum(ranks)
    file_size = sum(file_bytes(each * size) for each in ranks)
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
    full, short = (groups.held(tokens) for tokens in (max_model_len, min(CONVERSATION_TOKENS, max_model_len)))
    return tuple(
        TierPlan(t, sizes[t], groups.tokens_held(count, max_model_len), count // full, count // short)
        for t, count in blocks.items()
    )


def _problems(
    settings: EngineSettings, stages: tuple[StagePlan, ...], memory: Memory, max_model_len: int, groups: KVGroups
) -> list[Problem]:
    """Problems on the device: weights first, then the KV of the flags, then one context. At most one is reported."""
    cache = settings.cache
    fullest = min(stages, key=lambda stage: stage.kv_budget_bytes / stage.kv_token_bytes)
    tokens = groups.longest(_blocks(settings, stages))
    found = []
    if fullest.kv_budget_bytes < 0:
        found.append(_no_room_for_weights(settings, fullest, memory))
    elif cache.num_blocks is not None and cache.num_blocks < groups.count:
        message = f"{cache.num_blocks} hold no token: each of the model's {groups.count} groups of layers has its own"
        found.append(Problem("--num-gpu-blocks-override", message))
    elif (asked := _asked_kv(settings, fullest)) and asked[1] > fullest.kv_budget_bytes:
        left = gib(fullest.kv_budget_bytes)
        found.append(
            Problem(asked[0], f"{gib(asked[1])} of KV on a rank of stage {fullest.stage}, {left} are left for it")
        )
    elif tokens < max_model_len and cache.num_blocks is None:
        message = f"one context of {max_model_len} tokens needs more KV than fits; --max-model-len {tokens} would do"
        found.append(Problem("--max-model-len", message))
    return found


def _host_problems(
    stages: tuple[StagePlan, ...], memory: Memory, tp_size: int, pool_bytes: int, offload_bytes: int
) -> list[Problem]:
    """Problems in host memory, which streamed weights, the host tier and adapter copies share. On CPU they share it
    with the ranks' device memory. offload_bytes: --cpu-offload-gb."""
    kept, tier = tp_size * sum(stage.placement.host_bytes for stage in stages), memory.host_tier_bytes
    if memory.is_shared and memory.host_bytes is None and offload_bytes > memory.device_bytes:
        message = f"{gib(offload_bytes)} of weights in a machine with {gib(memory.device_bytes)}"
        return [Problem("--cpu-offload-gb", message)]
    copies = tp_size * sum(stage.adapter_room.host_bytes for stage in stages)
    if memory.is_shared:
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
    """The flag that sizes the KV pool, and its bytes on a rank of the stage. None when no flag does."""
    cache = settings.cache
    if cache.num_blocks is not None:
        return "--num-gpu-blocks-override", cache.num_blocks * cache.block_size * stage.kv_token_bytes
    if cache.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes", cache.kv_cache_memory_bytes
    return None


def _no_room_for_weights(settings: EngineSettings, stage: StagePlan, memory: Memory) -> Problem:
    """The problem of a rank that has no memory left for KV."""
    if memory.is_shared:
        return Problem("MODEL", f"its weights leave nothing of the machine's {gib(memory.device_bytes)} for KV")
    streamed = len(stage.placement.streamed)
    return Problem(
        "--tensor-parallel-size",
        f"a rank of stage {stage.stage} lacks {gib(-stage.kv_budget_bytes)}: {gib(stage.device_weight_bytes)} of "
        f"weights and {gib(stage.activation_bytes + stage.graph_bytes)} of activations for "
        f"{settings.cache.gpu_memory_utilization:g} of "
        f"{gib(memory.device_bytes)}, with {streamed} of {stage.placement.num_layers} layers in host memory",
    )


def gib(size: int) -> str:
    """Formats bytes: 1.2 GiB, 310 MiB, 12 KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 2**10:.3g} KiB"
