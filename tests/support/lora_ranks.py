"""Decoder cases of rows with adapters, for one rank or many (decoder_ranks.py): logits of every step.

Pages are given out shuffled, so that a row that is looked for beside its neighbour is not found.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tandem.configs.schema import LoraSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.pipeline import StageLink
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.lora.device.host_copy import make_shard
from tandem.workers.lora.device.rank_adapters import RankAdapters, open_adapters
from tandem.workers.lora.peft.peft_folder import read_adapter
from tandem.workers.models.decoder import attention_of, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.rank.batch import adapter_segments
from tests.support.decoder_ranks import Work, same_collectives, told_to_all
from tests.support.paged_rows import PagedRows

CPU = torch.device("cpu")
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class AdaptedCase:
    """One model, cut tp x pp. adapters: PEFT folders by slot; slots: of each row, -1 without. Each step's logits of
    the last tokens come back, or of all tokens."""

    folder: Path
    adapters: list[Path]
    slots: list[int]
    steps: list[Work]
    max_len: int
    tp_size: int = 1
    pp_size: int = 1
    all_logits: bool = False
    dtype: torch.dtype = torch.float32
    quantization: str | None = None


def run_adapted(case: AdaptedCase, context: ParallelContext) -> torch.Tensor | None:
    """On this rank; on the last stage all steps' logits [sum of S, V], None elsewhere."""
    spec = load_spec(case.folder, quantization=case.quantization)
    attention = attention_of(spec, CpuPlatform(), case.dtype)
    decoder = build_decoder(
        spec,
        context,
        folder=case.folder,
        dtype=case.dtype,
        platform=CpuPlatform(),
        attention=attention,
    )
    settings = LoraSettings(enable_lora=True, max_loras=max(1, len(case.adapters)), max_lora_rank=MAX_RANK)
    adapters = open_adapters(
        settings, spec, case.folder, decoder, CpuPlatform(), case.dtype, available_bytes=None, pp_size=case.pp_size
    )
    put_all(adapters, case.adapters)
    rows = PagedRows(decoder, len(case.slots), case.max_len, case.dtype)
    link = StageLink(context, spec.hidden_size, case.dtype, CPU)
    outputs = []
    with torch.inference_mode():
        for work in case.steps:
            batch = with_adapters(rows.batch(work, case.all_logits), [case.slots[row] for row, _ in work])
            hidden_TH = None if context.is_first_stage else link.receive(batch.num_tokens)[0].hidden_TH
            with same_collectives(context, batch):
                outputs.append(decoder.forward(batch, rows.kv, hidden_TH))
            if not context.is_last_stage:
                link.send(outputs[-1])
    link.flush()
    decoder.close()
    if not context.is_last_stage:
        return None
    each = (len(tokens) if case.all_logits else 1 for work in case.steps for _, tokens in work)
    return told_to_all(torch.cat(outputs), sum(each), context)


def put_all(adapters: RankAdapters, folders: list[Path]) -> None:
    """Adapter i becomes slot i."""
    pages = list(range(adapters.num_pages))
    random.Random(len(folders)).shuffle(pages)
    for slot, folder in enumerate(folders):
        adapter = read_adapter(folder, adapters.spec, MAX_RANK)
        copy = make_shard(adapter, adapters.slab.shape, adapters.dtype, HostAccelerator())
        own, pages = pages[: copy.num_pages], pages[copy.num_pages :]
        adapters.slab.put(copy, own, slot)


def with_adapters(batch: ForwardBatch, slots: list[int]) -> ForwardBatch:
    """The batch with each of its rows' slots; none at all when no row has one."""
    slots_R = np.array(slots, np.int64)
    lens = batch.query_lens_list
    starts = np.concatenate(([0], np.cumsum(lens)))
    segments = adapter_segments(slots_R, starts)
    if not segments:
        return batch
    slots_T = torch.from_numpy(np.repeat(slots_R, lens).astype(np.int32))
    slots_S = slots_T[batch.logits_rows_S]
    sample_segments = adapter_segments(slots_S.long().numpy(), np.arange(len(slots_S) + 1))
    return replace(
        batch, adapters=AdapterRows(slots_T, segments), sample_adapters=AdapterRows(slots_S, sample_segments)
    )
