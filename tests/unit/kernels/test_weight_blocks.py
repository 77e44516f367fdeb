"""Packing of weights into blocks: the kernel against its twin, whole and ragged sizes."""

import pytest
import torch

from tandem.workers.kernels.cpu import weight_blocks
from tandem.workers.kernels.cpu.cpu_build import obstacle
from tandem.workers.kernels.cpu.weight_blocks import BLOCK, in_blocks, torch_in_blocks
from tests.support.pairwise import all_pairs

needs_kernel = pytest.mark.skipif(obstacle(torch.bfloat16) is not None, reason="no compiler")
FORMS = [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1)]
SIZES = [(64, 32), (1, 2), (65, 34), (130, 96), (63, 62), (192, 16), (200, 1000), (2 * BLOCK, 30)]


def numbers(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct patterns of bits, as far as the dtype has them."""
    count = torch.arange(outputs * inputs, dtype=torch.int32)
    bits = (count * 7919 + 1).to(torch.int16) if dtype is torch.bfloat16 else count * 7919 + 1
    return bits.view(dtype).view(outputs, inputs)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.view(torch.int16), second.view(torch.int16))


@needs_kernel
@pytest.mark.parametrize(("form", "size", "threads"), all_pairs(FORMS, SIZES, (1, 2)), ids=str)
def test_bits_are_those_of_the_twin(
    form: tuple[torch.dtype, int], size: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dtype, together), (outputs, inputs) = form, size
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight_OI = numbers(outputs, inputs, dtype)
    packed = in_blocks(weight_OI, together)
    assert packed.shape == (-(-outputs // BLOCK), inputs // together, BLOCK, together)
    assert same(packed, torch_in_blocks(weight_OI, together))


@needs_kernel
def test_a_weight_whose_rows_are_apart_is_packed_too() -> None:
    weight_OI = numbers(32, 70, torch.bfloat16).T
    assert same(in_blocks(weight_OI, 1), torch_in_blocks(weight_OI, 1))


def test_without_the_kernel_torch_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_blocks, "pack_kernel", lambda dtype: None)
    weight_OI = numbers(65, 4, torch.bfloat16)
    packed = in_blocks(weight_OI, 2)
    assert packed[1, 1, 0].tolist() == weight_OI[64, 2:4].tolist() and not packed[1, :, 1:].any()
