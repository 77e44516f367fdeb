"""SamplingOps for GPUs in Triton: a draw reads each row's logits once, with the noise made in registers.

Definitions as in sampling_ops.py, whose TorchSampling is the twin and does the rest here too: the best tokens. Bounds
of rows with top-k or top-p are those of triton_truncation.py. Noise as in gumbel_noise.py, to the last bit: no
operation is fused. A row is cut into parts, so that few rows fill a device too, and a second kernel compares the parts.
One sequence of calls serves any mix of rows, and a graph may hold it. Grids depend on shapes alone.
Imported only where Triton is installed. S rows of a step, R of them random, V vocabulary, P parts.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels import gumbel_noise
from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens
from tandem.workers.kernels.sampling_ops import Draws, DrawTokens, RandomRows, TorchSampling
from tandem.workers.kernels.sampling_rules import SamplingRules
from tandem.workers.kernels.step_arrays import Send
from tandem.workers.kernels.triton.sampling import triton_edits, triton_logprobs, triton_rules
from tandem.workers.kernels.triton.sampling.triton_truncation import lowest_of

ROUNDS: Final = tl.constexpr(gumbel_noise.ROUNDS)
BELOW_ONE: Final = tl.constexpr(gumbel_noise.BELOW_ONE)
LEAST_BITS: Final = tl.constexpr(gumbel_noise.LEAST_BITS)
LN2: Final = tl.constexpr(gumbel_noise.LN2)
COUNTERS: Final = 256
"""Counters of a step of a program, which are four times as many ids."""
PROGRAMS: Final = 512
"""Programs that keep a device busy: rows are cut into parts until there are as many."""
MOST_PARTS: Final = 64
NO_ID: Final = tl.constexpr(2**31 - 1)
CHANGING: Final = ["stride", "begin", "vocab", "steps", "parts"]
"""Integers that differ between models and steps. Triton would compile a kernel anew for each 1 and multiple of 16."""
UNALIGNED: Final = ["logits", "best", "at", "factor", "lowest", "seeds", "choices", "positions", "ids"]
"""Pointers into other tensors, for which it would do the same by their alignment."""


@triton.jit
def _log(power, f):
    """ln(2^power * (1 + f)) for f in [-1/4, 1/2)."""
    ratio = f * 0.08561437 + -0.16933757
    ratio = ratio * f + 0.20627064
    ratio = ratio * f + -0.25044364
    ratio = ratio * f + 0.33318055
    ratio = ratio * f + -0.49999198
    ratio = ratio * f + 1.0
    return power * LN2 + ratio * f


@triton.jit
def _power(y):
    """The power of two of a positive y, beside which it is a number in [3/4, 3/2)."""
    return (y.to(tl.int32, bitcast=True) - LEAST_BITS) >> 23


@triton.jit
def _rest(y, power):
    """The rest of it beside that power of two, less 1."""
    return (y.to(tl.int32, bitcast=True) - (power << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _noise(word):
    """The noise that a 32-bit word means."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), BELOW_ONE)
    power = _power(1.0 - v)
    waited = -_log(power.to(tl.float32), tl.where(power == 0, -v, _rest(1.0 - v, power)))
    power = _power(waited)
    return -_log(power.to(tl.float32), _rest(waited, power))


@triton.jit
def _better(word, which, row, first, begin, vocab, best, factor, lowest, top, top_id):
    """The better of what each lane has and the id that one of the four words is of."""
    id = first + 16 * which
    seen = (id >= begin) & (id < begin + vocab)
    exponent = (tl.load(row + (id - begin), mask=seen, other=-float("inf")) - best) * factor
    score = tl.where(seen & (exponent >= lowest), exponent + _noise(word), -float("inf"))
    wins = score > top  # ids of a lane ascend
    return tl.where(wins, score, top), tl.where(wins, id, top_id)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def draw_parts(
    logits, stride, begin, vocab, best, at, factor, lowest, seeds, choices, positions, scores, ids, steps,
    COUNTERS: tl.constexpr,
):  # fmt: skip
    """scores, ids: [R, P], the greatest sum of exponent and noise in `steps` times 4 * COUNTERS ids, and its first id,
    of the vocabulary or of a part of so many ids from `begin` on."""
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(at + r)
    row, its_best = logits + place * stride, tl.load(best + place)
    its_factor, its_lowest = tl.load(factor + r), tl.load(lowest + r)
    seed, choice, position = tl.load(seeds + r), tl.load(choices + r), tl.load(positions + place)
    lane = tl.arange(0, COUNTERS)
    none = lane * 0
    top = tl.full((COUNTERS,), -float("inf"), tl.float32)
    top_id = tl.full((COUNTERS,), NO_ID, tl.int32)
    first_step = part * steps
    for step in range(first_step, tl.where(its_factor == 0.0, first_step, first_step + steps)):
        counter = 16 * (begin // 64) + step * COUNTERS + lane
        first = 64 * (counter // 16) + counter % 16
        w0, w1, w2, w3 = tl.philox(
            seed, none + position.to(tl.int32), none + choice.to(tl.int32), counter, none, ROUNDS
        )
        top, top_id = _better(w0, 0, row, first, begin, vocab, its_best, its_factor, its_lowest, top, top_id)
        top, top_id = _better(w1, 1, row, first, begin, vocab, its_best, its_factor, its_lowest, top, top_id)
        top, top_id = _better(w2, 2, row, first, begin, vocab, its_best, its_factor, its_lowest, top, top_id)
        top, top_id = _better(w3, 3, row, first, begin, vocab, its_best, its_factor, its_lowest, top, top_id)
    greatest = tl.max(top, axis=0)
    out = r * tl.num_programs(1) + part
    tl.store(scores + out, greatest)
    tl.store(ids + out, tl.min(tl.where(top == greatest, top_id, NO_ID), axis=0))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def choose_part(scores, part_ids, parts, at, factor, ids, vocab, PARTS: tl.constexpr):
    """ids[at[r]] = the first id of the greatest score of row r; some id of the vocabulary where it has none. Rows with
    a factor of 0 stay as they are."""
    r = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    seen = part < parts
    score = tl.load(scores + r * parts + part, mask=seen, other=-float("inf"))
    id = tl.load(part_ids + r * parts + part, mask=seen, other=NO_ID)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), id, NO_ID), axis=0)
    tl.store(ids + tl.load(at + r), tl.minimum(chosen, vocab - 1).to(tl.int64), mask=tl.load(factor + r) != 0.0)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def pair_part(scores, part_ids, parts, pairs, PARTS: tl.constexpr):
    """pairs: int32 [R, 2], the bits of the greatest score of row r, and its first id."""
    r = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    seen = part < parts
    score = tl.load(scores + r * parts + part, mask=seen, other=-float("inf"))
    id = tl.load(part_ids + r * parts + part, mask=seen, other=NO_ID)
    greatest = tl.max(score, axis=0)
    tl.store(pairs + 2 * r, greatest.to(tl.int32, bitcast=True))
    tl.store(pairs + 2 * r + 1, tl.min(tl.where(score == greatest, id, NO_ID), axis=0))


class TritonSampling(TorchSampling):
    """The kernels, on float32 logits of a GPU."""

    def prepare_draw(self, draws: Draws, send: Send) -> DrawTokens:
        rows = RandomRows.sent(draws, send)

        def draw(logits_SV: torch.Tensor, best_S: torch.Tensor, ids_S: torch.Tensor, positions_S: torch.Tensor) -> None:
            self.choose_all(logits_SV, best_S, ids_S, positions_S, rows)

        return draw

    def edit_all(
        self,
        logits_SV: torch.Tensor,
        tokens: RowTokens,
        edits: LogitEdits[torch.Tensor],
        counts_SV: torch.Tensor,
        rules: SamplingRules[torch.Tensor] | None = None,
    ) -> None:
        triton_edits.edit_entries_of(logits_SV, tokens, edits)
        if rules is not None:
            triton_rules.apply_rules(logits_SV, tokens, edits.prompt_S, rules)
        triton_edits.penalize_all(logits_SV, tokens, edits, counts_SV)

    def keep_logits(
        self, logits_SV: torch.Tensor, rules: SamplingRules[torch.Tensor], kept_MV: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return triton_logprobs.keep_logits(logits_SV, rules, kept_MV)

    def report(
        self,
        logits_SV: torch.Tensor,
        ids_S: torch.Tensor,
        rules: SamplingRules[torch.Tensor],
        kept_MV: torch.Tensor,
        noted: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        return triton_logprobs.report(logits_SV, ids_S, rules, kept_MV, noted)

    def choose_all(
        self,
        logits_SV: torch.Tensor,
        best_S: torch.Tensor,
        ids_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: RandomRows,
    ) -> None:
        lowest_R, at_R = lowest_of(logits_SV, best_S, rows), rows.at()
        scores_RP, ids_RP = _parts_of(logits_SV, 0, best_S, positions_S, rows, lowest_R)
        choose_part[(len(at_R),)](
            scores_RP, ids_RP, scores_RP.shape[1], at_R, rows.factor(), ids_S, logits_SV.shape[1],
            PARTS=MOST_PARTS, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def greatest(
        self,
        part_SV: torch.Tensor,
        first_id: int,
        best_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: RandomRows,
    ) -> torch.Tensor:
        scores_RP, ids_RP = _parts_of(part_SV, first_id, best_S, positions_S, rows, rows.lowest())
        pairs_R2 = torch.empty(len(scores_RP), 2, dtype=torch.int32, device=part_SV.device)
        pair_part[(len(scores_RP),)](
            scores_RP, ids_RP, scores_RP.shape[1], pairs_R2, PARTS=MOST_PARTS, num_warps=1, enable_fp_fusion=False
        )
        return pairs_R2


def _parts_of(
    logits_SV: torch.Tensor,
    first_id: int,
    best_S: torch.Tensor,
    positions_S: torch.Tensor,
    rows: RandomRows,
    lowest_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the greatest sums of exponent and noise in parts of rows, float32, and their ids, int32, [R, P]."""
    at_R, vocab = rows.at(), logits_SV.shape[1]
    assert logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1
    whole = triton.cdiv(first_id % 64 + vocab, 4 * COUNTERS)
    steps = triton.cdiv(whole, min(MOST_PARTS, whole, triton.cdiv(PROGRAMS, len(at_R))))
    parts = triton.cdiv(whole, steps)
    scores_RP = torch.empty(len(at_R), parts, dtype=torch.float32, device=logits_SV.device)
    ids_RP = torch.empty(len(at_R), parts, dtype=torch.int32, device=logits_SV.device)
    draw_parts[(len(at_R), parts)](
        logits_SV, logits_SV.stride(0), first_id, vocab, best_S, at_R, rows.factor(), lowest_R, rows.seed(),
        rows.choice(), positions_S, scores_RP, ids_RP, steps, COUNTERS=COUNTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return scores_RP, ids_RP
