"""Recording: what a repetition does, what it reads anew, and what makes a recording useless."""

import ctypes
import threading

import pytest
import torch

from workers.kernels.cpu_build import cpu_library
from workers.kernels.cpu_calls import COUNT, NUMBER, POINTER, Arena, Kernel, Scratch, recording

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
def test_kernels_and_copies_are_repeated_where_they_were() -> None:
    kernel, given, seen = silu_mul(), torch.randn(3, 2 * WIDTH), torch.zeros(3, 2 * WIDTH)
    with recording(Arena()) as calls:
        seen.copy_(given)
        out = gate(kernel, seen.view(-1, 2 * WIDTH)).view(3, WIDTH)
    assert calls.is_whole
    torch.testing.assert_close(out, expected(given))
    given.copy_(torch.randn(3, 2 * WIDTH))
    calls.repeat()
    torch.testing.assert_close(out, expected(given))


@torch.inference_mode()
def test_cells_and_scratch_are_read_at_each_repetition() -> None:
    kernel, x_TM, scratch = silu_mul(), torch.randn(4, 2 * WIDTH), Scratch()
    rows = ctypes.c_long(1)
    scratch.reserve(WIDTH)
    with recording(Arena()) as calls:
        kernel(x_TM.data_ptr(), x_TM.stride(0), scratch.address, rows, WIDTH, 1)
    rows.value = 4
    before = scratch.address.value
    scratch.reserve(4 * WIDTH)
    assert scratch.address.value != before
    calls.repeat()
    found = torch.frombuffer((ctypes.c_float * (4 * WIDTH)).from_address(scratch.address.value), dtype=torch.float32)
    torch.testing.assert_close(found.view(4, WIDTH), expected(x_TM))


@pytest.mark.parametrize(
    "more",
    [lambda x: x + 1, lambda x: x.add_(1), lambda x: x.clone(), lambda x: x.t().contiguous()],
    ids=["new", "in-place", "clone", "reordered"],
)
@torch.inference_mode()
def test_what_else_torch_does_spoils_a_recording(more: object) -> None:
    x = torch.randn(3, 4)
    with recording(Arena()) as calls:
        x.view(12).split(4)[1].unflatten(0, (2, 2)).flatten()
    assert calls.is_whole
    with recording(Arena()) as calls:
        more(x)  # type: ignore[operator]
    assert not calls.is_whole
    with pytest.raises(AssertionError):
        calls.repeat()


def test_an_arena_gives_its_memory_again_two_layers_later_and_recordings_keep_theirs() -> None:
    arena, layers = Arena(), []
    for _ in range(4):
        arena.turn()
        layers.append([arena.take(100).data_ptr(), arena.take(100).data_ptr()])
    assert layers[0] == layers[2] and layers[1] == layers[3] and len({*layers[0], *layers[1]}) == 4
    with torch.inference_mode(), recording(arena) as calls:
        first = torch.empty(WIDTH)
        address = first.data_ptr()
        del first
    arena.turn()
    arena.turn()
    assert arena.take(2**20).data_ptr() != address
    assert any(isinstance(chunk, torch.Tensor) and chunk.data_ptr() == address for chunk in calls.kept)


def test_a_thread_that_does_not_record_is_not_recorded() -> None:

    kernel, x_TM = silu_mul(), torch.randn(1, 2 * WIDTH)
    with torch.inference_mode(), recording(Arena()) as calls:
        beside = threading.Thread(target=gate, args=(kernel, x_TM))
        beside.start()
        beside.join()
    given = x_TM.clone()
    calls.repeat()
    assert torch.equal(given, x_TM) and not calls.kept
