"""Captures of kernel calls: what a replay runs, what it reads anew, and what cannot be captured."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Arena, Kernel, Scratch, capturing

WIDTH = 32


def silu_mul() -> Kernel:
    library = cpu_library(torch.float32)
    if library is None:
        pytest.skip("no compiler")
    return Kernel(library, "silu_mul", POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT)


def gate(kernel: Kernel, x_TM: torch.Tensor) -> torch.Tensor:
    out_TM = torch.empty(x_TM.shape[0], WIDTH)
    kernel(x_TM.data_ptr(), x_TM.stride(0), out_TM.data_ptr(), x_TM.shape[0], WIDTH, 1)
    return out_TM


def expected(x_TM: torch.Tensor) -> torch.Tensor:
    first, second = x_TM.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


@torch.inference_mode()
def test_kernels_and_copies_are_replayed_in_place() -> None:
    kernel, given, seen = silu_mul(), torch.randn(3, 2 * WIDTH), torch.zeros(3, 2 * WIDTH)
    with capturing(Arena()) as calls:
        seen.copy_(given)
        out = gate(kernel, seen.view(-1, 2 * WIDTH)).view(3, WIDTH)
    assert calls.is_whole
    torch.testing.assert_close(out, expected(given))
    given.copy_(torch.randn(3, 2 * WIDTH))
    calls.replay()
    torch.testing.assert_close(out, expected(given))


@torch.inference_mode()
def test_cells_and_scratch_are_read_at_each_replay() -> None:
    kernel, x_TM, scratch = silu_mul(), torch.randn(4, 2 * WIDTH), Scratch()
    rows = ctypes.c_long(1)
    scratch.reserve(WIDTH)
    with capturing(Arena()) as calls:
        kernel(x_TM.data_ptr(), x_TM.stride(0), scratch.address, rows, WIDTH, 1)
    rows.value = 4
    before = scratch.address.value
    scratch.reserve(4 * WIDTH)
    assert scratch.address.value != before
    calls.replay()
    found = torch.frombuffer((ctypes.c_float * (4 * WIDTH)).from_address(scratch.address.value), dtype=torch.float32)
    torch.testing.assert_close(found.view(4, WIDTH), expected(x_TM))


@torch.inference_mode()
def test_sums_in_place_are_captured() -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    with capturing(Arena()) as calls:
        x.add_(y).mul_(0.5)
        y.zero_()
    assert calls.is_whole and torch.equal(x, torch.ones(3, 4))
    calls.replay()
    assert torch.equal(x, torch.full((3, 4), 0.5)) and not y.any()


@pytest.mark.parametrize(
    "more",
    [lambda x: x + 1, lambda x: x.sub_(1), lambda x: x.clone(), lambda x: x.t().contiguous(), lambda x: x[0, 0].item()],
    ids=["new", "in-place", "clone", "reordered", "read"],
)
@torch.inference_mode()
def test_other_torch_operations_spoil_a_capture(more: object) -> None:
    x = torch.randn(3, 4)
    with capturing(Arena()) as calls:
        x.view(12).split(4)[1].unflatten(0, (2, 2)).flatten()
    assert calls.is_whole
    with capturing(Arena()) as calls:
        more(x)  # type: ignore[operator]
    assert not calls.is_whole
    with pytest.raises(AssertionError):
        calls.replay()


@torch.inference_mode()
def test_scratch_that_grows_during_a_capture_is_not_the_arenas() -> None:
    scratch, arena = Scratch(), Arena()
    with capturing(arena) as calls:
        scratch.reserve(1000)
    assert calls.is_whole and not calls.kept and arena._halves == ([], [])


def test_capturing_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """It takes a second to import, and makes a folder."""
    code = (
        "import sys, torch; from tandem.workers.kernels.cpu.cpu_calls import Arena, capturing\n"
        "with torch.inference_mode(), capturing(Arena()): torch.empty(3).view(3).copy_(torch.ones(3))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]" and not [*tmp_path.iterdir()]


def test_an_arena_gives_its_memory_again_two_layers_later() -> None:
    arena, layers = Arena(), []
    for _ in range(4):
        arena.turn()
        layers.append([arena.take(100).data_ptr(), arena.take(100).data_ptr()])
    assert layers[0] == layers[2] and layers[1] == layers[3] and len({*layers[0], *layers[1]}) == 4


@torch.inference_mode()
def test_a_capture_keeps_its_memory_when_the_arena_replaces_it() -> None:
    kernel, arena, x_TM = silu_mul(), Arena(), torch.randn(2, 2 * WIDTH)
    with capturing(arena) as calls:
        out = gate(kernel, x_TM)
    arena.turn()
    arena.turn()
    others = [arena.take(2**20).fill_(7)]
    x_TM.copy_(torch.randn(2, 2 * WIDTH))
    calls.replay()
    torch.testing.assert_close(out, expected(x_TM))
    assert torch.equal(others[0], torch.full_like(others[0], 7))
    assert [chunk.data_ptr() for chunk in calls.kept if isinstance(chunk, torch.Tensor)] == [out.data_ptr()]


@torch.inference_mode()
def test_calls_of_another_thread_are_not_captured() -> None:
    kernel, x_TM, answers = silu_mul(), torch.randn(1, 2 * WIDTH), []
    with capturing(Arena()) as calls:
        beside = threading.Thread(target=lambda: answers.append(gate(kernel, x_TM)))
        beside.start()
        beside.join()
    answers[0].fill_(7)
    calls.replay()
    assert torch.equal(answers[0], torch.full_like(answers[0], 7)) and not calls.kept
