"""Triton's draws against numpy and the torch twin, to the last bit: in its interpreter, and on a CUDA device where one
is."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.kernels.sampling_ops import RandomRows, SamplingOps, TorchSampling
from tandem.workers.kernels.step_arrays import arrived, sending_with
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.unit.sampling import numpy_twin
from tests.unit.sampling.sampling_kinds import draws_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
_noise = pytest.importorskip("tandem.workers.kernels.triton.triton_sampling")._noise
SEND = sending_with(lambda host: host.to(DEVICE))


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def draw(ops: SamplingOps, logits: torch.Tensor, positions: list[int], **columns: Any) -> list[int]:
    """A draw per row of the logits."""
    given = logits.to(DEVICE)
    best, ids = ops.best(given)
    draws = draws_of(len(columns.get("places", positions)), **columns)
    ops.prepare_draw(draws, SEND)(given, best, ids, torch.tensor(positions, device=DEVICE))
    return [int(i) for i in ids]


def kernels() -> SamplingOps:
    from tandem.workers.kernels.triton.triton_sampling import TritonSampling

    return TritonSampling()


@triton.jit
def all_noise(words, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, _noise(tl.load(words + i).to(tl.uint32, bitcast=True)))


@computes
def test_words_become_noise() -> None:
    edges = [0, 1, 2**23, 2**24 + 1, 2**30 - 1, 2**30, 2**30 + 64, 2**31, 3 * 2**30, *range(2**32 - 300, 2**32)]
    rest = np.random.default_rng(0).integers(0, 2**32, 2**14 - len(edges), np.uint32)
    words = np.concatenate([np.array(edges, np.uint32), rest])
    out = torch.empty(len(words), device=DEVICE)
    all_noise[(len(words) // 1024,)](
        torch.from_numpy(words.view(np.int32)).to(DEVICE), out, SIZE=1024, enable_fp_fusion=False
    )
    assert out.cpu().numpy().tobytes() == numpy_twin.noise_of(words).tobytes()


@computes
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1024, 5_000])
def test_the_token_is_numpys_and_the_twins(vocab: int) -> None:
    """Rows of all limits, flat and steep, some with one token left, beside others that draw nothing."""
    rows = 8
    padded = torch.randn(rows + 1, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    logits = padded[:, :vocab] * torch.tensor([0.0, 0.1, 1, 2, 3, 5, 10, 30, 1])[:, None]
    logits[3] = float("-inf")
    logits[3, vocab // 2] = -2.0
    columns = {
        "temperature": np.array([1.0, 0.7, 1.3, 1.0, 2.0, 1e-5, 1.0, 1.0]),
        "top_k": np.array([0, 0, 5, 3, 0, 0, 40, 0]),
        "top_p": np.array([1.0, 0.9, 1.0, 0.5, 1.0, 1.0, 0.8, 1.0]),
        "min_p": np.array([0.0, 0.0, 0.0, 0.1, 0.05, 0.0, 0.01, 0.0]),
        "seed": np.array([0, 1, 2**63, 2**64 - 1, 2**32, 7, 7, 8], np.uint64),
        "choice": np.arange(rows) % 3,
    }
    for shift in (0, 2**31 - 100):
        positions = [shift + 11 * row for row in range(rows + 1)]
        got = draw(kernels(), logits, positions, places=np.arange(rows), **columns)
        wanted = [
            numpy_twin.draw(
                logits[row].numpy(), position=positions[row], **{name: of[row].item() for name, of in columns.items()}
            )
            for row in range(rows)
        ]
        assert got == [*wanted, int(logits[rows].argmax())]
        assert got == draw(TorchSampling(), logits, positions, places=np.arange(rows), **columns)


@computes
def test_a_row_in_parts_of_qwens_vocabulary() -> None:
    """Its 149 steps in 64 parts, the last ones not whole; many rows in fewer parts."""
    logits = torch.randn(1, 151_936, generator=torch.Generator().manual_seed(3)) * 2
    logits[0, 151_935] = 9.0
    wanted = [numpy_twin.draw(logits[0].numpy(), seed=5, position=position) for position in range(2)]
    assert [draw(kernels(), logits, [position], seed=5)[0] for position in range(2)] == wanted
    if not INTERPRETED:
        many = draw(kernels(), logits.expand(600, -1).contiguous(), list(range(600)), seed=5)
        assert many == draw(TorchSampling(), logits.expand(600, -1).contiguous(), list(range(600)), seed=5)


@computes
def test_of_equal_scores_the_lower_id_wins() -> None:
    """Of parts of a row; a row without any gets the last id, one with a factor of 0 keeps its own."""
    from tandem.workers.kernels.triton.triton_sampling import choose_part

    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("-inf")] * 4, [1.0] * 4], device=DEVICE)
    part_ids = torch.tensor([[5, 900, 300, 1], [2**31 - 1] * 4, [4] * 4], dtype=torch.int32, device=DEVICE)
    ids, at = torch.full((4,), 7, device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    factor = torch.tensor([0.5, 1.0, 0.0], device=DEVICE)
    choose_part[(3,)](scores, part_ids, 4, at, factor, ids, 1000, PARTS=64, num_warps=1)
    assert ids.tolist() == [999, 7, 300, 7]


@computes
def test_one_sequence_of_calls_serves_any_mix_of_rows() -> None:
    """Those with a factor of 0 keep their best token; the twin's bits."""
    ops: Any = kernels()
    rows = 5
    logits = torch.randn(rows, 1500, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    factor = torch.tensor([0.0, 1.0, 2.5, 0.0, 0.5], device=DEVICE)
    lowest = torch.tensor([-1.0, float("-inf"), -2.0, float("-inf"), -0.5], device=DEVICE)
    columns = [torch.arange(rows, device=DEVICE), factor, *(torch.arange(rows, device=DEVICE) + add for add in (3, 0))]
    found = []
    for each in (ops.choose_all, TorchSampling().choose):
        best, ids = ops.best(logits)
        each(logits, best, ids, torch.arange(rows, device=DEVICE) * 9, RandomRows(*map(arrived, columns)), lowest)
        found.append(ids.tolist())
    greedy = logits.argmax(1).tolist()
    assert found[0] == found[1] and [found[0][row] for row in (0, 3)] == [greedy[row] for row in (0, 3)]
    assert found[0] != greedy


@computes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_give_some_id(bad: float) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    wanted = draw(TorchSampling(), logits, [1, 2, 3], top_k=5, top_p=0.9)
    logits[1, 17:] = bad
    logits[1, :17] = bad if bad == float("-inf") else logits[1, :17]
    got = draw(kernels(), logits, [1, 2, 3], top_k=5, top_p=0.9)
    assert got[::2] == wanted[::2] and 0 <= got[1] < 300


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_can_hold_a_draw() -> None:
    """Captured at one position, replayed at another."""
    logits, at = torch.randn(2, 5_000, device=DEVICE), torch.tensor([4, 5], device=DEVICE)
    ops = kernels()
    best, ids = ops.best(logits)
    run = ops.prepare_draw(draws_of(2, seed=[1, 2]), SEND)
    run(logits, best, ids, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(logits, best, ids, at)
    at += 7
    graph.replay()
    assert ids.tolist() == draw(TorchSampling(), logits, [11, 12], seed=[1, 2])
