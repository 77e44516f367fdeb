"""Checks of whole steps and of copies: captured steps of the demo model, KV through a host slab, and speeds."""

import ctypes
import time
from collections.abc import Callable
from functools import partial

import torch

from tandem.configs.bundled import DEMO_MODEL
from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.copies.kv_copies import bytes_per_slot
from tandem.parallel.context import ParallelContext
from tandem.workers.kernels.cpu.cpu_build import obstacle
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import KVLayout
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.batch import build_batch
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.row_table import RowTable
from tandem.workers.self_checks.outcome import Check, NotHere, require

BF16 = torch.bfloat16
ROWS, PROMPT, STEPS, BLOCK, BLOCKS_PER_ROW = 3, 9, 8, 16, 2
COPY_BYTES, SQUARE = 64 * 2**20, 1024


def step_checks() -> list[Check]:
    return [
        Check("replayed steps", _replayed_steps),
        Check("KV store and load", lambda: kv_round_trip(CpuPlatform())),
    ]


def speed_checks() -> list[Check]:
    """Returns the measurements, which fail only where the work itself does."""
    return [Check("copy bandwidth", _copy_bandwidth), Check("GEMM rate", _gemm_rate)]


@torch.inference_mode()
def _replayed_steps() -> str:
    spec, platform = load_spec(DEMO_MODEL), CpuPlatform()
    decoder = build_decoder(spec, ParallelContext.single(), folder=DEMO_MODEL, dtype=BF16, platform=platform)
    try:
        replayed = _logits(decoder, platform, spec.num_layers, spec.vocab_size)
        if not decoder.graphs.num_replays:
            reason = obstacle(BF16) or "an operation of a decode step has no kernel on this CPU"
            raise NotHere(f"{reason}; steps run eagerly")
        count, decoder.graphs.can_replay = decoder.graphs.num_replays, False
        eager = _logits(decoder, platform, spec.num_layers, spec.vocab_size)
    finally:
        decoder.close()
    require(torch.equal(replayed, eager), "a replayed step of the demo model differs from the eager one")
    require(bool(eager.isfinite().all()), "the demo model computes infinities or NaN")
    return f"{count} replayed decode steps of the demo model, equal bit for bit"


def _logits(decoder: Decoder, platform: Platform, num_layers: int, vocab_size: int) -> torch.Tensor:
    """Returns the logits of all decode steps of some rows with given tokens."""
    blocks = ROWS * BLOCKS_PER_ROW
    kv = KVCache.allocate(decoder.kv_layouts, blocks, BLOCK, BF16, platform)
    table = RowTable(ROWS, BLOCK * BLOCKS_PER_ROW, BLOCK, vocab_size)
    rows, logits = platform.rows(table, None), []
    for step in range(STEPS + 1):
        new, work = [], []
        for row in range(ROWS):
            if step == 0:
                ids, greedy = [(row + 7 * i) % vocab_size for i in range(PROMPT)], RowSampling(temperature=0.0)
                new.append(RowInit(row=row, token_ids=ids, prompt_len=PROMPT, num_computed=0, sampling=greedy))
                own = [row + i * ROWS for i in range(BLOCKS_PER_ROW)]
                work.append(RowWork(row=row, num_tokens=PROMPT, samples=True, new_block_ids=own))
            else:
                work.append(RowWork(row=row, num_tokens=1, samples=True, token_ids=[(row + 3 * step) % vocab_size]))
        plan = StepPlan(step_id=step, work=work, new_rows=new)
        table.apply(plan)
        logits.append(decoder.forward(build_batch(plan, table, rows).forward, kv.tensors, None).clone())
    return torch.stack(logits)


def kv_round_trip(platform: Platform) -> str:
    """Stores blocks to a host slab, clears them, and loads them into others."""
    for dtype in (BF16, torch.int8):
        kv = KVCache.allocate([KVLayout.keys_and_values(2, 128)] * 2, 12, BLOCK, dtype, platform)
        for number, plane in enumerate(kv.planes):
            size = plane.numel() * plane.element_size()
            bytes_of = torch.arange(size, dtype=torch.int64, device=plane.device) * (2 * number + 7)
            plane.view(-1).view(torch.uint8).copy_(bytes_of.to(torch.uint8))
        before = [as_indexable(plane).view(torch.uint8).clone() for plane in kv.planes]
        slab = HostSlab.allocate(6, bytes_per_slot(kv.planes), platform.accelerator)
        try:
            copier = platform.kv_copier(kv.layers, slab.bytes_SB)
            stored, slots, loaded = [1, 4, 11, 7], [5, 0, 3, 2], [8, 1, 2, 0]
            arrived: list[int] = []
            platform.accelerator.synchronize()  # the copier has a stream of its own
            copier.store(stored, slots)
            for plane in kv.planes:
                plane.zero_()
            platform.accelerator.synchronize()
            copier.load(slots, loaded, arrived.append)
        finally:
            slab.close()
        require(arrived == [0, 1], f"layers arrived in the order {arrived}")
        for plane, old in zip(kv.planes, before, strict=True):
            now = as_indexable(plane).view(torch.uint8)
            require(torch.equal(now[loaded], old[stored]), f"KV in {dtype} came back from the host slab changed")
            rest = [block for block in range(12) if block not in loaded]
            require(not torch.count_nonzero(now[rest]), "a load wrote to a block that is not its own")
    return "blocks in bfloat16 and int8 through a host slab, equal"


def _best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _copy_bandwidth() -> str:
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    seconds = _best_seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), COPY_BYTES))
    require(torch.equal(source, target), "a copy of memory differs from its source")
    return f"{COPY_BYTES / seconds / 1e9:.1f} GB/s, one thread"


def _gemm_rate() -> str:
    square = torch.randn(SQUARE, SQUARE, generator=torch.Generator().manual_seed(0))
    rates = []
    for dtype in (BF16, torch.float32):
        matrix = square.to(dtype)
        seconds = _best_seconds(partial(torch.matmul, matrix, matrix))
        rates.append(f"{2 * SQUARE**3 / seconds / 1e9:,.0f} GFLOP/s in {str(dtype).removeprefix('torch.')}")
    return f"{', '.join(rates)}, {torch.get_num_threads()} thread(s)"
