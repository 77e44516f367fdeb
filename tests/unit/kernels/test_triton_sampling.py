"""Triton's draws against numpy and the torch twin, to the last bit: in its interpreter, and on a CUDA device where one
is."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.workers.kernels.logit_edits import DTYPES, LogitEdits, RowTokens
from tandem.workers.kernels.sampling_ops import RandomRows, SamplingOps, TorchSampling
from tandem.workers.kernels.step_arrays import sending_with
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.unit.sampling import numpy_twin
from tests.unit.sampling.sampling_kinds import draws_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
_noise = pytest.importorskip("tandem.workers.kernels.triton.sampling.triton_sampling")._noise
once = pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
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
    from tandem.workers.kernels.triton.sampling.triton_sampling import TritonSampling

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
@pytest.mark.parametrize("vocab", [1, 64, 65, 5_000])
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
    for shift in (0, 2**31 - 100) if vocab == 65 else (0,):
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
    from tandem.workers.kernels.triton.sampling.triton_sampling import choose_part

    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("-inf")] * 4, [1.0] * 4], device=DEVICE)
    part_ids = torch.tensor([[5, 900, 300, 1], [2**31 - 1] * 4, [4] * 4], dtype=torch.int32, device=DEVICE)
    ids, at = torch.full((4,), 7, device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    factor = torch.tensor([0.5, 1.0, 0.0], device=DEVICE)
    choose_part[(3,)](scores, part_ids, 4, at, factor, ids, 1000, PARTS=64, num_warps=1)
    assert ids.tolist() == [999, 7, 300, 7]


def columns_of(rows: int, **columns: Any) -> RandomRows:
    return RandomRows.sent(draws_of(rows, **columns), SEND)


@computes
def test_one_sequence_of_calls_serves_any_mix_of_rows() -> None:
    """Those with a factor of 0 keep their best token, whatever their limits; the twin's bits."""
    ops: Any = kernels()
    rows = 6
    logits = torch.randn(rows, 1500, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    draws = draws_of(
        rows, temperature=[1, 1, 0.4, 1, 2, 0.7], top_k=[5, 0, 0, 0, 30, 1500], top_p=[0.1, 1, 0.8, 1, 0.9, 1],
        min_p=[0.2, 0, 0, 0.1, 0, 0.05], seed=range(3, 9), choice=range(rows),
    )  # fmt: skip
    draws.factor[[0, 3]] = 0
    positions, found = torch.arange(rows, device=DEVICE) * 9, []
    best, ids = ops.best(logits)
    ops.choose_all(logits, best, ids, positions, RandomRows.sent(draws, SEND))
    found.append(ids.tolist())
    twin = TorchSampling()
    best, ids = twin.best(logits)
    twin.prepare_draw(draws, SEND)(logits, best, ids, positions)
    found.append(ids.tolist())
    greedy = logits.argmax(1).tolist()
    assert found[0] == found[1] and [found[0][row] for row in (0, 3)] == [greedy[row] for row in (0, 3)]
    assert found[0] != greedy


@computes
def test_parts_of_a_vocabulary_give_what_the_whole_one_gives() -> None:
    """Their greatest sums with noise, cut anywhere, in the twin too: the same token, also of rows with min-p."""
    rows, vocab = 4, 1500
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    draws = draws_of(rows, temperature=[1, 1.3, 0.4, 2], min_p=[0, 0.1, 0, 0.02], seed=range(rows), choice=range(rows))
    given = torch.arange(rows, device=DEVICE) * 7, RandomRows.sent(draws, SEND)
    wanted: Any = None
    for ops in (kernels(), TorchSampling()):
        whole: Any = kernels()
        best, ids = whole.best(logits)
        whole.choose_all(logits, best, ids, *given)
        parts = [(0, 517), (517, 640), (640, 1497), (1497, 1500)]
        pairs = torch.stack([ops.greatest(logits[:, first:last], first, best, *given) for first, last in parts])  # type: ignore[attr-defined]
        scores = pairs[..., 0].contiguous().view(torch.float32)
        assert pairs[..., 1].gather(0, scores.argmax(0, keepdim=True))[0].tolist() == ids.tolist()
        assert wanted is None or torch.equal(scores[torch.isfinite(scores)], wanted[torch.isfinite(wanted)])
        wanted = scores


LIMITS = [
    {"top_k": 40, "top_p": 0.9}, {"top_p": 0.95}, {"top_k": 2000, "top_p": 0.99, "min_p": 0.001}, {"top_k": 60},
    {"top_p": 1 - 2.0**-53}, {"top_p": 0.3, "min_p": 0.2}, {"top_p": 0.8}, {"top_k": 1}, {"top_p": 1e-300},
    {"top_k": 9, "min_p": 0.9}, {"min_p": 0.3},
]  # fmt: skip


def rows_of(vocab: int, generator: np.random.Generator) -> Any:
    """Flat, steep, tied, sparse, tiny and huge logits, and 16-bit ones with a long tail."""
    normal = generator.standard_normal((9, vocab)).astype(np.float32)
    scale = np.array([0, 1e-4, 0.02, 0.5, 2, 4, 30, 1e4, 3], np.float32)[:, None]
    rows = normal * scale
    rows[4:6] = np.rint(rows[4:6] * 16) / 16
    rows[5] = np.where(generator.random(vocab) < 0.9, -np.inf, rows[5])
    rows[5, vocab // 2] = 7
    rows[8, :: max(1, vocab // 7)] += 9
    return rows


@computes
@pytest.mark.parametrize(("vocab", "room"), [(1, 16_384), (700, 16_384), (5_003, 16_384), (2_049, 8)])
def test_rows_are_cut_where_a_sort_says(vocab: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By candidates, and by the row itself where there is no room for them; of memory full of NaN, each row by limits
    and a temperature of its own."""
    truncation = pytest.importorskip("tandem.workers.kernels.triton.sampling.triton_truncation")
    monkeypatch.setattr(truncation, "ROOM", room)
    empty = torch.empty
    poisoned = lambda *size, **given: empty(*size, **given).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(truncation.torch, "empty", poisoned)
    logits = rows_of(vocab, np.random.default_rng(vocab))[:: 1 if room > 100 else 2]
    count = len(logits)
    limits = [LIMITS[(row + vocab) % len(LIMITS)] for row in range(count)]
    temperatures = [(1.0, 0.05, 2.5)[(row + vocab) % 3] for row in range(count)]
    default = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [own.get(name, of) for own in limits] for name, of in default.items()}
    given = torch.from_numpy(logits).to(DEVICE)
    lowest = truncation.lowest_of(given, given.amax(1), columns_of(count, temperature=temperatures, **columns))
    for row, least, own, temperature in zip(logits, lowest.tolist(), limits, temperatures, strict=True):
        of_V = numpy_twin.exponents(row, temperature)
        wanted = numpy_twin.lowest(of_V, **own)  # type: ignore[arg-type]
        assert ((of_V >= least) == (of_V >= wanted)).all(), (own, temperature, least, wanted)


@once
def test_neighbours_of_a_bins_border_have_weights_in_their_order() -> None:
    """Which a cut by bins relies on, with a bin to spare: polynomials meet where a weight may fall by a rounding."""
    distances = np.geomspace(2.0**-8, 26, 400_000).astype(np.float32)
    weights = numpy_twin.weights(-distances).astype(np.float64)
    behind = np.searchsorted(distances, distances * np.float32(1 + 1 / 70))
    inside = behind < len(distances)
    assert (weights[inside] >= np.maximum.accumulate(weights[::-1])[::-1][behind[inside]]).all()


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


class Counted:
    """Stands for a kernel and notes its launches."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **constants: self._launched.append(self._name)


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Notes torch's operations but for new memory and views."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self._launched.append(str(func))
        return func(*args, **(kwargs or {}))


@once
def test_edits_and_draws_of_any_mix_are_eleven_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones, whatever rows ask."""
    from tandem.workers.kernels.triton.sampling import triton_edits, triton_sampling, triton_truncation

    found: list[list[str]] = []
    for limits in ({}, {"top_k": [3, 0, 5], "top_p": [0.1, 0.5, 1.0]}):
        launched: list[str] = []
        for module in (triton_edits, triton_sampling, triton_truncation):
            for name, value in vars(module).items():
                if isinstance(value, triton.runtime.KernelInterface) and not name.startswith("_"):
                    monkeypatch.setattr(module, name, Counted(name, launched))
        rows = RandomRows.sent(draws_of(3, **limits), sending_with(lambda host: host))
        logits, at = torch.zeros(3, 5000), torch.arange(3)
        numbers = LogitEdits[torch.Tensor](*(torch.zeros(3, dtype=torch.int32) for _ in DTYPES))
        tokens, counts = RowTokens(at[:, None].int(), at, at), logits.int()
        ops = triton_sampling.TritonSampling()
        with Operations(launched):
            ops.edit_all(logits, tokens, numbers, counts)
            ops.choose_all(logits, *ops.best(logits), at, rows)
        monkeypatch.undo()
        found.append(launched)
    assert found[0] == found[1]
    kernels = [name for name in found[0] if not name.startswith("aten")]
    assert kernels == [
        *("edit_entries", "count_tokens", "penalize_tokens"),
        *("count_bins", "collect_candidates", "cut_rows", "draw_parts", "choose_part"),
    ]
    rest = sorted(name for name in found[0] if name.startswith("aten"))
    assert rest == ["aten.max.dim", "aten.zeros.default", "aten.zeros.default"], rest
