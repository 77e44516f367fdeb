"""Memory in huge pages: pieces that weights share, and what the system is asked for."""

import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertParams, StackedExperts
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.schemes import Coded
from tandem.workers.kernels.cpu.cpu_build import cpu_invariant_library
from tandem.workers.kernels.cpu.cpu_code_gemm import code_gemm
from tandem.workers.kernels.huge_pages import HUGE_PAGE, HugePages
from tandem.workers.kernels.invariant.row_gemm import RowMethod, row_methods
from tandem.workers.platforms.cpu import CpuPlatform


def flags_at(address: int) -> set[str]:
    """What the system notes of the mapping with that address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"no mapping has {address:#x}")


def test_weights_are_zeros_side_by_side_at_cache_lines() -> None:
    pages = HugePages(2 * HUGE_PAGE)
    weights = [pages.zeros(size) for size in (1, 64, 100, HUGE_PAGE - 1)]
    assert [len(weight) for weight in weights] == [1, 64, 100, HUGE_PAGE - 1]
    assert all(weight.dtype is torch.uint8 and not weight.any() for weight in weights)
    first = weights[0].data_ptr()
    assert [weight.data_ptr() - first for weight in weights[:3]] == [0, 64, 128]
    for number, weight in enumerate(weights, 1):
        weight.fill_(number)
    assert [int(weight.min()) for weight in weights] == [int(weight.max()) for weight in weights] == [1, 2, 3, 4]


def test_weights_that_share_a_piece_are_written_in_any_mode() -> None:
    pages = HugePages(2 * HUGE_PAGE)
    with torch.inference_mode():
        first, large = pages.zeros(64), pages.zeros(HUGE_PAGE)
    pages.zeros(64).fill_(1)
    for weight in (first, large):
        weight.fill_(2)


def test_a_large_weight_begins_a_huge_page_of_its_own() -> None:
    pages = HugePages(2 * HUGE_PAGE)
    small, large, next_small = pages.zeros(64), pages.zeros(3 * HUGE_PAGE + 1), pages.zeros(64)
    assert large.data_ptr() % HUGE_PAGE == small.data_ptr() % HUGE_PAGE == 0
    assert next_small.data_ptr() == small.data_ptr() + 64
    assert len(large) == 3 * HUGE_PAGE + 1


def test_a_piece_is_freed_with_its_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def __init__(self, *args: Any) -> None:
            pieces.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Noted)
    pages = HugePages(2 * HUGE_PAGE)
    weights = [pages.zeros(HUGE_PAGE - 64) for _ in range(4)]  # two in a piece
    assert len(pieces) == 2
    del weights[0]
    gc.collect()
    assert [piece() is None for piece in pieces] == [False, False]
    del weights[0]
    gc.collect()
    assert [piece() is None for piece in pieces] == [True, False]


HAS_HUGE_PAGES = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)


@HAS_HUGE_PAGES
def test_the_system_is_asked_for_huge_pages() -> None:
    assert "hg" in flags_at(HugePages().zeros(1).data_ptr())


@HAS_HUGE_PAGES
def test_dense_weights_of_the_row_gemm_are_in_huge_pages() -> None:
    library = cpu_invariant_library(torch.bfloat16)
    if library is None:
        pytest.skip("needs a C compiler")
    method = row_methods(library, None)((), ParallelContext.single())
    method.take(torch.ones(64, 8, dtype=torch.bfloat16), None)
    assert isinstance(method, RowMethod) and method._packed is not None
    assert "hg" in flags_at(method._packed.data_ptr())


@HAS_HUGE_PAGES
def test_stacks_of_experts_are_in_huge_pages() -> None:
    if code_gemm(torch.bfloat16, 2) is None:
        pytest.skip("needs a CPU with AVX2, and a C compiler")
    weight = Param(name="x", shape=(32, 32), role="x", source=Source(("x",)), merge="x", scheme=Coded())
    experts = [ExpertParams((weight,), ()) for _ in range(2)]
    stack = CpuPlatform().experts(torch.bfloat16).method(experts, ParallelContext.single())
    assert isinstance(stack, StackedExperts)
    for slot in stack.slots():
        slot.accept(torch.ones(32, 32))
    assert "hg" in flags_at(stack.weights().data_ptr())
