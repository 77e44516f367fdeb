"""The least exponent that a row keeps, in Triton: min-p, top-k and top-p of all rows by three launches, in any mix.

Definitions as in sampling_ops.py, whose TorchSampling is the twin: the same bits, as sums are of integers. The first
kernel counts a row's logits by bins of their distance to the best one. Counts bound the weight of each bin, so they say
between which bins the row is cut. The second one collects what lies between, some hundreds of candidates of most rows,
and adds up what is better; the third one searches among candidates, one program a row. Where they are more than there
is room for, it searches the row itself. A row without top-k and top-p costs a look at its parameters. Grids depend on
shapes alone. R random rows of a step, V vocabulary, B bins, C candidates.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels import sampling_ops
from tandem.workers.kernels.sampling_ops import RandomRows

BINS: Final = 1024
"""64 of each octave of distances from 2^-6 to 2^10; the first and the last one hold what is beyond."""
SHIFT: Final = tl.constexpr(17)
FIRST: Final = tl.constexpr((127 - 6) << 6)
"""The first octave's exponent and no bits of its mantissa, as a float has them."""
INFINITY: Final = tl.constexpr(sampling_ops.INFINITY_BITS)
GRID: Final = tl.constexpr(sampling_ops.GRID)
UNITS: Final = tl.constexpr(2.0**34)
"""The weight of 1."""
NEGLIGIBLE: Final = tl.constexpr(-26.0)
"""An exponent whose weight is 0, as are those of all below."""
ROOM: Final = 16_384
"""Candidates of a row that have memory of their own."""
BLOCK: Final = 2048
"""Logits of a step of a program that reads the whole row."""
SEARCHED: Final = 1024
"""Candidates of a step of a search."""
PROGRAMS: Final = 2048
"""Programs over all rows, more than a device runs at once: most of them may have nothing to do."""
TOTAL: Final = tl.constexpr(0)
ABOVE: Final = tl.constexpr(1)
COUNT: Final = tl.constexpr(2)
BETTER: Final = tl.constexpr(3)
SUMS: Final = tl.constexpr(4)
"""A row's sums: the weight of what min-p keeps, and of what is better than all candidates; the number of candidates,
and of what is better."""
CHANGING: Final = ["stride", "vocab", "steps"]
UNALIGNED: Final = ["logits", "best", "at", "factor", "lowest", "top_k", "top_p", "edges"]
"""Numbers and pointers as in triton_sampling.py."""


@triton.jit
def _weight(exponent):
    """weights() of sampling_ops.py."""
    power = tl.maximum(exponent, -80.0) * 1.44269504
    whole = (power + 12582912.0) - 12582912.0
    f = power - whole
    p = f * 1.32647273e-3 + 9.67151279e-3
    p = p * f + 5.55073374e-2
    p = p * f + 2.40222421e-1
    p = p * f + 6.93146978e-1
    p = p * f + 1.0
    p = p * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(p >= GRID, p, (p + GRID) - GRID)


@triton.jit
def _units(weight):
    """A weight as an integer."""
    return (weight * UNITS).to(tl.int64)


@triton.jit
def _magnitude(number):
    """The bits of a float32 without its sign."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bin_of(distance, BINS: tl.constexpr):
    """The bin of a logit less the best one: the greater, the better."""
    return BINS - 1 - tl.minimum(tl.maximum((_magnitude(distance) >> SHIFT) - FIRST, 0), BINS - 1)


@triton.jit
def _begin_of(number):
    """The distance at which a bin begins, if the best one is number 0."""
    return ((number + FIRST) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _cuts(top_k, top_p, factor, vocab):
    """Returns whether a row's draw is cut by top-k, and whether by it or by top-p."""
    is_limited = (factor != 0.0) & (top_k > 0) & (top_k < vocab)
    return is_limited, is_limited | ((factor != 0.0) & (top_p < 1.0))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def count_bins(
    logits, stride, vocab, best, at, factor, lowest, top_k, top_p, bins, sums, steps,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bins: int32 [R, B], sums: int64 [R, SUMS], zeros. Adds what min-p keeps of `steps` times BLOCK logits of a row;
    what it does not keep is in the worst bin."""
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    its_factor, its_lowest = tl.load(factor + r), tl.load(lowest + r)
    _, is_cut = _cuts(tl.load(top_k + r), tl.load(top_p + r), its_factor, vocab)
    if is_cut:
        place = tl.load(at + r)
        row, its_best = logits + place * stride, tl.load(best + place)
        counts, total = tl.zeros((BINS,), tl.int32), tl.zeros((BLOCK,), tl.int64)
        for step in range(part * steps, part * steps + steps):
            id = step * BLOCK + tl.arange(0, BLOCK)
            distance = tl.load(row + id, mask=id < vocab, other=-float("inf")) - its_best
            exponent = distance * its_factor
            is_kept = (id < vocab) & (exponent >= its_lowest)
            counts += tl.histogram(tl.where(is_kept, _bin_of(distance, BINS), 0), BINS)
            total += tl.where(is_kept, _units(_weight(exponent)), 0)
        tl.atomic_add(bins + r * BINS + tl.arange(0, BINS), counts, mask=counts > 0)
        tl.atomic_add(sums + r * SUMS + TOTAL, tl.sum(total, axis=0))


@triton.jit
def _bracket(own_bins, total, factor, top_k, is_limited, top_p, BINS: tl.constexpr):
    """The bins between which a row is cut, these included, and how many logits are in better ones; with top-k and
    top-p all bins that top-k may keep. A bin more to either side where weights decide: those of neighbours of a border
    may be in the wrong order by a rounding."""
    bin = tl.arange(0, BINS)
    counts = tl.load(own_bins + bin)
    ends = tl.cumsum(counts, 0)
    whole = tl.sum(counts, axis=0)
    worst, greatest, better = whole * 0, whole * 0 + BINS - 1, whole * 0
    if is_limited:
        worst = tl.sum((whole - ends + counts >= top_k).to(tl.int32), axis=0) - 1
        if top_p >= 1.0:
            greatest = worst
            better = whole - tl.sum(tl.where(bin == worst, ends, 0), axis=0)
    else:
        number = BINS - 1 - bin
        near = tl.where(number == 0, 0.0, -_begin_of(number) * factor)
        most = tl.where(near < NEGLIGIBLE, 0.0, _weight(near) * 1.001 + 2.0 / UNITS)
        least = tl.where(number == BINS - 1, 0.0, _weight(-_begin_of(number + 1) * factor) * 0.999)
        slack = (total.to(tl.float64) * (1.0 - top_p) / UNITS).to(tl.float32)
        held = counts.to(tl.float32)
        worst = tl.sum((tl.cumsum(held * most, 0) <= slack * 0.999).to(tl.int32), axis=0) - 1
        greatest = tl.sum((tl.cumsum(held * least, 0) <= slack * 1.001).to(tl.int32), axis=0) + 1
    return tl.maximum(worst, 0), tl.minimum(greatest, BINS - 1), better


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def collect_candidates(
    logits, stride, vocab, best, at, factor, lowest, top_k, top_p, bins, sums, found, steps,
    BINS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """found: float32 [R, ROOM], the exponents between which a row is cut, in no order, as many as there is room for;
    sums: the rest of them."""
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    its_factor, its_lowest = tl.load(factor + r), tl.load(lowest + r)
    k, p = tl.load(top_k + r), tl.load(top_p + r)
    is_limited, is_cut = _cuts(k, p, its_factor, vocab)
    if is_cut:
        place, own = tl.load(at + r), sums + r * SUMS
        row, its_best = logits + place * stride, tl.load(best + place)
        worst, greatest, better = _bracket(bins + r * BINS, tl.load(own + TOTAL), its_factor, k, is_limited, p, BINS)
        above = tl.zeros((BLOCK,), tl.int64)
        for step in range(part * steps, part * steps + steps):
            id = step * BLOCK + tl.arange(0, BLOCK)
            distance = tl.load(row + id, mask=id < vocab, other=-float("inf")) - its_best
            exponent, bin = distance * its_factor, _bin_of(distance, BINS)
            is_kept = (id < vocab) & (exponent >= its_lowest)
            is_candidate = is_kept & (bin >= worst) & (bin <= greatest)
            first = tl.atomic_add(own + COUNT, tl.sum(is_candidate.to(tl.int64), axis=0))
            to = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            tl.store(found + r * ROOM + to, exponent, mask=is_candidate & (to < ROOM))
            above += tl.where(is_kept & (bin > greatest), _units(_weight(exponent)), 0)
        tl.atomic_add(own + ABOVE, tl.sum(above, axis=0))
        if part == 0:
            tl.store(own + BETTER, better.to(tl.int64))


@triton.jit
def _search(base, count, best, factor, limit, before, target, WEIGHS: tl.constexpr, SIZE: tl.constexpr):
    """The bits of the greatest number whose equals and betters reach the target; 0 where all together do not. They are
    counted, by exponents (the best one's are the greatest), or weigh, from `limit` on, by weights. before: of those
    that are better than all candidates. Three bits a pass, by seven numbers that are tried together."""
    chosen, shift, digit, lane = count * 0, count * 0 + 28, tl.arange(0, 8), tl.arange(0, SIZE)
    for _ in range(11):
        tried = chosen + (digit << shift)
        sums = tl.full((SIZE, 8), 0, tl.int64)
        for start in range(0, count, SIZE):
            is_there = start + lane < count
            exponent = (tl.load(base + start + lane, mask=is_there, other=-float("inf")) - best) * factor
            if WEIGHS:
                weight = _weight(exponent)
                bits = weight.to(tl.int32, bitcast=True)
                adds = tl.where(is_there & (exponent >= limit), (weight * UNITS).to(tl.int64), 0)
            else:
                bits = -((exponent.to(tl.int32, bitcast=True) & 0x7FFFFFFF) - INFINITY)
                adds = is_there.to(tl.int64)
            sums += tl.where(bits[:, None] >= tried[None, :], adds[:, None], 0)
        is_enough = (before + tl.sum(sums, axis=0)).to(tl.float64) >= target
        chosen += tl.sum((is_enough & (digit > 0)).to(tl.int32), axis=0) << shift
        shift = tl.where(shift > 3, shift - 3, 0)
    return chosen


@triton.jit
def _kept(base, count, best, factor, limit, least_bits, SIZE: tl.constexpr):
    """The weight of the candidates from `limit` on, and the least exponent of those whose weight has so many bits."""
    total, edge = tl.full((SIZE,), 0, tl.int64), tl.full((SIZE,), float("inf"), tl.float32)
    for start in range(0, count, SIZE):
        i = start + tl.arange(0, SIZE)
        exponent = (tl.load(base + i, mask=i < count, other=-float("inf")) - best) * factor
        weight, is_kept = _weight(exponent), (i < count) & (exponent >= limit)
        total += tl.where(is_kept, _units(weight), 0)
        edge = tl.where(is_kept & (_magnitude(weight) >= least_bits), tl.minimum(edge, exponent), edge)
    return tl.sum(total, axis=0), tl.min(edge, axis=0)


@triton.jit(do_not_specialize=["stride", "vocab"], do_not_specialize_on_alignment=UNALIGNED)
def cut_rows(
    logits, stride, vocab, best, at, factor, lowest, top_k, top_p, sums, found, edges,
    ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """edges: float32 [R], the least exponent that each row keeps."""
    r = tl.program_id(0).to(tl.int64)
    its_factor, limit = tl.load(factor + r), tl.load(lowest + r)
    k, p = tl.load(top_k + r), tl.load(top_p + r)
    is_limited, is_cut = _cuts(k, p, its_factor, vocab)
    if is_cut:
        own, place = sums + r * SUMS, tl.load(at + r)
        base, its_best, count = found + r * ROOM, its_factor * 0.0, tl.load(own + COUNT).to(tl.int32)
        total, above, better = tl.load(own + TOTAL), tl.load(own + ABOVE), tl.load(own + BETTER)
        scale = its_best + 1.0
        if count > ROOM:
            base, its_best, scale, count = logits + place * stride, tl.load(best + place), its_factor, vocab
            above, better = above * 0, better * 0
        if is_limited:
            bits = _search(base, count, its_best, scale, limit, better, k.to(tl.float64), False, SIZE)
            limit = tl.maximum(limit, -(-(bits - INFINITY)).to(tl.float32, bitcast=True))
            total, _ = _kept(base, count, its_best, scale, limit, 0, SIZE)
        if p < 1.0:
            bits = _search(base, count, its_best, scale, limit, above, p * total.to(tl.float64), True, SIZE)
            _, limit = _kept(base, count, its_best, scale, limit, bits, SIZE)
    tl.store(edges + r, limit)


def lowest_of(logits_SV: torch.Tensor, best_S: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Returns the least exponent that each row keeps, float32 [R]; of rows with a factor of 0 some number."""
    at_R, vocab, device = rows.at(), logits_SV.shape[1], logits_SV.device
    whole = triton.cdiv(vocab, BLOCK)
    steps = triton.cdiv(whole, min(whole, triton.cdiv(PROGRAMS, len(at_R))))
    grid = len(at_R), triton.cdiv(whole, steps)
    bins_RB = torch.zeros(len(at_R), BINS, dtype=torch.int32, device=device)
    sums_R4 = torch.zeros(len(at_R), SUMS.value, dtype=torch.int64, device=device)
    found_RC = torch.empty(len(at_R), ROOM, dtype=torch.float32, device=device)
    edges_R = torch.empty(len(at_R), dtype=torch.float32, device=device)
    given = (
        logits_SV, logits_SV.stride(0), vocab, best_S, at_R,
        rows.factor(), rows.lowest(), rows.top_k(), rows.top_p(),
    )  # fmt: skip
    count_bins[grid](*given, bins_RB, sums_R4, steps, BINS=BINS, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False)
    collect_candidates[grid](
        *given, bins_RB, sums_R4, found_RC, steps,
        BINS=BINS, BLOCK=BLOCK, ROOM=ROOM, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    cut_rows[(len(at_R),)](
        *given, sums_R4, found_RC, edges_R, ROOM=ROOM, SIZE=SEARCHED, num_warps=8, enable_fp_fusion=False
    )
    return edges_R
