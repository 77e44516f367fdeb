"""Captures of the passes of this rank's drafter, made behind those of steps, whose memory they read.

Called by captures.py. What cannot be captured is launched pass by pass in each step, and said by name.
"""

import logging
import time
from functools import partial
from typing import Final, NamedTuple

import torch

from tandem.workers.graphs.graph_runner import StartGraphs
from tandem.workers.models.step_tensors import Heard
from tandem.workers.planning.graph_room import GuessSize, guess_sizes, table_widths
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.captured.frame import frame_memory
from tandem.workers.rank.captured.framed_step import StepParts
from tandem.workers.rank.captured.guess_replays import (
    CapturesPasses,
    GuessMemory,
    GuessReplay,
    GuessReplays,
    GuessStep,
    SampledColumns,
)

log = logging.getLogger(__name__)
PROGRESS_S: Final = 5.0
"""Between two lines about captures."""


class GuessOrder(NamedTuple):
    """The order of a drafter's captures: its name, the rows of the rank, how many there are at most, and blocks of a
    row."""

    drafter: CapturesPasses
    name: str
    table: SampledColumns
    max_rows: int
    max_blocks: int

    def say(self, why: str) -> None:
        log.warning("passes of %s are launched one by one: %s", self.name, why)


def capture_guesses(
    graphs: StartGraphs, parts: StepParts, order: GuessOrder, platform: Platform
) -> tuple[int, dict[str, str]]:
    """Captures a drafter's passes and replays each once; returns how many are captured, and why others are not. Peers
    take no part: a draft is whole on its rank."""
    sizes = _sizes(parts, order)
    if parts.ops is None or not sizes:
        words = "tokens are not drawn in captures" if parts.ops is None else "their attention is in no capture"
        order.say(words)
        return 0, {f"passes of {order.name}": words}
    made, failed = list[GuessReplay](), dict[str, str]()
    try:
        memory = _memory(parts, sizes, platform)
        residual_TH, branch_TH, _, taps = parts.room
        order.drafter.hold(Heard(branch_TH, residual_TH, taps))
        GuessStep(parts, max(sizes), memory).warm(order.drafter.passes)
    except RuntimeError as error:  # there is no memory, or steps of padding are more than it can do
        order.say(str(error))
        return 0, {f"passes of {order.name}": str(error)}
    log.info("capturing passes of %s, of %d sizes", order.name, len(sizes))
    told_s = time.perf_counter()
    for number, size in enumerate(sorted(sizes, reverse=True)):  # the pool is reused
        if (now_s := time.perf_counter()) - told_s > PROGRESS_S:
            log.info("%d of %d sizes captured", number, len(sizes))
            told_s = now_s
        captured = _captured(graphs, parts, size, memory, order.drafter)
        if isinstance(captured, str):
            failed[f"passes of {order.name}, {size.num_rows} rows, {size.num_places} guesses"] = captured
        else:
            made.append(captured)
    if failed:
        order.say(f"{len(failed)} of {len(sizes)} captures failed: {failed}")
    order.drafter.take(GuessReplays(parts, memory, made[::-1], order.table))
    return len(made), failed


def _captured(
    graphs: StartGraphs, parts: StepParts, size: GuessSize, memory: GuessMemory, drafter: CapturesPasses
) -> GuessReplay | str:
    """Captures all passes of a size and replays them once; returns why it could not."""
    try:
        step = GuessStep(parts, size, memory)
    except torch.OutOfMemoryError as error:
        return str(error)
    step.pad()
    captured = graphs.capture_apart(partial(step.run, drafter.passes))
    if isinstance(captured, str):
        return captured
    captured[0]()
    return GuessReplay(step, captured[0])


def _sizes(parts: StepParts, order: GuessOrder) -> list[GuessSize]:
    """Returns the captures, whose tables are the widest of those that attention takes as it takes the narrowest: where
    it gathers all that a table has, those of short contexts, in which passes cost least."""
    widths = table_widths(parts.kv.block_size, order.max_blocks)
    keys = {width: order.drafter.replay_key(width) for width in widths}
    first = keys[widths[0]]
    if first is None:
        return []
    width = max(width for width, key in keys.items() if key == first)
    return guess_sizes(order.max_rows, parts.max_drafts, width, reads_along=order.drafter.reads_along)


def _memory(parts: StepParts, sizes: list[GuessSize], platform: Platform) -> GuessMemory:
    """Allocates what the captures share."""
    tokens, rows = (max(getattr(size, of) for size in sizes) for of in ("num_tokens", "num_rows"))
    positions_T = platform.zeros((len(parts.room.residual_TH),), torch.int64)
    ids_AD = platform.zeros((rows + 1, parts.max_drafts), torch.int64)
    return GuessMemory(frame_memory(tokens, platform), positions_T, ids_AD)
