"""Log probabilities in Triton: of the chosen token with its rank, and of the best or of named ones; three launches, two
of them behind the draw, for places that ask and places that do not.

Definitions as in sampling_rules.py. The first kernel reads the model's logits before anything changes them: of each
part of a row the sum of exponentials and the best tokens, of equal ones the lower id first. It copies the logits of
places whose own are about to change. The second one counts the better ones of the token that was drawn, the third one
puts parts together. S places, P parts of a row, N best tokens, V vocabulary, M places that keep their logits.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels import sampling_rules
from tandem.workers.kernels.sampling_rules import MOST_TOP, REPORT, SamplingRules

NAMED: Final = tl.constexpr(sampling_rules.NAMED)
TOP: Final = tl.constexpr(sampling_rules.TOP)
KEPT: Final = tl.constexpr(sampling_rules.KEPT)
LEAST_BLOCK: Final = 4096
"""Tokens of a part of a row, at least."""
MOST_PARTS: Final = 64
LOW: Final = tl.constexpr(0xFFFFFFFF)
NO_KEY: Final = tl.constexpr(-(2**63))
CHANGING: Final = ["stride", "vocab", "parts"]
UNALIGNED: Final = ["logits", "ids"]


@triton.jit
def _key_of(logit, id):
    """An integer that is the greater, the greater a logit, and of equal ones the lower the id."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | -(id.to(tl.int64) - LOW)


@triton.jit
def _logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def read_parts(
    logits, stride, vocab, begins, numbers, kept, greatest, sums, keys, BLOCK: tl.constexpr, MOST: tl.constexpr
):
    """greatest, sums: float32 [S, P], of a part of a row the greatest logit and the sum of exponentials of distances to
    it; keys: int64 [S, P, MOST]."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(begins + s)
    if begin >= 0:
        header = numbers + begin
        most, number = tl.load(header + TOP), tl.load(header + KEPT)
        id = part * BLOCK + tl.arange(0, BLOCK)
        seen = id < vocab
        if most >= 0:
            logit = tl.load(logits + s * stride + id, mask=seen, other=-float("inf"))
            if number >= 0:
                tl.store(kept + number.to(tl.int64) * vocab + id, logit, mask=seen)
            best = tl.max(logit, axis=0)
            out = s * tl.num_programs(1) + part
            tl.store(greatest + out, best)
            weight = tl.where(seen & (logit > -float("inf")), tl.exp(logit - best), 0.0)
            tl.store(sums + out, tl.sum(weight, axis=0))
            key = tl.where(seen, _key_of(logit, id), NO_KEY)
            for which in range(most):
                first = tl.max(key, axis=0)
                tl.store(keys + out * MOST + which, first)
                key = tl.where(key == first, NO_KEY, key)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def count_better(logits, stride, vocab, begins, numbers, kept, ids, better, BLOCK: tl.constexpr):
    """better: int32 [S, P], the logits of a part that are greater than the chosen token's."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(begins + s)
    if begin >= 0:
        header = numbers + begin
        if tl.load(header + TOP) >= 0:
            number = tl.load(header + KEPT)
            row = logits + s * stride
            if number >= 0:
                row = kept + number.to(tl.int64) * vocab
            id = part * BLOCK + tl.arange(0, BLOCK)
            logit = tl.load(row + id, mask=id < vocab, other=-float("inf"))
            is_better = logit > tl.load(row + tl.load(ids + s))
            tl.store(better + s * tl.num_programs(1) + part, tl.sum(is_better.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def report_rows(
    logits, stride, vocab, begins, numbers, kept, ids, greatest, sums, keys, better, parts, out,
    PARTS: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr, REPORT: tl.constexpr,
):  # fmt: skip
    """out: int32 [S, REPORT]."""
    s = tl.program_id(0).to(tl.int64)
    begin = tl.load(begins + s)
    if begin >= 0:
        header = numbers + begin
        most = tl.load(header + TOP)
        if most >= 0:
            number, named_at = tl.load(header + KEPT), tl.load(header + NAMED)
            row = logits + s * stride
            if number >= 0:
                row = kept + number.to(tl.int64) * vocab
            part = tl.arange(0, PARTS)
            own = tl.load(greatest + s * parts + part, mask=part < parts, other=-float("inf"))
            best = tl.max(own, axis=0)
            weight = tl.load(sums + s * parts + part, mask=part < parts, other=0.0)
            total = tl.log(tl.sum(tl.where(own > -float("inf"), weight * tl.exp(own - best), 0.0), axis=0))
            rank = 1 + tl.sum(tl.load(better + s * parts + part, mask=part < parts, other=0), axis=0)
            answer = out + s * REPORT
            chosen = (tl.load(row + tl.load(ids + s)) - best) - total
            tl.store(answer, rank)
            tl.store(answer + 1, chosen.to(tl.int32, bitcast=True))
            if named_at >= 0:
                lane = tl.arange(0, LANES)
                is_there = lane < tl.load(numbers + named_at)
                id = tl.load(numbers + named_at + 1 + lane, mask=is_there, other=0)
                its = (tl.load(row + id, mask=is_there, other=0.0) - best) - total
                tl.store(answer + 2 + MOST + lane, its.to(tl.int32, bitcast=True), mask=is_there)
            lane = tl.arange(0, PARTS * LANES)
            at, which = lane // LANES, lane % LANES
            is_there = (at < parts) & (which < most)
            key = tl.load(keys + (s * parts + at) * MOST + which, mask=is_there, other=NO_KEY)
            for which_best in range(most):
                first = tl.max(key, axis=0)
                key = tl.where(key == first, NO_KEY, key)
                its = (_logit_of(first) - best) - total
                tl.store(answer + 2 + which_best, (-((first & LOW) - LOW)).to(tl.int32))
                tl.store(answer + 2 + MOST + which_best, its.to(tl.int32, bitcast=True))


def _grid_of(logits_SV: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Returns the programs of kernels that read parts, and the size of a part."""
    places, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1
    block = max(LEAST_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, MOST_PARTS)))
    return (places, triton.cdiv(vocab, block)), block


def keep_logits(
    logits_SV: torch.Tensor, rules: SamplingRules[torch.Tensor], kept_MV: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns (greatest_SP, sums_SP, keys_SPN)."""
    grid, block = _grid_of(logits_SV)
    device = logits_SV.device
    greatest_SP, sums_SP = (torch.empty(grid, dtype=torch.float32, device=device) for _ in range(2))
    keys_SPN = torch.empty((*grid, MOST_TOP), dtype=torch.int64, device=device)
    read_parts[grid](
        logits_SV, logits_SV.stride(0), logits_SV.shape[1], rules.begin_S, rules.numbers_I, kept_MV, greatest_SP,
        sums_SP, keys_SPN, BLOCK=block, MOST=MOST_TOP, num_warps=8,
    )  # fmt: skip
    return greatest_SP, sums_SP, keys_SPN


def report(
    logits_SV: torch.Tensor,
    ids_S: torch.Tensor,
    rules: SamplingRules[torch.Tensor],
    kept_MV: torch.Tensor,
    noted: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Returns the log probabilities of places that ask for some."""
    grid, block = _grid_of(logits_SV)
    better_SP = torch.empty(grid, dtype=torch.int32, device=logits_SV.device)
    report_SX = torch.empty((grid[0], REPORT), dtype=torch.int32, device=logits_SV.device)
    given = (
        logits_SV, logits_SV.stride(0), logits_SV.shape[1], rules.begin_S, rules.numbers_I, kept_MV, ids_S,
    )  # fmt: skip
    count_better[grid](*given, better_SP, BLOCK=block, num_warps=8)
    report_rows[(grid[0],)](
        *given, *noted, better_SP, grid[1], report_SX, PARTS=MOST_PARTS, MOST=MOST_TOP,
        LANES=triton.next_power_of_2(MOST_TOP), REPORT=REPORT, num_warps=8,
    )  # fmt: skip
    return report_SX
