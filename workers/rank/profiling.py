"""Forward passes of the largest steps, which measure activation memory before KV takes the rest. For devices with
memory of their own.

Called by loading.py once the weights are in memory; all TP ranks run them together, stages apart from each other.
"""

import torch

from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.decoder import Decoder
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.batch import build_batch, preparing
from tandem.workers.rank.drafts import Drafts
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation.proposers import make_guess


def fullest_plan(
    rows: int, max_num_tokens: int, max_model_len: int, block_size: int, max_drafts: int = 0, num_groups: int = 1
) -> StepPlan:
    """A plan that spends the budget of tokens on equal chunks of `rows` rows, each at the end of the longest context,
    with up to max_drafts of them as drafts. All blocks of a context are the few that its chunk would fill."""
    rows = min(rows, max_num_tokens)
    length = min(max_num_tokens // rows, max_model_len)
    drafts = min(max_drafts, length - 1)
    own, all_blocks = (-(-tokens // block_size) * num_groups for tokens in (length, max_model_len))
    blocks = [place % own for place in range(all_blocks)]
    sampling = RowSampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1)
    return StepPlan(
        step_id=0,
        new_rows=[
            RowInit(
                row=row,
                token_ids=[0] * (max_model_len - drafts),
                prompt_len=max_model_len - drafts,
                num_computed=max_model_len - length,
                sampling=sampling,
            )
            for row in range(rows)
        ],
        work=[
            RowWork(row=row, num_tokens=length - drafts, samples=True, new_block_ids=blocks, max_drafts=drafts)
            for row in range(rows)
        ],
    )


@torch.inference_mode()
def run_fullest_steps(
    decoder: Decoder,
    context: ParallelContext,
    settings: EngineSettings,
    platform: Platform,
    *,
    hidden_size: int,
    vocab_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    windows: tuple[int | None, ...] = (None,),
) -> int:
    """Runs a step of all rows and one of a single row, and keeps nothing but the allocator's reserved memory. Returns
    the KV bytes that were used for it."""
    size, scheduler = settings.cache.block_size, settings.scheduler
    used_bytes = 0
    for rows in (scheduler.max_num_seqs, 1):
        tokens = scheduler.max_num_batched_tokens
        plan = fullest_plan(rows, tokens, max_model_len, size, settings.max_drafts, len(windows))
        num_blocks = 1 + max(plan.work[0].new_block_ids)
        kv = KVCache.allocate(decoder.kv_layouts, num_blocks, size, kv_dtype, platform)
        table = RowTable(len(plan.work), max_model_len, size, vocab_size, windows=windows)
        table.apply(plan)
        guess = make_guess(settings.speculative) if context.pp_size == 1 else None
        drafts = Drafts.on_device(plan) if any(work.max_drafts for work in plan.work) else None
        if drafts is not None and guess is None:
            drafts = Drafts(drafts.counts_R, {})  # those of the host, wherever they come from
        samples = context.is_last_stage and context.tp_rank == 0
        rows_there = platform.rows(table, guess, keeps_tokens=samples)
        prepare = preparing(table, platform.sampling_ops(), is_ahead=rows_there.is_ahead) if samples else None
        batch = build_batch(plan, table, rows_there, drafts, prepare)
        hidden_TH, kept = None, list[torch.Tensor]()
        if not context.is_first_stage:
            hidden_TH = torch.zeros(batch.forward.num_tokens, hidden_size, dtype=dtype, device=platform.device)
            kept = [torch.zeros_like(hidden_TH) for _ in decoder.taps.passed]
        output = decoder.forward(batch.forward, kv.tensors, hidden_TH, kept)
        if not context.is_last_stage and decoder.heard is not None:
            _hold_messages((output, *decoder.heard.taps), context.pp_size)
        if batch.sampling is not None:
            positions_S = batch.forward.positions_T[batch.forward.logits_rows_S] + 1
            batch.sampling.draw(output, platform.accelerator, positions_S, rows_there.tokens)
        used_bytes = max(used_bytes, kv.nbytes)
    return used_bytes


def _hold_messages(parts: tuple[torch.Tensor, ...], most: int) -> int:
    """Allocates as many messages to the next stage as may be under way at once (parallel/pipeline.py), and lets go of
    them."""
    return len([torch.stack(parts) for _ in range(most)])
