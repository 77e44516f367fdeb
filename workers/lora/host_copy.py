"""This rank's shard of one adapter in host memory, cut and laid out as its device pages will be.

Made by the source mover from a checked PEFT folder, copied to the device page by page. Column-parallel layers cut B's
rows as they cut the weight's outputs, row-parallel ones A's columns as the weight's inputs; the other matrix is whole.
Copies a few rows at a time: operations so small run on the calling thread alone and leave the cores to the steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from parallel.linear import Cut
from workers.errors import AdapterRefused
from workers.lora.layout import Ints, Packing, ShardShape, pack, row_strides
from workers.peft_folder import LoraModule, PeftAdapter, TensorAt

SERIAL_ELEMENTS: Final = 2**15
"""torch spreads elementwise operations on more elements than that over its threads."""
DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """pages_NE: the adapter's pages in the model's dtype, pinned where the device needs it. ranks_S, scales_S: of each
    section, rank 0 where the adapter leaves it alone."""

    pages_NE: torch.Tensor
    packing: Packing
    ranks_S: Ints
    scales_S: np.ndarray[tuple[int], np.dtype[np.float32]]

    @property
    def num_pages(self) -> int:
        return self.packing.num_pages


def cut_shard(adapter: PeftAdapter, shape: ShardShape, dtype: torch.dtype, *, pin: bool) -> HostCopy:
    """AdapterRefused when a number does not fit dtype."""
    modules = {module.name: module for module in adapter.facts.modules}
    found = [modules.get(part.name) for part in shape.parts]
    ranks_S = np.array([0 if module is None else module.rank for module in found], np.int64)
    scales_S = np.array([0.0 if module is None else module.scale for module in found], np.float32)
    packing = pack(shape, ranks_S)
    pages_NE = torch.zeros(packing.num_pages, shape.page_elements, dtype=dtype, pin_memory=pin)
    starts_2SR = packing.starts(range(packing.num_pages), shape.page_elements)
    strides_2S = row_strides(shape.lengths_2S)
    for section, (part, module) in enumerate(zip(shape.parts, found, strict=True)):
        if module is not None:
            a_RI, b_RO = _rows(adapter, module, part.inputs, part.outputs)
            _lay(a_RI, starts_2SR[0, section], strides_2S[0, section], pages_NE, module.a)
            _lay(b_RO, starts_2SR[1, section], strides_2S[1, section], pages_NE, module.b)
    return HostCopy(pages_NE, packing, ranks_S, scales_S)


def _rows(adapter: PeftAdapter, module: LoraModule, inputs: Cut, outputs: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of A and of B transposed, views in the file's dtype."""
    a_RI, b_OR = _matrix(adapter, module.a), _matrix(adapter, module.b)
    return a_RI[:, inputs.start : inputs.start + inputs.length], b_OR[outputs.start : outputs.start + outputs.length].T


def _matrix(adapter: PeftAdapter, tensor: TensorAt) -> torch.Tensor:
    data, dtype = adapter.bytes_of(tensor), DTYPES[tensor.dtype]
    aligned = data if tensor.start % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).view(tensor.shape)


def _lay(rows_RN: torch.Tensor, starts_R: Ints, stride: int, pages_NE: torch.Tensor, tensor: TensorAt) -> None:
    """`stride`: elements between rows that are neighbours in a page."""
    flat, narrows = pages_NE.view(-1), rows_RN.dtype != pages_NE.dtype
    rank, length = rows_RN.shape
    for first, last in _neighbours(starts_R[:rank], stride, max(1, SERIAL_ELEMENTS // stride)):
        target = flat.as_strided((last - first, length), (int(stride), 1), int(starts_R[first]))
        target.copy_(rows_RN[first:last])
        if narrows and not target.isfinite().all():
            raise AdapterRefused(f"tensor {tensor.name} holds a number beyond {pages_NE.dtype}")


def _neighbours(starts_R: Ints, stride: int, most: int) -> Iterator[tuple[int, int]]:
    """[first, last) of runs of rows that lie one behind the other, `most` at once."""
    first = 0
    for row in range(1, len(starts_R) + 1):
        if row == len(starts_R) or starts_R[row] != starts_R[row - 1] + stride or row - first == most:
            yield first, row
            first = row
