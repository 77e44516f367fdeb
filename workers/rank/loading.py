"""From settings to a rank that can run plans: device, threads, dtype, weights, number of blocks, runner.

Called by rank_worker.py (after torch.distributed is up) and inprocess_executor.py. What a user can mend is a
SettingsError that names the flag. Logs what was chosen and why.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.errors import SettingsError
from configs.schema import EngineSettings
from offload.placement import LayerPlacement
from offload.weight_copiers import make_copier
from parallel.checkpoint import OnBytes
from parallel.context import ParallelContext
from parallel.pipeline import StageLink
from workers.attention.select import select_attention
from workers.channel import MoverKind
from workers.lora.memory import RankAdapters, open_adapters
from workers.messages import RankLoaded, RankTiers, RowInit, RowSampling, RowWork, StepPlan
from workers.models.decoder import Decoder, build_decoder
from workers.models.spec import ArchSpec
from workers.rank.kv_mover import MoverThread, open_movers
from workers.rank.kv_tensors import KVCache, block_bytes
from workers.rank.memory import KVNeeds, available_bytes, available_cores, cpu_blocks, cuda_blocks
from workers.rank.model_runner import ModelRunner
from workers.rank.mover_inbox import Inbox
from workers.rank.placing import place_weights
from workers.rank.profiling import run_fullest_step
from workers.rank.row_table import RowTable
from workers.resolve import read_spec, resolve_dtype, resolve_kv_dtype, resolve_max_model_len

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank with its weights in memory and no KV yet; `facts` is what the coordinator hears."""

    settings: EngineSettings
    context: ParallelContext
    spec: ArchSpec
    decoder: Decoder
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    facts: RankLoaded
    adapters: RankAdapters | None
    copies_beside: bool

    def build_runner(self, num_blocks: int) -> ModelRunner:
        """Allocates num_blocks of KV and runs a first small forward, in step with all other ranks."""
        block_size = self.settings.cache.block_size
        decoder = self.decoder
        kv = KVCache.allocate(
            decoder.num_local_layers,
            num_blocks,
            block_size,
            decoder.num_local_kv_heads,
            decoder.head_dim,
            self.kv_dtype,
            self.device,
        )
        capacity = self.settings.scheduler.max_num_seqs
        table = RowTable(capacity, self.max_model_len, block_size, self.spec.vocab_size)
        context = self.context
        link = None
        if context.pp_size > 1:
            link = StageLink(context, self.spec.hidden_size, self.dtype, self.device)
        runner = ModelRunner(decoder, context, kv, table, self.device, link)
        _warm_up(runner, self.max_model_len, block_size, relays=context.pp_size > 1)
        return runner

    def open_movers(
        self, runner: ModelRunner, tiers: RankTiers, inbox: Callable[[MoverKind], Inbox]
    ) -> list[MoverThread]:
        """The rank's copies between tiers, ready to start; the runner's steps wait for their loads from now on. OSError
        or HostTierError when there is no memory."""
        layers = self.decoder.num_local_layers
        runner.gate, movers = open_movers(self.facts.rank, runner.kv.planes, layers, tiers, inbox, self.copies_beside)
        return movers

    def open_adapter_movers(self, inbox: Callable[[MoverKind], Inbox]) -> list[MoverThread]:
        """What moves adapters, ready to start; nothing without --enable-lora."""
        return [] if self.adapters is None else self.adapters.movers(self.facts.rank, inbox)


def load_single(settings: EngineSettings) -> LoadedRank:
    """The only rank of a group, in this process."""
    device = choose_device(settings, rank=0)
    set_threads(settings, device, ranks_on_node=1)
    return load_rank(settings, ParallelContext.single(), device, rank=0, ranks_on_node=1)


def load_rank(
    settings: EngineSettings,
    context: ParallelContext,
    device: torch.device,
    *,
    rank: int,
    ranks_on_node: int,
    on_bytes: OnBytes | None = None,
) -> LoadedRank:
    """Reads this rank's shard and finds how many KV blocks it can hold. on_bytes: told of each parameter read."""
    started_s = time.perf_counter()
    chosen = _choose(settings, context, device, ranks_on_node)
    spec, dtype, max_model_len = chosen.spec, chosen.dtype, chosen.max_model_len
    placement = place_weights(settings, spec, context, device, dtype, max_model_len, ranks_on_node)
    beside = copies_beside(device, ranks_on_node)
    decoder = _build(chosen, placement, beside, on_bytes)
    adapters = _open_adapters(chosen, decoder)
    facts = _facts(chosen, rank, decoder, placement, adapters, started_s)
    log.info("rank %d loaded %s: %s, context %d", rank, settings.model.model, facts, max_model_len)
    return LoadedRank(
        settings, context, spec, decoder, device, dtype, chosen.kv_dtype, max_model_len, facts, adapters, beside
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is known of a rank before its weights are read. kv_name: as the flag spells kv_dtype."""

    settings: EngineSettings
    spec: ArchSpec
    context: ParallelContext
    device: torch.device
    dtype: torch.dtype
    kv_name: str
    kv_dtype: torch.dtype
    max_model_len: int
    ranks_on_node: int


def _choose(settings: EngineSettings, context: ParallelContext, device: torch.device, ranks_on_node: int) -> _Chosen:
    spec = read_spec(settings)
    max_model_len = resolve_max_model_len(settings, spec)
    dtype = choose_dtype(settings, spec, device)
    kv_name = resolve_kv_dtype(settings, _name(dtype))
    kv_dtype: torch.dtype = torch.float8_e4m3fn if kv_name == "fp8_e4m3" else getattr(torch, kv_name)
    return _Chosen(settings, spec, context, device, dtype, kv_name, kv_dtype, max_model_len, ranks_on_node)


def _facts(
    chosen: _Chosen,
    rank: int,
    decoder: Decoder,
    placement: LayerPlacement,
    adapters: RankAdapters | None,
    started_s: float,
) -> RankLoaded:
    """What the coordinator hears, once everything but KV is in memory; started_s: when reading began."""
    size, heads = chosen.settings.cache.block_size, decoder.num_local_kv_heads
    needs = KVNeeds(
        block_bytes=block_bytes(decoder.num_local_layers, size, heads, decoder.head_dim, chosen.kv_dtype),
        block_size=size,
        max_model_len=chosen.max_model_len,
        max_num_seqs=chosen.settings.scheduler.max_num_seqs,
    )
    return RankLoaded(
        rank=rank,
        num_blocks=_count_blocks(chosen, decoder, needs, 0 if adapters is None else adapters.nbytes),
        weight_bytes=decoder.weight_bytes,
        block_bytes=needs.block_bytes,
        device=str(chosen.device),
        dtype=_name(chosen.dtype),
        threads=torch.get_num_threads(),
        load_s=time.perf_counter() - started_s,
        kv_dtype=chosen.kv_name,
        resident_layers=placement.num_resident,
        streamed_layers=len(placement.streamed),
        host_weight_bytes=decoder.stream.host_bytes,
        buffer_bytes=decoder.stream.buffer_bytes,
        adapter_pages=0 if adapters is None else adapters.num_pages,
        adapter_page_bytes=0 if adapters is None else adapters.slab.page_bytes,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_device(settings: EngineSettings, rank: int) -> torch.device:
    """As asked; else cuda when torch sees one. Ranks of one node spread over its devices by their number."""
    available = torch.cuda.is_available()
    if settings.device.device == "cuda" and not available:
        raise SettingsError("--device cuda, but torch sees no CUDA device here", "--device")
    if settings.device.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def set_threads(settings: EngineSettings, device: torch.device, ranks_on_node: int) -> None:
    """This process's torch threads. Never from OMP_NUM_THREADS: Ray sets it to 1, shells to anything.

    ranks_on_node counts the ranks of all groups that the node may ever hold, as many as autoscaling may start: a rank
    with threads to spare costs little, ranks with more threads than cores are slower by an order of magnitude.
    """
    if device.type == "cpu":
        torch.set_num_threads(settings.device.cpu_threads or max(1, available_cores() // ranks_on_node))
    else:
        torch.set_num_threads(1)


def copies_beside(device: torch.device, ranks_on_node: int) -> bool:
    """Whether bytes can move while a rank computes without taking from it: there is a copy engine, or a core that no
    rank of the node computes on. After the threads of torch were set."""
    return device.type != "cpu" or torch.get_num_threads() * ranks_on_node < available_cores()


def choose_dtype(settings: EngineSettings, spec: ArchSpec, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; says so when it is not the checkpoint's."""
    name = resolve_dtype(settings, spec, device.type)
    if settings.model.dtype == "auto" and spec.torch_dtype not in (None, name):
        log.info("%s checkpoint on CPU: running in %s (--dtype to keep it)", spec.torch_dtype, name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _build(chosen: _Chosen, placement: LayerPlacement, beside: bool, on_bytes: OnBytes | None) -> Decoder:
    model, spec, device = chosen.settings.model, chosen.spec, chosen.device
    try:
        return build_decoder(
            spec,
            chosen.context,
            folder=Path(model.model),
            progress=sys.stderr.isatty(),
            on_bytes=on_bytes,
            dtype=chosen.dtype,
            device=device,
            attention=select_attention(device, chosen.dtype, spec.head_dim, chosen.kv_dtype),
            load_format=model.load_format,
            seed=model.seed,
            streamed=placement.streamed,
            copier=make_copier(device, beside),
        )
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"the weights do not fit on {device}: {error}", "--tensor-parallel-size") from error


def _open_adapters(chosen: _Chosen, decoder: Decoder) -> RankAdapters | None:
    """None without --enable-lora."""
    settings, device = chosen.settings, chosen.device
    if not settings.lora.enable_lora:
        return None
    available = available_bytes() // chosen.ranks_on_node if device.type == "cpu" else None
    pp_size = settings.parallel.pipeline_parallel_size
    folder = None if settings.model.load_format == "dummy" else Path(settings.model.model)
    return open_adapters(
        settings.lora, chosen.spec, folder, decoder, device, chosen.dtype, available_bytes=available, pp_size=pp_size
    )


def _count_blocks(chosen: _Chosen, decoder: Decoder, needs: KVNeeds, adapter_bytes: int) -> int:
    """On CUDA after a profiling step: what it reserved stays with torch's allocator and counts as used. adapter_bytes:
    of each rank's slab, which on CPU takes memory only as it fills."""
    cache, device = chosen.settings.cache, chosen.device
    if device.type == "cpu":
        free_bytes = max(0, available_bytes() - chosen.ranks_on_node * adapter_bytes)
        return cpu_blocks(cache, needs, free_bytes, chosen.ranks_on_node)
    profiled_kv_bytes = run_fullest_step(
        decoder,
        chosen.context,
        chosen.settings,
        hidden_size=chosen.spec.hidden_size,
        vocab_size=chosen.spec.vocab_size,
        max_model_len=needs.max_model_len,
        dtype=chosen.dtype,
        kv_dtype=chosen.kv_dtype,
        device=device,
    )
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    free_bytes += profiled_kv_bytes
    return cuda_blocks(cache, needs, total_bytes, free_bytes, total_bytes - free_bytes)


def _warm_up(runner: ModelRunner, max_model_len: int, block_size: int, *, relays: bool) -> None:
    """A chunk and, where a block has room for it, a decode token: kernels, buffers and links exist before requests."""
    num_tokens = max(1, min(WARM_UP_TOKENS, block_size - 1, max_model_len - 1))
    greedy = RowSampling(temperature=0.0)
    init = RowInit(row=0, token_ids=[0] * num_tokens, prompt_len=num_tokens, num_computed=0, sampling=greedy)
    first = RowWork(row=0, num_tokens=num_tokens, samples=True, new_block_ids=[0])
    runner.execute(StepPlan(step_id=0, work=[first], new_rows=[init]))
    if num_tokens < min(block_size, max_model_len):
        second = RowWork(row=0, num_tokens=1, samples=True, token_ids=[0] if relays else [])
        runner.execute(StepPlan(step_id=0, work=[second]))
    runner.execute(StepPlan(step_id=0, work=[], freed_rows=[0]))
