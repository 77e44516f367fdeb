"""Logit edits and penalties of all places of a step in Triton: three launches, any mix of rows, in a graph or not.

Definitions as in logit_edits.py. Penalties take as long as a row has tokens, whatever the vocabulary: the first kernel
counts the row's tokens in memory of its own, the second one takes each count away again, and who gets it changes that
logit, so the memory is zeros between steps. A place without penalties costs a look at its numbers. Grids depend on
shapes alone. S places, E entries, N rows, L tokens, V vocabulary.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens

IN_PROMPT: Final = tl.constexpr(1 << 30)
"""The bit of a token that the prompt has; the lower ones count it in the output."""
TOKENS: Final = 1024
"""Tokens of a step of a program."""
ENTRIES: Final = 128
"""Entries of a program."""
PROGRAMS: Final = 1024
"""Programs over all places."""
CHANGING: Final = ["stride", "vocab", "width", "count"]
UNALIGNED: Final = ["logits", "tokens", "rows", "positions", "prompts", "repetition", "frequency", "presence"]
"""Numbers and pointers as in triton_sampling.py."""


@triton.jit(do_not_specialize=CHANGING)
def edit_entries(logits, stride, positions, places, ids, untils, added, count, ENTRIES: tl.constexpr):
    """Forbids tokens or adds to their logits."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    place = tl.load(places + e, mask=e < count, other=-1)
    is_there = place >= 0
    at = logits + place.to(tl.int64) * stride + tl.load(ids + e, mask=is_there, other=0)
    position = tl.load(positions + place, mask=is_there, other=0)
    is_forbidden = position < tl.load(untils + e, mask=is_there, other=0)
    more = tl.load(added + e, mask=is_there, other=0.0)
    logit = tl.load(at, mask=is_there, other=0.0)
    logit = tl.where(more != 0.0, logit + more, logit)
    tl.store(at, tl.where(is_forbidden, -float("inf"), logit), mask=is_there)


@triton.jit
def _penalties(repetition, frequency, presence, s):
    """The penalties of a place, and whether it has any."""
    repeats, often, there = tl.load(repetition + s), tl.load(frequency + s), tl.load(presence + s)
    return repeats, often, there, (repeats != 1.0) | (often != 0.0) | (there != 0.0)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def count_tokens(
    tokens, width, rows, positions, prompts, repetition, frequency, presence, counts, vocab, TOKENS: tl.constexpr
):
    """counts: int32 [S, V], zeros."""
    s = tl.program_id(0).to(tl.int64)
    _, _, _, is_penalized = _penalties(repetition, frequency, presence, s)
    if is_penalized:
        end, prompt = tl.load(positions + s), tl.load(prompts + s)
        own, memory = tokens + tl.load(rows + s) * width, counts + s * vocab
        for start in range(tl.program_id(1) * TOKENS, end.to(tl.int32), tl.num_programs(1) * TOKENS):
            i = start + tl.arange(0, TOKENS)
            token = tl.load(own + i, mask=i < end, other=0)
            tl.atomic_or(memory + token, IN_PROMPT, mask=i < tl.minimum(prompt, end))
            tl.atomic_add(memory + token, 1, mask=(i >= prompt) & (i < end))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def penalize_tokens(
    logits, stride, tokens, width, rows, positions, repetition, frequency, presence, counts, vocab,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """counts: as count_tokens has left them; zeros afterwards."""
    s = tl.program_id(0).to(tl.int64)
    repeats, often, there, is_penalized = _penalties(repetition, frequency, presence, s)
    if is_penalized:
        end = tl.load(positions + s)
        own, memory, row = tokens + tl.load(rows + s) * width, counts + s * vocab, logits + s * stride
        for start in range(tl.program_id(1) * TOKENS, end.to(tl.int32), tl.num_programs(1) * TOKENS):
            i = start + tl.arange(0, TOKENS)
            token = tl.load(own + i, mask=i < end, other=0)
            held = tl.where(i < end, tl.atomic_xchg(memory + token, 0, mask=i < end), 0)
            logit = tl.load(row + token, mask=held != 0, other=0.0)
            logit = tl.where(logit > 0.0, tl.div_rn(logit, repeats), logit * repeats)
            count = (held & (IN_PROMPT - 1)).to(tl.float32)
            less = often * count + there * (count > 0.0).to(tl.float32)
            tl.store(row + token, logit - less, mask=held != 0)


def edit_entries_of(logits_SV: torch.Tensor, tokens: RowTokens, edits: LogitEdits[torch.Tensor]) -> None:
    """Forbids tokens of entries or adds to their logits, in place."""
    entries = len(edits.place_E)
    assert logits_SV.stride(1) == 1
    edit_entries[(triton.cdiv(entries, ENTRIES),)](
        logits_SV, logits_SV.stride(0), tokens.positions_S, edits.place_E, edits.id_E, edits.until_E, edits.added_E,
        entries, ENTRIES=ENTRIES,
    )  # fmt: skip


def penalize_all(
    logits_SV: torch.Tensor, tokens: RowTokens, edits: LogitEdits[torch.Tensor], counts_SV: torch.Tensor
) -> None:
    """Penalizes tokens in place. counts_SV: int32 zeros for as many places, which are zeros again."""
    places, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1 and counts_SV.is_contiguous() and counts_SV.shape[1] == vocab
    width = tokens.tokens_NL.shape[1]
    grid = places, min(triton.cdiv(width, TOKENS), triton.cdiv(PROGRAMS, places))
    given = tokens.tokens_NL, width, tokens.rows_S, tokens.positions_S
    penalties = edits.repetition_S, edits.frequency_S, edits.presence_S
    count_tokens[grid](*given, edits.prompt_S, *penalties, counts_SV, vocab, TOKENS=TOKENS)
    penalize_tokens[grid](
        logits_SV, logits_SV.stride(0), *given, *penalties, counts_SV, vocab, TOKENS=TOKENS, enable_fp_fusion=False
    )
