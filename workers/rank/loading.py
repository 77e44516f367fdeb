"""Loading: from settings to a rank that can run plans: dtype, weights, number of blocks, runner.

Called by rank_server.py, after torch.distributed is up. Errors that a user can mend are SettingsErrors that name the
flag. The choices are logged.
"""

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem.configs.errors import SettingsError
from tandem.configs.platform_facts import check_formats
from tandem.configs.schema import Device, EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.offload.weights.layer_placement import LayerPlacement
from tandem.parallel.checkpoint import OnBytes
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import TorchCollectives
from tandem.workers.messages.handshake import RankLoaded, RankTiers
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.kv_layout import described
from tandem.workers.planning.budget import KVNeeds, available_bytes, cpu_blocks, cuda_blocks
from tandem.workers.planning.placing import place_weights
from tandem.workers.planning.resolve import (
    check_weights,
    kv_groups,
    read_spec,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.drafters.draft_rank import LoadedDraft, load_draft, make_of
from tandem.workers.rank.kv_cache import KVCache, block_bytes
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.start.captures import sizes_of
from tandem.workers.rank.transfers.grammar_lanes import open_grammar_lanes
from tandem.workers.rank.transfers.lanes import Lanes
from tandem.workers.speculation.proposers import make_guess
from tandem.workers.structured.grammar_store import GrammarStore, TokenizerUnusable
from tandem.workers.text.generation_config import generation_of
from tandem.workers.tuning.tuned_start import TunedModel, start_tiles

if TYPE_CHECKING:
    from tandem.workers.lora.device.rank_adapters import RankAdapters

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank with its weights in memory and no KV yet; `facts` go to the coordinator."""

    settings: EngineSettings
    context: ParallelContext
    spec: ArchSpec
    decoder: Decoder
    platform: Platform
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    facts: RankLoaded
    adapters: "RankAdapters | None"
    grammars: GrammarStore | None
    draft: LoadedDraft | None = None

    def build_runner(self, num_blocks: int) -> ModelRunner:
        """Allocates num_blocks of KV, runs a first small forward and makes the captures, in step with all other
        ranks."""
        block_size = self.settings.cache.block_size
        decoder = self.decoder
        of_draft = () if self.draft is None else self.draft.layouts
        kv = KVCache.allocate(decoder.kv_layouts, num_blocks, block_size, self.kv_dtype, self.platform, of_draft)
        capacity = self.settings.scheduler.max_num_seqs
        windows = kv_groups(self.settings, self.spec, self.max_model_len).windows
        table = RowTable(capacity, self.max_model_len, block_size, self.spec.vocab_size, self.grammars, windows)
        context = self.context
        link = None
        if context.pp_size > 1:
            from tandem.parallel.pipeline import StageLink

            counts = len(decoder.taps.passed), len(decoder.taps.heard)
            link = StageLink(context, self.spec.hidden_size, self.dtype, self.platform.device, *counts)
        proposer = make_of(self.settings, context, self.platform, self.draft, kv, table)
        guess = make_guess(self.settings.speculative) if context.pp_size == 1 else None
        runner = ModelRunner(
            decoder, context, kv, table, self.platform, link, proposer, guess, self.settings.scored_rows
        )
        runner.draft = self.draft
        _warm_up(runner, self.max_model_len, block_size, len(windows), relays=context.pp_size > 1)
        sizes = sizes_of(decoder, kv.tensors, self.settings, self.max_model_len)
        runner.make_captures(sizes, self.settings.max_drafts)
        for loads_E in decoder.expert_loads.values():
            loads_E.zero_()
        self.platform.ready()
        return runner

    def open_kv_lanes(self, runner: ModelRunner, tiers: RankTiers, lanes: Lanes) -> bool:
        """Opens the lanes between the tiers; the runner's steps wait for their loads from now on. Returns
        RankReady.has_earlier. OSError or HostTierError when there is no memory."""
        from tandem.workers.rank.transfers.kv_lanes import open_kv_lanes

        kv = runner.kv
        runner.gate, has_earlier = open_kv_lanes(lanes, self.facts.rank, kv.layers, kv.drafted, tiers, self.platform)
        return has_earlier

    def open_adapter_lanes(self, lanes: Lanes) -> None:
        """Opens the lanes that move adapters; none without --enable-lora."""
        if self.adapters is not None:
            from tandem.workers.rank.transfers.adapter_lanes import open_adapter_lanes

            open_adapter_lanes(lanes, self.adapters)

    def open_grammar_lanes(self, lanes: Lanes, *, now: bool) -> None:
        """Opens the lanes that compile grammars. now: reads the tokenizer now, not for the first grammar: no thread of
        the process runs meanwhile, for seconds."""
        if now and self.grammars is not None:
            try:
                self.grammars.open()
            except TokenizerUnusable as problem:  # each request for structured output is told
                log.warning("%s", problem)
        open_grammar_lanes(lanes, self.grammars, self.platform.accelerator)


def load_rank(
    settings: EngineSettings,
    context: ParallelContext,
    platform: Platform,
    *,
    rank: int,
    ranks_on_node: int,
    on_bytes: OnBytes | None = None,
) -> LoadedRank:
    """Reads this rank's shard and finds how many KV blocks it can hold. The calling thread is the platform's. on_bytes:
    called after each parameter read."""
    started_s = time.perf_counter()
    chosen = _choose(settings, context, platform, ranks_on_node)
    spec, dtype, max_model_len = chosen.spec, chosen.dtype, chosen.max_model_len
    tuning = _tune(chosen)
    memory, packs = platform.memory(), platform.packs(dtype)
    placement = place_weights(settings, spec, context, memory, packs, dtype, max_model_len, ranks_on_node)
    decoder = _build(chosen, placement, on_bytes)
    decoder.graphs.can_replay &= not settings.model.enforce_eager
    try:
        for line in platform.settle():
            log.info("%s", line)
        adapters = _open_adapters(chosen, decoder)
        draft = load_draft(settings, context, platform, dtype, chosen.kv_dtype, chosen.groups.windows, decoder)
        facts = _facts(chosen, rank, decoder, placement, adapters, tuning, started_s, draft)
    except BaseException:
        decoder.close()
        raise
    log.info("rank %d loaded %s: %s, context %d", rank, settings.model.model, facts, max_model_len)
    return LoadedRank(
        settings,
        context,
        spec,
        decoder,
        platform,
        dtype,
        chosen.kv_dtype,
        max_model_len,
        facts,
        adapters,
        _grammar_store(settings, spec) if context.is_last_stage and context.tp_rank == 0 else None,
        draft,
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Choices for a rank before its weights are read. kv_name: kv_dtype in the flag's spelling."""

    settings: EngineSettings
    spec: ArchSpec
    context: ParallelContext
    platform: Platform
    dtype: torch.dtype
    kv_name: str
    kv_dtype: torch.dtype
    max_model_len: int
    ranks_on_node: int
    groups: KVGroups


def _choose(settings: EngineSettings, context: ParallelContext, platform: Platform, ranks_on_node: int) -> _Chosen:
    spec = read_spec(settings)
    check_formats(settings, platform.name)
    check_weights(spec, platform.name)
    if settings.model.batch_invariant:
        _check_batch_invariant(settings, spec, context, platform)
    max_model_len = resolve_max_model_len(settings, spec)
    dtype = choose_dtype(settings, spec, platform.name)
    kv_name = resolve_kv_dtype(settings, _name(dtype))
    kv_dtype: torch.dtype = torch.float8_e4m3fn if kv_name == "fp8_e4m3" else getattr(torch, kv_name)
    groups = kv_groups(settings, spec, max_model_len)
    return _Chosen(settings, spec, context, platform, dtype, kv_name, kv_dtype, max_model_len, ranks_on_node, groups)


def _tune(chosen: _Chosen) -> tuple[str, ...]:
    """Gives the platform the tiles that the group computes with, in step with all its ranks; returns a line where some
    were measured."""
    platform, settings = chosen.platform, chosen.settings
    if not platform.tunes or not settings.device.tune or settings.model.batch_invariant:  # other groups may differ
        return ()
    platform.tiles, line = start_tiles(platform.tuner(), _tuned(chosen), chosen.context, platform.device)
    return () if line is None else (line,)


def model_to_tune(settings: EngineSettings, context: ParallelContext, platform: Platform) -> TunedModel:
    """Returns what a rank would compute with these settings. SettingsError."""
    return _tuned(_choose(settings, context, platform, ranks_on_node=1))


def _tuned(chosen: _Chosen) -> TunedModel:
    mesh, block_size = chosen.context.mesh, chosen.settings.cache.block_size
    return TunedModel(chosen.spec, mesh, chosen.dtype, chosen.kv_dtype, block_size)


def _check_batch_invariant(
    settings: EngineSettings, spec: ArchSpec, context: ParallelContext, platform: Platform
) -> None:
    from tandem.workers.planning.invariance import check_batch_invariant

    check_batch_invariant(settings, spec, platform.name)
    if isinstance(context.tp.group, TorchCollectives):
        raise SettingsError(
            "the ranks of a stage share no memory, so that sums have no fixed order", "--batch-invariant"
        )


def _facts(
    chosen: _Chosen,
    rank: int,
    decoder: Decoder,
    placement: LayerPlacement,
    adapters: "RankAdapters | None",
    tuning: tuple[str, ...],
    started_s: float,
    draft: LoadedDraft | None,
) -> RankLoaded:
    """Returns the facts for the coordinator, once all but KV is in memory. tuning: lines about it. started_s: when
    reading began."""
    size, layouts = chosen.settings.cache.block_size, (*decoder.kv_layouts, *(() if draft is None else draft.layouts))
    needs = KVNeeds(
        block_bytes=block_bytes(layouts, size, chosen.kv_dtype),
        block_size=size,
        max_model_len=chosen.max_model_len,
        max_num_seqs=chosen.settings.scheduler.max_num_seqs,
        groups=chosen.groups,
    )
    return RankLoaded(
        rank=rank,
        num_blocks=_count_blocks(chosen, decoder, needs, 0 if adapters is None else adapters.nbytes),
        weight_bytes=decoder.weight_bytes + (0 if draft is None else draft.weight_bytes),
        block_bytes=needs.block_bytes,
        kv_layout=described(layouts),
        num_kv_groups=chosen.groups.count,
        device=str(chosen.platform.device),
        dtype=_name(chosen.dtype),
        threads=torch.get_num_threads(),
        load_s=time.perf_counter() - started_s,
        is_in_host_memory=chosen.platform.memory() is None,
        free_host_bytes=available_bytes(),
        kv_dtype=chosen.kv_name,
        resident_layers=placement.num_resident,
        streamed_layers=len(placement.streamed),
        host_weight_bytes=decoder.stream.host_bytes,
        buffer_bytes=decoder.stream.buffer_bytes,
        adapter_pages=0 if adapters is None else adapters.num_pages,
        adapter_page_bytes=0 if adapters is None else adapters.slab.page_bytes,
        kernel_notes=(*tuning, *chosen.platform.kernel_notes(chosen.dtype, chosen.spec.weights)),
    )


def _grammar_store(settings: EngineSettings, spec: ArchSpec) -> GrammarStore:
    """The grammars of the rank that samples; it reads the tokenizer later."""
    folder = Path(settings.model.tokenizer or settings.model.model)
    ends = generation_of(settings.model).eos_token_ids
    return GrammarStore(folder, spec.vocab_size, spec.eos_token_ids if ends is None else ends)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_dtype(settings: EngineSettings, spec: ArchSpec, device: Device) -> torch.dtype:
    """The dtype of weights and activations; logs a change from the checkpoint's."""
    name = resolve_dtype(settings, spec, device)
    if settings.model.dtype == "auto" and spec.torch_dtype not in (None, name):
        log.info("%s checkpoint on CPU: running in %s (--dtype to keep it)", spec.torch_dtype, name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _build(chosen: _Chosen, placement: LayerPlacement, on_bytes: OnBytes | None) -> Decoder:
    model = chosen.settings.model
    try:
        return build_decoder(
            chosen.spec,
            chosen.context,
            folder=Path(model.model),
            progress=sys.stderr.isatty(),
            on_bytes=on_bytes,
            dtype=chosen.dtype,
            platform=chosen.platform,
            kv_dtype=chosen.kv_dtype,
            load_format=model.load_format,
            seed=model.seed or 0,
            streamed=placement.streamed,
            windows=chosen.groups.windows,
            overrides=model.hf_overrides,
        )
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"the weights do not fit on {chosen.platform.device}: {error}", "--tensor-parallel-size"
        ) from error


def _open_adapters(chosen: _Chosen, decoder: Decoder) -> "RankAdapters | None":
    """None without --enable-lora."""
    settings, platform = chosen.settings, chosen.platform
    if not settings.lora.enable_lora:
        return None
    from tandem.workers.lora.device.rank_adapters import open_adapters

    available = available_bytes() // chosen.ranks_on_node if platform.memory() is None else None
    pp_size = settings.parallel.pipeline_parallel_size
    folder = None if settings.model.load_format == "dummy" else Path(settings.model.model)
    return open_adapters(
        settings.lora, chosen.spec, folder, decoder, platform, chosen.dtype, available_bytes=available, pp_size=pp_size
    )


def _count_blocks(chosen: _Chosen, decoder: Decoder, needs: KVNeeds, adapter_bytes: int) -> int:
    """On a device with memory of its own after profiling steps: what they reserved stays with torch's allocator and
    counts as used. Steps are captured behind this, so what that takes is counted (graph_room.py). adapter_bytes: of
    each rank's slab, which in host memory takes memory only as it fills."""
    cache, platform = chosen.settings.cache, chosen.platform
    if platform.memory() is None:
        free_bytes = max(0, available_bytes() - chosen.ranks_on_node * adapter_bytes)
        return cpu_blocks(cache, needs, free_bytes, chosen.ranks_on_node)
    from tandem.workers.planning.graph_room import graph_bytes
    from tandem.workers.rank.profiling import run_fullest_steps

    open_links(chosen.context, platform.device)
    profiled_kv_bytes = run_fullest_steps(
        decoder,
        chosen.context,
        chosen.settings,
        platform,
        hidden_size=chosen.spec.hidden_size,
        vocab_size=chosen.spec.vocab_size,
        max_model_len=needs.max_model_len,
        dtype=chosen.dtype,
        kv_dtype=chosen.kv_dtype,
        windows=chosen.groups.windows,
    )
    memory = platform.memory()
    assert memory is not None, "it has memory of its own"
    free_bytes, total_bytes = memory
    free_bytes += profiled_kv_bytes
    free_bytes -= platform.scratch_blocks * needs.block_bytes
    if decoder.graphs.can_replay:
        mesh, size = chosen.context.mesh, chosen.dtype.itemsize
        free_bytes -= graph_bytes(chosen.spec, mesh, chosen.settings, size, needs.max_model_len)
    return cuda_blocks(cache, needs, total_bytes, free_bytes, total_bytes - free_bytes)


def open_links(context: ParallelContext, device: torch.device) -> None:
    """Passes an element from stage to stage: NCCL gives two ranks memory of their own when they first exchange, which
    must count as used."""
    one = torch.zeros(1, device=device)
    if not context.is_first_stage:
        context.world.recv(one, context.rank - context.tp_size)
    if context.pp_rank < context.pp_size - 1:
        context.world.isend(one, context.rank + context.tp_size).wait()


def _warm_up(runner: ModelRunner, max_model_len: int, block_size: int, num_groups: int, *, relays: bool) -> None:
    """Runs a prefill chunk and, if a block has room, a decode: kernels, buffers and links exist before requests.
    SettingsError when the device has no memory left for them."""
    num_tokens = max(1, min(WARM_UP_TOKENS, block_size - 1, max_model_len - 1))
    greedy = RowSampling(temperature=0.0)
    init = RowInit(row=0, token_ids=[0] * num_tokens, prompt_len=num_tokens, num_computed=0, sampling=greedy)
    first = RowWork(row=0, num_tokens=num_tokens, samples=True, new_block_ids=list(range(num_groups)))
    plans = [StepPlan(step_id=0, work=[first], new_rows=[init])]
    if num_tokens < min(block_size, max_model_len):
        second = RowWork(row=0, num_tokens=1, samples=True, token_ids=[0] if relays else [])
        plans.append(StepPlan(step_id=0, work=[second]))
    for plan in (*plans, StepPlan(step_id=0, work=[], freed_rows=[0])):
        result = runner.launch(plan).result()
        if result is not None and result.failure is not None:
            raise SettingsError(f"the first step did not run: {result.failure}", "--gpu-memory-utilization")
