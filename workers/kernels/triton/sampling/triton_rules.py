"""Masks, bad words and budgets of thinking in Triton, by one launch for all places of a step.

Definitions as in sampling_rules.py. A place without rules costs a look at where they begin. A program has a slice of
the vocabulary, of which it forbids what the mask does; the first one of a place has its words and its thinking too. No
logit is written by two programs: a preferred one that is forbidden stays as the mask's program leaves it. S places, N
rows, L tokens, V vocabulary.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels import sampling_rules
from tandem.workers.kernels.logit_edits import RowTokens
from tandem.workers.kernels.sampling_rules import SamplingRules

MASK: Final = tl.constexpr(sampling_rules.MASK)
WORDS: Final = tl.constexpr(sampling_rules.WORDS)
THINKING: Final = tl.constexpr(sampling_rules.THINKING)
WORD_TOKENS: Final = tl.constexpr(sampling_rules.WORD_TOKENS)
WORD_SIZE: Final = tl.constexpr(sampling_rules.WORD_SIZE)
MARK_TOKENS: Final = tl.constexpr(sampling_rules.MARK_TOKENS)
SPAN: Final = tl.constexpr(sampling_rules.SPAN)
PREFERENCE: Final = tl.constexpr(sampling_rules.PREFERENCE)
BLOCK: Final = 1024
"""Tokens of the vocabulary of a step of a program."""
PROGRAMS: Final = 1024
"""Programs over all places."""


@triton.jit
def _ends_with(own, end, mark, size):
    """Returns whether the tokens before `end` end with the first ones of a mark."""
    lane = tl.arange(0, MARK_TOKENS)
    is_in = lane < size
    token = tl.load(own + (end - size + lane), mask=is_in & (end - size + lane >= 0), other=-1)
    differs = is_in & (token != tl.load(mark + lane))
    return tl.sum(differs.to(tl.int32), axis=0) == 0


@triton.jit
def _preferred(own, position, span):
    """The next token of the end mark, where the thinking is over its budget, else -1; read on from where the host
    is."""
    inside, thought, since = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    budget, read, start_len, end_len = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5), tl.load(span + 6)
    start, end = span + SPAN, span + SPAN + MARK_TOKENS
    for at in range(read, position):
        since += 1
        thought += inside
        size = tl.where(inside > 0, end_len, start_len)
        mark = start + inside * MARK_TOKENS
        is_mark = ((since >= size) & _ends_with(own, at + 1, mark, size)).to(tl.int32)
        thought -= is_mark * inside * end_len
        inside = inside ^ is_mark
        since = since * (1 - is_mark)
    begun = inside * 0
    for size in range(1, end_len):
        fits = (size <= since) & _ends_with(own, position, end, begun * 0 + size)
        begun = tl.where(fits, begun * 0 + size, begun)
    is_over = (inside > 0) & (thought - begun >= budget)
    return tl.where(is_over, tl.load(end + begun), -1)


@triton.jit(do_not_specialize=["stride", "vocab", "width"], do_not_specialize_on_alignment=["logits", "tokens"])
def apply_places(logits, stride, vocab, tokens, width, rows, positions, prompts, begins, numbers, BLOCK: tl.constexpr):
    """Carries out the rules of a place."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(begins + s)
    if begin >= 0:
        row, header = logits + s * stride, numbers + begin
        mask_at, words_at, span_at = tl.load(header + MASK), tl.load(header + WORDS), tl.load(header + THINKING)
        position, prompt = tl.load(positions + s).to(tl.int32), tl.load(prompts + s).to(tl.int32)
        own = tokens + tl.load(rows + s) * width
        if part == 0:
            preferred = begin * 0 - 1
            if span_at >= 0:
                preferred = _preferred(own, position, numbers + span_at)
            if (preferred >= 0) & (mask_at >= 0):
                word = tl.load(numbers + mask_at + preferred // 32)
                preferred = tl.where((word >> (preferred % 32)) & 1 > 0, preferred, -1)
            if words_at >= 0:
                lane = tl.arange(0, WORD_TOKENS)
                for which in range(tl.load(numbers + words_at)):
                    word = numbers + words_at + 1 + which * WORD_SIZE
                    last, size = tl.load(word), tl.load(word + 1)
                    at = position - 1 - lane
                    token = tl.load(own + at, mask=(lane < size) & (at >= prompt), other=-1)
                    differs = (lane < size) & (token != tl.load(word + 2 + lane))
                    if tl.sum(differs.to(tl.int32), axis=0) == 0:
                        tl.store(row + last, -float("inf"))
                        preferred = tl.where(preferred == last, -1, preferred)
            if preferred >= 0:
                tl.store(row + preferred, tl.load(row + preferred) + PREFERENCE)
        if mask_at >= 0:
            for start in range(part * BLOCK, vocab, tl.num_programs(1) * BLOCK):
                id = start + tl.arange(0, BLOCK)
                word = tl.load(numbers + mask_at + id // 32, mask=id < vocab, other=-1)
                tl.store(row + id, -float("inf"), mask=(id < vocab) & (((word >> (id % 32)) & 1) == 0))


def apply_rules(
    logits_SV: torch.Tensor, tokens: RowTokens, prompt_S: torch.Tensor, rules: SamplingRules[torch.Tensor]
) -> None:
    """Changes the logits in place."""
    places, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1
    grid = places, min(triton.cdiv(vocab, BLOCK), triton.cdiv(PROGRAMS, places))
    apply_places[grid](
        logits_SV, logits_SV.stride(0), vocab, tokens.tokens_NL, tokens.tokens_NL.shape[1], tokens.rows_S,
        tokens.positions_S, prompt_S, rules.begin_S, rules.numbers_I, BLOCK=BLOCK,
    )  # fmt: skip
