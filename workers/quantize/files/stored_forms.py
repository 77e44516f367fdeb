"""Tensors of compressed-tensors, as which a quantized layer is written, under the names of the source checkpoint.

pack-quantized: weight_packed I32 [O, words], code i at bit i * bits of its row; weight_scale [O, G];
weight_zero_point I32 [words, G], packed along outputs; weight_shape. int-quantized: weight I8 [O, I], weight_scale
[O, 1]. A fused tensor has the rows of several projections. What is not quantized keeps its dtype. O outputs, I inputs,
G groups, R rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.parallel.params import Param
from tandem.workers.quantize.files.tensor_file import WrittenTensor, of_memory
from tandem.workers.quantize.rounding.integer_grid import RoundedMatrix

PIECE_ROWS = 512


@dataclass(frozen=True, slots=True)
class QuantizedParam:
    """The rows of a projection."""

    param: Param
    matrix: RoundedMatrix


def packed_words(codes_RI: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns rows of codes as rows of 32-bit words, bit behind bit from the lowest on."""

    def words(part: torch.Tensor) -> torch.Tensor:
        strings = np.unpackbits(part.numpy()[..., None], axis=-1, bitorder="little", count=bits).reshape(len(part), -1)
        padded = np.pad(strings, ((0, 0), (0, -strings.shape[1] % 32)))
        return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view("<i4"))

    return torch.cat([words(part.contiguous()) for part in codes_RI.split(PIECE_ROWS)])


def quantized_tensors(name: str, parts: Sequence[QuantizedParam], *, packs: bool) -> Iterator[WrittenTensor]:
    """Yields the tensors in place of one. name: its name; parts: the projections whose rows it has."""
    stem, first = name.removesuffix(".weight"), parts[0].matrix
    codes_OI = in_stored_rows([(one.param, one.matrix.codes_OI) for one in parts])
    scale_OG = in_stored_rows([(one.param, one.matrix.scale_OG) for one in parts])
    if not packs:
        yield of_memory(f"{stem}.weight_scale", scale_OG)
        yield of_memory(f"{stem}.weight", (codes_OI ^ 128).view(torch.int8))
        return
    bits = first.grid.bits
    yield of_memory(f"{stem}.weight_scale", scale_OG)
    if first.zero_OG is not None:
        zeros = [(one.param, one.matrix.zero_OG) for one in parts if one.matrix.zero_OG is not None]
        yield of_memory(f"{stem}.weight_zero_point", packed_words(in_stored_rows(zeros).T, bits).T)
    yield of_memory(f"{stem}.weight_shape", torch.tensor(codes_OI.shape, dtype=torch.int64))
    yield of_memory(f"{stem}.weight_packed", packed_words(codes_OI, bits))


def dense_tensor(
    name: str, params: Sequence[Param], values: Mapping[str, torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> WrittenTensor:
    """Returns a tensor as it is stored, of what its parameters hold in float32. shape: that it is stored in."""
    rows = in_stored_rows([(param, values[param.name] - param.source.add) for param in params])
    return of_memory(name, (rows.T if params[0].source.transposed else rows).to(dtype).reshape(shape))


def in_stored_rows(parts: Sequence[tuple[Param, torch.Tensor]]) -> torch.Tensor:
    """Returns parameters' rows in the order of the tensor that they are stored in."""
    first, given = parts[0]
    source = first.source
    if len(parts) == 1 and source.rows is None and source.run is None and not source.order and not source.start:
        return given
    count = sum(len(rows) for _, rows in parts) if source.rows is None else source.rows
    stored = given.new_empty(count, *given.shape[1:])
    for param, rows in parts:
        start = 0
        for first_row, length in param.source.stored(0, len(rows)):
            stored[first_row : first_row + length] = rows[start : start + length]
            start += length
    return stored
