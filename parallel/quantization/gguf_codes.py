"""Codes and scales out of GGUF's blocks. N blocks, uint8 [N, bytes]; the layouts are those of ggml-quants.h."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from tandem.parallel.quantization.coded_weight import CodedWeight


class Decoded(NamedTuple):
    """The contents of N blocks. codes: uint8 [N, elements]; scales: one for each group, float32 [N, groups]; least:
    what a code of 0 stands for, None where codes have a table."""

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None = None


def with_least(weight: CodedWeight, least_OG: torch.Tensor) -> CodedWeight:
    """Returns the weight with zeros, by which a code of 0 stands for least. Groups without a scale are all least: they
    get codes of 0."""
    is_flat = weight.scale_OG == 0
    scale_OG = torch.where(is_flat, 1.0, weight.scale_OG)
    zeroed = replace(weight, scale_OG=scale_OG, zero_OG=-least_OG / scale_OG)
    if bool(is_flat.any()):
        zeroed.codes_OI.masked_fill_(is_flat[:, weight.group_of_I], 0)
    return zeroed


def _floats(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the float16 at that byte of each block, float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Returns two codes of each byte: of each `run` bytes the lower halves, then the upper ones."""
    return _parts(packed, run, 4)


def _parts(packed: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Returns the codes of so many bits in each byte: of each `run` bytes the lowest, then the next ones."""
    count, source = 8 // bits, packed.contiguous()
    found = source.new_empty(len(source), source.shape[1] // run, count, run)
    wide = torch.int64 if run % 8 == 0 else torch.uint8  # eight codes are copied at a time
    for place in range(count):
        codes = (source >> place * bits).bitwise_and_(2**bits - 1).view(found.shape[0], found.shape[1], run)
        found.view(wide)[:, :, place] = codes.view(wide)
    return found.view(len(source), -1)


def _fifth_bits(words: torch.Tensor) -> torch.Tensor:
    """Returns 16 for each bit of bytes that is set, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words[..., None] >> shifts & 1).reshape(len(words), -1) << 4


def _q4_0(blocks: torch.Tensor) -> Decoded:
    return Decoded(_halves(blocks[:, 2:], 16), _floats(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Decoded:
    return Decoded(_halves(blocks[:, 4:], 16), _floats(blocks, 0), _floats(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Decoded:
    return Decoded(_halves(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _floats(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Decoded:
    codes = _halves(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Decoded(codes, _floats(blocks, 0), _floats(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Decoded:
    return Decoded(blocks[:, 2:] ^ 128, _floats(blocks, 0))  # of a signed byte, the same with 128 added


def _q2_k(blocks: torch.Tensor) -> Decoded:
    scales, of_scales, of_least = blocks[:, :16], _floats(blocks, 80), _floats(blocks, 82)
    return Decoded(_parts(blocks[:, 16:80], 32, 2), of_scales * (scales & 15), -of_least * (scales >> 4))


def _q3_k(blocks: torch.Tensor) -> Decoded:
    high = _parts(blocks[:, :32], 32, 1) << 2
    low, upper = _halves(blocks[:, 96:104], 8), _parts(blocks[:, 104:108], 4, 2)
    scales = (low | upper << 4).float() - 32
    return Decoded(_parts(blocks[:, 32:96], 32, 2) | high, _floats(blocks, 108) * scales)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and least values of eight groups, of 12 bytes."""
    one, two, both = packed.split(4, 1)
    scales = torch.cat([one & 63, both & 15 | (one >> 6) << 4], 1)
    return scales.float(), torch.cat([two & 63, both >> 4 | (two >> 6) << 4], 1).float()


def _q4_k(blocks: torch.Tensor) -> Decoded:
    scales, least = _six_bits(blocks[:, 4:16])
    return Decoded(_halves(blocks[:, 16:], 32), _floats(blocks, 0) * scales, -_floats(blocks, 2) * least)


def _q5_k(blocks: torch.Tensor) -> Decoded:
    scales, least = _six_bits(blocks[:, 4:16])
    codes = _halves(blocks[:, 48:], 32) | _parts(blocks[:, 16:48], 32, 1) << 4
    return Decoded(codes, _floats(blocks, 0) * scales, -_floats(blocks, 2) * least)


def _q6_k(blocks: torch.Tensor) -> Decoded:
    codes = _halves(blocks[:, :128], 64) | _parts(blocks[:, 128:192], 32, 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Decoded(codes, _floats(blocks, 208) * scales)


def _iq4_xs(blocks: torch.Tensor) -> Decoded:
    upper, lower = _parts_in_turn(blocks[:, 2:4], 2), _parts_in_turn(blocks[:, 4:8], 4)
    scales = (lower | upper << 4).float() - 32
    return Decoded(_halves(blocks[:, 8:], 16), _floats(blocks, 0) * scales)


def _parts_in_turn(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of bytes, all of a byte before those of the next."""
    return _parts(packed, 1, bits)


DECODERS: Final[Mapping[str, Callable[[torch.Tensor], Decoded]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
}
"""The decoders by the names of kinds. The codes of IQ4 are places in a table."""
