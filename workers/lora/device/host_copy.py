"""This rank's shard of one adapter in host memory, laid out as its device pages will be.

Made by the source lane from a checked PEFT folder, copied to the device page by page. Column-parallel layers shard
B's rows as they shard the weight's outputs, row-parallel ones A's columns as the weight's inputs; the other is whole.
Copies a few rows at a time: operations so small run on the calling thread alone and leave the cores to the steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.copies.host_slab import HostSlab
from tandem.parallel.linear import LinearPart
from tandem.workers.lora.device.layout import Ints, Packing, ShardShape, pack
from tandem.workers.lora.peft.peft_folder import LoraModule, PeftAdapter, TensorAt
from tandem.workers.messages.errors import AdapterRefused
from tandem.workers.planning.adapter_room import row_stride

SERIAL_ELEMENTS: Final = 2**15
"""torch spreads elementwise operations on more elements than that over its threads."""
DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """pages_NE: the adapter's pages in the model's dtype, in a slab of their own. ranks_S, scales_S: of each
    projection, rank 0 where the adapter leaves it alone."""

    pages_NE: torch.Tensor
    packing: Packing
    ranks_S: Ints
    scales_S: np.ndarray[tuple[int], np.dtype[np.float32]]
    memory: HostSlab | None = None

    @property
    def num_pages(self) -> int:
        return self.packing.num_pages

    def close(self) -> None:
        """Ends the pages' registration with the device; no copy may be under way or follow. Idempotent."""
        if self.memory is not None:
            self.memory.close()


def make_shard(adapter: PeftAdapter, shape: ShardShape, dtype: torch.dtype, accelerator: Accelerator) -> HostCopy:
    """AdapterRefused when a number does not fit dtype, OSError without the memory."""
    modules = {module.name: module for module in adapter.facts.modules}
    found = [modules.get(part.module or part.name) for part in shape.parts]
    ranks_S = np.array([0 if module is None else module.rank for module in found], np.int64)
    scales_S = np.array([0.0 if module is None else module.scale for module in found], np.float32)
    packing = pack(shape, ranks_S)
    page_bytes = shape.page_elements * dtype.itemsize
    memory = HostSlab.allocate(packing.num_pages, page_bytes, accelerator) if packing.num_pages else None
    pages_NE = torch.zeros(0, shape.page_elements, dtype=dtype) if memory is None else memory.bytes_SB.view(dtype)
    starts_2SR = packing.starts(range(packing.num_pages), shape.page_elements)
    strides_2S = row_stride(shape.lengths_2S)
    copy = HostCopy(pages_NE, packing, ranks_S, scales_S, memory)
    try:
        for projection, (part, module) in enumerate(zip(shape.parts, found, strict=True)):
            if module is not None:
                a_RI, b_RO = _rows(adapter, module, part)
                _copy_rows(a_RI, starts_2SR[0, projection], strides_2S[0, projection], pages_NE, module.a)
                _copy_rows(b_RO, starts_2SR[1, projection], strides_2S[1, projection], pages_NE, module.b)
    except BaseException:
        copy.close()
        raise
    return copy


def _rows(adapter: PeftAdapter, module: LoraModule, part: LinearPart) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of A and of B transposed, in the file's dtype; views where a projection's rows follow one
    another."""
    a_RI, b_OR = _matrix(adapter, module.a), _matrix(adapter, module.b)
    own = [b_OR[first : first + count] for first, count in part.module_rows()]
    inputs = slice(part.inputs.start, part.inputs.start + part.inputs.length)
    return a_RI[:, inputs], (own[0] if len(own) == 1 else torch.cat(own)).T


def _matrix(adapter: PeftAdapter, tensor: TensorAt) -> torch.Tensor:
    data, dtype = adapter.bytes_of(tensor), DTYPES[tensor.dtype]
    aligned = data if tensor.start % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).view(tensor.shape)


def _copy_rows(rows_RN: torch.Tensor, starts_R: Ints, stride: int, pages_NE: torch.Tensor, tensor: TensorAt) -> None:
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
