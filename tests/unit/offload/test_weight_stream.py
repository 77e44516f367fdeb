"""The weight stream: bytes arrive before a layer runs, failed copies raise, threads and memory are released."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence

import psutil
import pytest
import torch

from tandem.offload.weights.weight_copiers import PIECE_BYTES, InlineCopier, ThreadCopier
from tandem.offload.weights.weight_stream import (
    Copier,
    Copy,
    Placed,
    WeightCopyError,
    WeightStream,
    num_bytes,
    same_form,
)
from tandem.parallel.linear_methods import can_pack
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.cuda import CudaPlatform

NUM_LAYERS = 7
Places = list[list[Placed]]
either = pytest.mark.parametrize("kind", [ThreadCopier, InlineCopier])


def weights_of(layer: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return [torch.randn(24, 16, generator=generator), torch.randn(16, 24, generator=generator)]


def open_stream(streamed: Sequence[int], copier: Copier | None = None) -> tuple[WeightStream, Places]:
    """A begun stream of seven layers of two matrices, and where each layer's matrices are to be found."""
    stream = WeightStream(streamed, copier or ThreadCopier())
    places = [[stream.place_of(layer)(weight) for weight in weights_of(layer)] for layer in range(NUM_LAYERS)]
    stream.begin()
    return stream, places


def walk(stream: WeightStream, places: Places, until: int = NUM_LAYERS) -> None:
    """One step, which checks what each layer reads; the last ends between its two matrices."""
    for layer, found in enumerate(stream.in_turn(places)):
        for (tensor, arrive), weight in zip(found, weights_of(layer), strict=True):
            if arrive is not None:
                arrive()
            assert torch.equal(tensor, weight), layer
            if layer == until:
                return


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tandem-weights")]


@either
@pytest.mark.parametrize(
    "streamed", [(), (3,), (0, 6), (1, 4), (0, 1, 2), (1, 3, 5, 6), tuple(range(1, 7)), tuple(range(7))]
)
def test_every_layer_finds_its_own_weights_step_after_step(
    streamed: tuple[int, ...], kind: Callable[[], Copier]
) -> None:
    stream, places = open_stream(streamed, kind())
    layer_bytes = sum(weight.nbytes for weight in weights_of(0))
    assert stream.host_bytes == len(streamed) * layer_bytes
    assert stream.buffer_bytes == min(2, len(streamed)) * layer_bytes
    for _ in range(4):
        walk(stream, places)
    stream.close()


@either
def test_a_step_that_ends_in_the_middle_harms_no_later_one(kind: Callable[[], Copier]) -> None:
    stream, places = open_stream(range(NUM_LAYERS), kind())
    for until in (0, 3, 1, NUM_LAYERS, 6, NUM_LAYERS):
        walk(stream, places, until)
    stream.close()


class Recorder(ThreadCopier):
    """Says when copies are started, as indices of the layer whose weights they move."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []
        self.held: list[torch.Tensor] = []

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        self.held.append(weight)
        return weight

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        layer = next(place for place, weight in enumerate(self.held) if weight is held) // 2
        [copy] = super().copies(target, held)

        def run() -> None:
            self.moved.append(layer)
            copy()

        return [run]


def test_the_next_layer_is_under_way_while_one_computes() -> None:
    recorder = Recorder()
    stream, places = open_stream(range(NUM_LAYERS), recorder)
    for layer, _ in enumerate(stream.in_turn(places)):
        stream.arrive(layer)
        for wait in stream._slot_of[(layer + 1) % NUM_LAYERS].waits:
            wait()
        if layer < NUM_LAYERS - 1:
            assert recorder.moved[-1] == layer + 1
    stream.close()


def test_what_is_there_already_is_not_copied_again() -> None:
    recorder = Recorder()
    stream, places = open_stream((2, 5), recorder)
    for _ in range(3):
        walk(stream, places)
    stream.close()
    assert len(recorder.moved) == 4


class Failing(ThreadCopier):
    """Copies fail from the n-th on."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        [copy] = super().copies(target, held)

        def run() -> None:
            self.good -= 1
            if self.good < 0:
                raise OSError("the bus is gone")
            copy()

        return [run]


@pytest.mark.parametrize(("good", "layer"), [(0, 0), (4, 2), (5, 2)])
def test_a_copy_that_fails_is_an_error_that_names_the_layer(good: int, layer: int) -> None:
    stream, places = open_stream(range(NUM_LAYERS), Failing(good))
    for _ in range(2):  # and stays one
        with pytest.raises(WeightCopyError, match=rf"weights of layer {layer} .* the bus is gone"):
            walk(stream, places)
    stream.close()
    assert not threads()


def test_opening_and_closing_leaves_no_thread_and_no_tensor() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    before = tensors()
    for _ in range(20):
        stream, places = open_stream(range(NUM_LAYERS))
        walk(stream, places)
        stream.close()
        stream.close()
    del stream, places
    assert threads() == [] and tensors() <= before


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build does not pack")
def test_opening_and_closing_gives_the_memory_back() -> None:
    """28 MB of packed weights a time: what stayed behind would add up to half a gigabyte."""

    def open_and_close() -> int:
        stream = WeightStream(range(NUM_LAYERS), ThreadCopier())
        pack = torch.ops.mkldnn._reorder_linear_weight
        buffers = [stream.place_of(layer)(pack(torch.ones(1024, 1024))) for layer in range(NUM_LAYERS)]
        stream.begin()
        for layer, _ in enumerate(stream.in_turn(buffers)):
            stream.arrive(layer)
        stream.close()
        return int(psutil.Process().memory_info().rss)

    settled = [open_and_close() for _ in range(3)][-1]
    assert [open_and_close() for _ in range(20)][-1] - settled < 100 * 2**20


def test_a_stream_that_nobody_closed_ends_with_its_last_reference() -> None:
    before = set(threading.enumerate())
    stream, places = open_stream(range(NUM_LAYERS))
    walk(stream, places)
    thread = next(t for t in set(threading.enumerate()) - before if t.name.startswith("tandem-weights"))
    del stream, places
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build does not pack")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@either
def test_packed_matrices_move_as_bytes(dtype: torch.dtype, kind: Callable[[], Copier]) -> None:
    if not can_pack(dtype):
        pytest.skip("this CPU does not pack this dtype")
    copier = kind()
    pack = torch.ops.mkldnn._reorder_linear_weight
    first, second = (pack(torch.randn(80, 48).to(dtype)) for _ in range(2))
    buffer = copier.buffer_like(first)
    assert same_form(buffer, first) and num_bytes(buffer) == num_bytes(first) >= 80 * 48 * dtype.itemsize
    copier.start(copier.copies(buffer, second))()
    x = torch.randn(3, 48).to(dtype)
    multiply = torch.ops.mkldnn._linear_pointwise
    assert torch.equal(multiply(x, buffer, None, "none", [], ""), multiply(x, second, None, "none", [], ""))
    copier.close()


def test_large_matrices_move_in_pieces_that_two_threads_share() -> None:
    copier = ThreadCopier()
    held, target = torch.randn(3, PIECE_BYTES // 4), torch.zeros(3, PIECE_BYTES // 4)
    odd_held, odd_target = torch.randn(PIECE_BYTES // 4 + 7), torch.zeros(PIECE_BYTES // 4 + 7)
    copies = copier.copies(target, held) + copier.copies(odd_target, odd_held)
    assert len(copies) == 5
    for _ in range(50):
        target.zero_()
        odd_target.zero_()
        copier.start(copies)()
        assert torch.equal(target, held) and torch.equal(odd_target, odd_held)
    copier.close()


def test_without_a_core_to_spare_nothing_moves_before_it_is_due() -> None:
    copier = CpuPlatform(copies_beside=False).weight_copier(0)
    held, target = torch.randn(64, 48), torch.zeros(64, 48)
    wait = copier.start(copier.copies(target, held))
    assert not threads() and not target.any()
    wait()
    assert torch.equal(target, held)
    target.zero_()
    wait()  # waiting again copies nothing
    assert not target.any()
    copier.close()


def test_what_could_not_be_copied_is_said_again() -> None:
    def broken() -> None:
        raise OSError("the bus is gone")

    wait = InlineCopier().start([broken])
    for _ in range(2):
        with pytest.raises(OSError, match="the bus is gone"):
            wait()


def test_a_matrix_waits_for_its_own_bytes_only() -> None:
    stream, places = open_stream(range(NUM_LAYERS), InlineCopier())
    for layer, found in enumerate(stream.in_turn(places)):
        first, second = weights_of(layer)
        (tensor, arrive), (other, _) = found
        assert arrive is not None
        tensor.zero_(), other.zero_()
        arrive()
        assert torch.equal(tensor, first) and not other.any()
        stream.arrive(layer)
        assert torch.equal(other, second)
    stream.close()


@either
def test_closing_lets_the_host_memory_go(kind: Callable[[], Copier]) -> None:
    stream, places = open_stream(range(NUM_LAYERS), kind())
    held = [weakref.ref(weight) for weights in stream._held.values() for weight in weights]
    walk(stream, places)
    stream.close()
    gc.collect()
    assert len(held) == 2 * NUM_LAYERS and not any(weight() is not None for weight in held)


def test_a_buffer_of_another_form_is_told() -> None:
    plain = torch.randn(8, 8)
    assert same_form(plain, plain.clone())
    assert not same_form(plain, plain.double())
    assert not same_form(plain, plain.t())
    assert not same_form(plain, torch.ops.mkldnn._reorder_linear_weight(plain))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_pinned_memory_to_a_cuda_device() -> None:
    device = torch.device("cuda", 0)
    copier = CudaPlatform.open(device).weight_copier(NUM_LAYERS * sum(weight.nbytes for weight in weights_of(0)))
    stream = WeightStream(range(NUM_LAYERS), copier)
    places = [
        [stream.place_of(layer)(weight.to(device)) for weight in weights_of(layer)] for layer in range(NUM_LAYERS)
    ]
    stream.begin()
    for _ in range(3):
        seen = []
        for layer, found in enumerate(stream.in_turn(places)):
            stream.arrive(layer)
            seen.append([tensor.clone() for tensor, _ in found])
        for layer, tensors in enumerate(seen):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, weights_of(layer), strict=True)), layer
    stream.close()
