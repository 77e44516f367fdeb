"""Captures of whole steps, all made before a rank is ready, by the ranks of a stage together.

Called by loading.py behind the first steps. Which captures there are, workers/planning/graph_room.py lists; each is of
a step of padding, which writes the scratch block and rows of padding alone. A capture that fails on one rank is dropped
on all of its stage: an operation in a graph meets its like on the peers. Steps of its kind run eagerly, and the others
are replayed.
"""

import logging
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch

from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import DECODE_QUERIES, KVTensors
from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.graphs.graph_runner import StartGraphs
from tandem.workers.kernels.sampling_ops import FixedSampling, SamplingOps
from tandem.workers.kernels.sampling_rules import ReportOps
from tandem.workers.messages.handshake import ELSEWHERE, CaptureReport
from tandem.workers.models.decoder import Decoder
from tandem.workers.planning.graph_room import CaptureSize, capture_sizes
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows, FramedRows
from tandem.workers.rank.captured.frame import PaddingRows, frame_memory
from tandem.workers.rank.captured.framed_step import Clear, FramedStep, StepParts
from tandem.workers.rank.captured.ruled_draw import DrawReplay, RuledDraw, draw_memory
from tandem.workers.rank.captured.shard_draw import ShardDraw
from tandem.workers.rank.start.guess_captures import PROGRESS_S, GuessOrder, capture_guesses

log = logging.getLogger(__name__)


def sizes_of(decoder: Decoder, kv: KVTensors, settings: EngineSettings, max_model_len: int) -> list[CaptureSize]:
    """Returns what a start captures of this decoder, the hot ones first."""

    def key_of(num_blocks: int, has_chunks: bool) -> object:
        return decoder.replay_key(StepShape(1, 1 + DECODE_QUERIES * has_chunks, num_blocks), kv)

    sizes = capture_sizes(settings, max_model_len, key_of, by_shards=decoder.has_shards)
    return [size for size in sizes if decoder.captures_adapters or not size.has_adapters]


class StartCaptures(NamedTuple):
    """The captures that a start has made beside the steps', and what it reports of all. draws_of: draws with rules, by
    the number of their tokens."""

    report: CaptureReport | None
    draws_of: dict[int, DrawReplay]


@torch.no_grad()
def capture_steps(
    decoder: Decoder,
    kv: KVTensors,
    clear: Clear,
    rows: DeviceRows,
    context: ParallelContext,
    platform: Platform,
    sizes: Sequence[CaptureSize],
    ops: SamplingOps | None = None,
    max_drafts: int = 0,
    guesses: GuessOrder | None = None,
) -> StartCaptures:
    """Makes the captures, in step with all ranks of the stage, and replays each once. No report where captures are made
    as steps come. ops: on the rank that samples; guesses: on the one that guesses."""
    graphs, began_s = decoder.graphs, time.perf_counter()
    if not isinstance(graphs, StartGraphs) or not isinstance(rows, FramedRows):
        return StartCaptures(None, {})
    shards = _shards(decoder, context, platform)
    sizes = [size for size in sizes if shards is not None or not size.by_shards]
    own_number = crc32(repr(sizes).encode()) if graphs.can_replay else 0
    if not _have_all(own_number, context, platform.device):
        graphs.can_replay = False  # such as with streamed layers on one of them
        log.warning("no step is captured: ranks of this stage differ in what they can replay")
    if not sizes or not graphs.can_replay:
        if guesses is not None:
            guesses.say("no step is captured")
        return StartCaptures(None, {})
    log.info("capturing %d kinds of steps", len(sizes))
    free = platform.memory()

    def used_bytes() -> int:
        left = platform.memory()
        return 0 if free is None or left is None else max(0, free.free_bytes - left.free_bytes)

    by_room = sorted(sizes, key=lambda size: (size.num_tokens, size.num_blocks), reverse=True)  # the pool is reused
    fixed = ops if isinstance(ops, FixedSampling) else None
    tokens_NL = platform.zeros((0, 0), torch.int32) if fixed is None else rows.tokens
    sampling = (fixed, tokens_NL, ops is not None, max_drafts)
    parts = _parts(decoder, kv, clear, rows, context, platform, by_room, *sampling, shards)
    keys = {size: decoder.replay_key(_shape(size), kv) for size in by_room}
    own = _captured(graphs, parts, keys, began_s, used_bytes)
    failures = dict(zip(by_room, _agreed(own, context, platform.device), strict=True))
    graphs.drop((keys[size], size.num_tokens) for size, why in failures.items() if why is not None)
    counts = {size.num_samples for size, why in failures.items() if why is None}
    is_ruled = len(counts) > 0 and isinstance(fixed, ReportOps)
    draws, undrawn = _ruled_draws(graphs, parts, counts, platform) if is_ruled else ({}, {})
    passes, unpassed = (0, {}) if guesses is None else capture_guesses(graphs, parts, guesses, platform)
    for size, why in failures.items():
        if why is None and (captured := graphs.find(keys[size], size.num_tokens)) is not None:
            captured.launch()  # the device gets what the first replay takes there
    platform.accelerator.event().wait()
    total = len(sizes) + len(draws) + len(undrawn) + passes + len(unpassed)
    failed = {**{_words(size): why for size, why in failures.items() if why is not None}, **undrawn, **unpassed}
    if failed:
        log.warning("%d of %d kinds of steps have no capture, so these run eagerly: %s", len(failed), total, failed)
    report = CaptureReport(total - len(failed), failed, time.perf_counter() - began_s, used_bytes())
    return StartCaptures(report, draws)


def _ruled_draws(
    graphs: StartGraphs, parts: StepParts, counts: Collection[int], platform: Platform
) -> tuple[dict[int, DrawReplay], dict[str, str]]:
    """Captures draws with rules, of so many tokens each; returns them, and why others could not be."""
    made, failed = dict[int, DrawReplay](), dict[str, str]()
    try:
        memory = draw_memory(parts, max(counts), platform.zeros)
    except torch.OutOfMemoryError as error:
        return made, {"draws with rules": str(error)}
    for count in sorted(counts, reverse=True):
        draw = RuledDraw(parts, count, memory)
        draw.pad()
        captured = graphs.capture_apart(draw.run)
        if isinstance(captured, str):
            failed[f"draws of {count} tokens"] = captured
            continue
        made[count] = DrawReplay(draw, *captured)
        captured[0]()
    return made, failed


def _parts(
    decoder: Decoder,
    kv: KVTensors,
    clear: Clear,
    rows: FramedRows,
    context: ParallelContext,
    platform: Platform,
    sizes: Sequence[CaptureSize],
    fixed: FixedSampling | None,
    tokens_NL: torch.Tensor,
    samples: bool,
    max_drafts: int,
    shards: ShardDraw | None,
) -> StepParts:
    """Allocates what the captures share."""
    most_tokens, most_samples = (max(getattr(size, of) for size in sizes) for of in ("num_tokens", "num_samples"))
    room = decoder.room(most_tokens, most_samples, platform.device)
    spare = PaddingRows(*rows.hold(kv.scratch_block, most_samples * max_drafts))
    return StepParts(
        decoder=decoder,
        kv=kv,
        clear=clear,
        rows=rows,
        spare=spare,
        room=room,
        memory=frame_memory(most_tokens, platform),
        ops=fixed,
        shards=shards,
        tokens_NL=tokens_NL,
        counts_SV=platform.zeros((most_samples if fixed else 0, room.logits_SV.shape[1]), torch.int32),
        samples=samples,
        adds=context.world_size == 1,
        max_drafts=max_drafts,
    )


def _shards(decoder: Decoder, context: ParallelContext, platform: Platform) -> ShardDraw | None:
    """Returns what draws on this rank from its part of the vocabulary; None where captures do not, on all ranks of the
    stage alike."""
    if not decoder.has_shards:
        return None
    ops = platform.sampling_ops()
    lacks = torch.tensor([not isinstance(ops, FixedSampling)], dtype=torch.int64, device=platform.device)
    if int(context.tp.all_reduce(lacks)) or not isinstance(ops, FixedSampling):
        return None
    return ShardDraw(ops, context.tp, decoder.own_ids, decoder.vocab_size)


def _captured(
    graphs: StartGraphs,
    parts: StepParts,
    keys: dict[CaptureSize, Hashable | None],
    began_s: float,
    used_bytes: Callable[[], int],
) -> list[str | None]:
    """Captures each size; returns why it could not."""
    own, told_s = [], began_s
    steps = [FramedStep(parts, size) for size in keys]  # ahead of what the ranks do together
    for step, key in zip(steps, keys.values(), strict=True):
        assert key is not None, "a step that is not replayed"
        own.append(graphs.capture(key, step))
        if (now_s := time.perf_counter()) - told_s > PROGRESS_S:
            given = (len(own), len(keys), now_s - began_s, used_bytes() / 2**30)
            log.info("%d of %d steps captured in %.1f s, %.1f GiB", *given)
            told_s = now_s
    return own


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
    most_queries = 1 + DECODE_QUERIES * size.has_chunks
    return StepShape(size.num_tokens, most_queries, size.num_blocks, size.has_adapters, by_shards=size.by_shards)


def _words(size: CaptureSize) -> str:
    beside = ", chunks" * size.has_chunks + ", adapters" * size.has_adapters + ", by shards" * size.by_shards
    return f"{size.num_tokens} tokens, {size.num_blocks} blocks{beside}"
