"""Captures of decode steps, all made before a rank is ready, by the ranks of a stage together.

Called by loading.py behind the first steps. Which captures there are, workers/planning/graph_room.py lists; each is of
a step of padding, which writes the scratch block alone. A capture that fails on one rank is dropped on all of its
stage: an operation in a graph meets its like on the peers. Steps of its kind run eagerly, and the others are replayed.
"""

import logging
import time
from collections.abc import Sequence
from zlib import crc32

import torch

from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable, StepShape
from tandem.workers.graphs.graph_runner import StartGraphs
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.messages.handshake import ELSEWHERE, CaptureReport
from tandem.workers.models.decoder import Decoder
from tandem.workers.planning.graph_room import CaptureSize, capture_sizes
from tandem.workers.platforms.base import Platform

log = logging.getLogger(__name__)


def sizes_of(decoder: Decoder, kv: KVTensors, settings: EngineSettings, max_model_len: int) -> list[CaptureSize]:
    """Returns what a start captures of this decoder, the hot ones first."""

    def key_of(num_blocks: int) -> object:
        return decoder.replay_key(StepShape(1, 1, num_blocks), kv)

    sizes = capture_sizes(settings, max_model_len, key_of)
    return [size for size in sizes if decoder.captures_adapters or not size.has_adapters]


@torch.no_grad()
def capture_steps(
    decoder: Decoder,
    kv: KVTensors,
    context: ParallelContext,
    platform: Platform,
    sizes: Sequence[CaptureSize],
    num_groups: int = 1,
) -> CaptureReport | None:
    """Makes the captures, in step with all ranks of the stage, and replays each once. None where captures are made as
    steps come. num_groups: of layers with block tables of their own."""
    graphs, began_s = decoder.graphs, time.perf_counter()
    if not isinstance(graphs, StartGraphs):
        return None
    own_number = crc32(repr(sizes).encode()) if graphs.can_replay else 0
    if not _have_all(own_number, context, platform.device):
        graphs.can_replay = False  # such as with streamed layers on one of them
        log.warning("no step is captured: ranks of this stage differ in what they can replay")
    if not sizes or not graphs.can_replay:
        return None
    log.info("capturing %d kinds of decode steps", len(sizes))
    free = platform.memory()
    by_room = sorted(sizes, key=lambda size: size.num_tokens * size.num_blocks, reverse=True)  # then the pool is reused
    own = [_capture(decoder, graphs, kv, size, platform.device, num_groups) for size in by_room]
    failures = dict(zip(by_room, _agreed(own, context, platform.device), strict=True))
    keys = {size: (decoder.replay_key(_shape(size), kv), size.num_tokens) for size in by_room}
    graphs.drop(keys[size] for size, why in failures.items() if why is not None)
    for size, why in failures.items():
        if why is None:
            graphs.launch(*keys[size])  # the device gets what the first replay takes there
    platform.accelerator.event().wait()
    left = platform.memory()
    num_bytes = 0 if free is None or left is None else max(0, free.free_bytes - left.free_bytes)
    failed = {_words(size): why for size, why in failures.items() if why is not None}
    if failed:
        log.warning(
            "%d of %d kinds of decode steps have no capture, so they run eagerly: %s", len(failed), len(sizes), failed
        )
    return CaptureReport(len(sizes) - len(failed), failed, time.perf_counter() - began_s, num_bytes)


def _capture(
    decoder: Decoder, graphs: StartGraphs, kv: KVTensors, size: CaptureSize, device: torch.device, num_groups: int
) -> str | None:
    def make_batch() -> ForwardBatch:
        return padding_batch(size, kv, device, num_groups)

    return decoder.capture(graphs, _shape(size), kv, make_batch)


def _agreed(own: list[str | None], context: ParallelContext, device: torch.device) -> list[str | None]:
    """Returns why each capture failed on some rank of the stage."""
    if context.tp_size == 1:
        return own
    failed = torch.tensor([int(why is not None) for why in own], device=device)
    anywhere = context.tp.all_reduce(failed).tolist()
    return [why or (ELSEWHERE if count else None) for why, count in zip(own, anywhere, strict=True)]


def _have_all(number: int, context: ParallelContext, device: torch.device) -> bool:
    """Returns whether all ranks of the stage have this number; all of them get the same answer."""
    if context.tp_size == 1:
        return True
    total = int(context.tp.all_reduce(torch.tensor([number], device=device)))
    differs = torch.tensor([int(total != context.tp_size * number)], device=device)
    return not int(context.tp.all_reduce(differs))


def _shape(size: CaptureSize) -> StepShape:
    return StepShape(size.num_tokens, 1, size.num_blocks, size.has_adapters)


def _words(size: CaptureSize) -> str:
    beside = ", adapters" if size.has_adapters else ""
    return f"{size.num_tokens} tokens, {size.num_blocks} blocks{beside}"


def padding_batch(size: CaptureSize, kv: KVTensors, device: torch.device, num_groups: int = 1) -> ForwardBatch:
    """Returns a step of rows of one token, all of them padding."""
    count = size.num_tokens
    zeros_T = torch.zeros(count, dtype=torch.int64, device=device)
    table_RN = torch.full((count, size.num_blocks), kv.scratch_block, dtype=torch.int32, device=device)
    group = GroupTable(torch.full_like(zeros_T, kv.scratch_block * kv.block_size), table_RN)
    adapters = None
    if size.has_adapters:
        adapters = AdapterRows(torch.full((count,), -1, dtype=torch.int32, device=device), [])
    return ForwardBatch(
        input_ids_T=zeros_T,
        positions_T=zeros_T,
        slot_mapping_T=group.slot_mapping_T,
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens=torch.ones(count, dtype=torch.int32, device=device),
        block_table_RN=table_RN,
        logits_rows_S=zeros_T[:0],
        query_lens_list=[1] * count,
        seq_lens_list=[1] * count,
        block_size=kv.block_size,
        adapters=adapters,
        further_groups=(group,) * (num_groups - 1),
    )
