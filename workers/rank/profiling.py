"""A forward pass as large as a step can get, to learn what activations cost before KV takes the rest. CUDA only.

Called by loading.py once the weights are in memory; all TP ranks run it together, stages apart from each other.
"""

import numpy as np
import torch

from configs.schema import EngineSettings
from parallel.context import ParallelContext
from workers.messages import RowInit, RowSampling, RowWork, StepPlan
from workers.models.decoder import Decoder
from workers.rank.batch import build_batch
from workers.rank.kv_tensors import KVCache
from workers.rank.row_table import RowTable
from workers.sampling.sampler import sample


def fullest_plan(max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int) -> StepPlan:
    """A plan with every row in use and every token of the budget; all rows write the same few blocks."""
    rows = min(max_num_seqs, max_num_tokens)
    length = min(max_num_tokens // rows, max_model_len)
    blocks = list(range(-(-length // block_size)))
    sampling = RowSampling(temperature=1.0, top_p=0.9)
    return StepPlan(
        step_id=0,
        new_rows=[
            RowInit(row=row, token_ids=[0] * length, prompt_len=length, num_computed=0, sampling=sampling)
            for row in range(rows)
        ],
        work=[RowWork(row=row, num_tokens=length, samples=True, new_block_ids=blocks) for row in range(rows)],
    )


@torch.inference_mode()
def run_fullest_step(
    decoder: Decoder,
    context: ParallelContext,
    settings: EngineSettings,
    *,
    hidden_size: int,
    vocab_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Runs it, keeps nothing but the allocator's reserved memory. Returns the KV bytes that were used for it."""
    size, scheduler = settings.cache.block_size, settings.scheduler
    plan = fullest_plan(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, max_model_len, size)
    num_blocks = len(plan.work[0].new_block_ids)
    heads, head_dim = decoder.num_local_kv_heads, decoder.head_dim
    kv = KVCache.allocate(decoder.num_local_layers, num_blocks, size, heads, head_dim, kv_dtype, device)
    table = RowTable(scheduler.max_num_seqs, max_model_len, size, vocab_size)
    table.apply(plan)
    batch = build_batch(plan, table, device)
    hidden_TH = None
    if not context.is_first_stage:
        hidden_TH = torch.zeros(batch.forward.num_tokens, hidden_size, dtype=dtype, device=device)
    output = decoder.forward(batch.forward, kv.tensors, hidden_TH)
    if context.is_last_stage and context.tp_rank == 0:
        positions_S = np.zeros(len(batch.sample_rows_S), np.int64)
        sample(output, batch.sample_rows_S, positions_S, table.sampling, table.history)
    return kv.nbytes
