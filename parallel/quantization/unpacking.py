"""Codes out of words and bytes, and the rows and columns that a rank has of them. R rows."""

import torch

from tandem.parallel.quantization.stored_parts import Cut

PIECE_CODES = 2**22
"""Codes that are unpacked at a time where they cross words."""


def unpacked(words_RW: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of rows of words, uint8 [R, 32 / bits * W]: code i stands at bit i * bits of its row, from the
    lowest on, and may cross words. words: int32."""
    words_RW = words_RW.to(torch.int32).clone(memory_format=torch.contiguous_format)
    if bits in (2, 4, 8):
        bytes_RB = words_RW.view(torch.uint8)
        mask = 2**bits - 1
        shifts = range(0, 8, bits)
        return bytes_RB if bits == 8 else torch.stack([bytes_RB >> shift & mask for shift in shifts], -1).flatten(1)
    step = max(1, PIECE_CODES // max(1, words_RW.shape[1] * 32 // bits))
    return torch.cat([_crossing(words_RW[first : first + step], bits) for first in range(0, len(words_RW), step)])


def _crossing(words_RW: torch.Tensor, bits: int) -> torch.Tensor:
    wide = torch.nn.functional.pad(words_RW.long() & 0xFFFFFFFF, (0, 1))
    starts = torch.arange(words_RW.shape[1] * 32 // bits, device=words_RW.device) * bits
    word, shift = starts // 32, starts % 32
    pairs = wide[:, word] | wide[:, word + 1] << 32
    return (pairs >> shift & 2**bits - 1).to(torch.uint8)


def nibbles(bytes_RB: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Returns two codes of each byte, uint8 [R, 2 B]."""
    halves = bytes_RB & 15, bytes_RB >> 4
    return torch.stack(halves[::-1] if high_first else halves, -1).flatten(1)


def cut_rows(codes: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Returns the rows of a cut, padded with zeros, in memory of their own."""
    return _cut(codes, cut, 0)


def cut_columns(codes: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Returns the columns of a cut, in memory of their own."""
    return _cut(codes, cut, 1)


def _cut(codes: torch.Tensor, cut: Cut, dim: int) -> torch.Tensor:
    shape, present = list(codes.shape), sum(count for _, count in cut.pieces)
    shape[dim] = cut.length
    found = codes.new_empty(shape)
    target = found.narrow(dim, 0, present)
    if len(cut.pieces) == 1:
        target.copy_(codes.narrow(dim, *cut.pieces[0]))
    elif present:
        places = [torch.arange(first, first + count, device=codes.device) for first, count in cut.pieces]
        target.copy_(codes.index_select(dim, torch.cat(places)))
    found.narrow(dim, present, cut.length - present).zero_()
    return found
