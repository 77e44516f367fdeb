"""Triton's attention over latents against the reference: in its interpreter, and on a CUDA device where one is.

As in test_triton_attention.py, in a process of its own with new memory full of NaN. The cache is NaN beside its rows.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.prompts.varlen_attention import Ragged, SdpaVarlen
from tandem.workers.kernels.kv_store import as_indexable
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.budget import ATTENTION_BYTES, MOST_PARTS
from tandem.workers.platforms.base import Platform
from tests.support.attention_check import QUANTIZED, random_batch
from tests.support.crowds import PLAIN, Capture, Rank, crowd, decoder_on, device, eagerly, settings_of
from tests.support.decode_work import small_work
from tests.support.interpreted import DEVICE, INTERPRETED, computes, rowwise_products, run_in_interpreter, starts
from tests.support.latent_steps import Inputs, mla
from tests.support.padded_steps import SCRATCH, Padded
from tests.support.platforms import replaced
from tests.support.recorded_graph import recorded_with_launches
from tests.support.reference_attention import ReferenceAttention
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.triton_steps import batch_of, on_device

HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of the largest value."""
LATENTS = "tandem.workers.attention.latents.paged_latents"
DEEPSEEK = mla(3, 512, 128, 64, 128)

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _small_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_work(monkeypatch):
        yield


def backend(*given: Any) -> Any:
    from tandem.workers.attention.latents.paged_latents import TritonLatents

    return TritonLatents(*given)


def check(
    each: Any, batch: ForwardBatch, spec: Any, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> None:
    inputs = Inputs.random(spec, batch, dtype, kv_dtype or dtype)
    if isinstance(each, Padded):
        clear_scratch(inputs)
    truth = inputs.wide().attend(ReferenceAttention(), batch)
    found = inputs.attend(each, batch).float()
    torch.testing.assert_close(found, truth, rtol=0, atol=TOLERANCE[dtype] * float(truth.abs().max()))


def clear_scratch(inputs: Inputs) -> None:
    """What padding reads."""
    for plane in (as_indexable(inputs.kv.keys), *inputs.kv.scales):
        plane[SCRATCH] = 0


# ---- what is computed ----


@computes
@pytest.mark.parametrize(
    ("spec", "dtype", "kv_dtype"),
    [
        (mla(5, 48, 24, 16, 20), torch.float32, None),
        (mla(17, 72, 8, 20, 40), HALF, None),
        (mla(1, 8, 4, 8, 4), HALF, torch.int8),
        (mla(5, 48, 24, 16, 20), HALF, torch.float8_e4m3fn),
    ],
    ids=["float32", "two tiles", "one head int8", "fp8"],
)
def test_steps_of_any_rows(spec: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Parts of one row and of several; drafts, also in several tiles; chunks that begin and continue rows; widths that
    are no powers of two."""
    check(backend(), batch_of([1, 17, 1, 20, 4, 1], [200, 150, 1, 40, 65, 64]), spec, dtype, kv_dtype)


@computes
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
def test_the_widths_of_deepseek(kv_dtype: torch.dtype | None) -> None:
    check(backend(), batch_of([1, 2, 19], [140, 33, 40]), DEEPSEEK, HALF, kv_dtype)


@computes
def test_captured_steps_are_padded() -> None:
    """Made for one batch, pointed at others, with rows that have no token; beside chunks rows of padding have sixteen
    tokens."""
    spec, of_decodes = mla(3, 40, 24, 16, 20), Padded(12, backend=backend())
    for batch in (batch_of([5, 1], [140, 65]), batch_of([1] * 3, [3, 99, 64])):
        check(of_decodes, batch, spec)
    of_all = Padded(64, has_chunks=True, backend=backend())
    for batch in (batch_of([3, 20, 1], [90, 20, 40]), batch_of([1, 1], [99, 3])):
        check(of_all, batch, spec)


@computes
def test_more_tokens_than_are_absorbed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs cut rows anywhere: what is left of a chunk may be a decode. In captured steps too."""
    spec = mla(2, 32, 8, 16, 12)
    monkeypatch.setattr(f"{LATENTS}.ABSORBED_BYTES", 13 * 2 * 2 * 32 * 4)
    check(backend(), batch_of([3, 31, 1, 17], [90, 31, 70, 64]), spec)
    check(Padded(64, has_chunks=True, backend=backend()), batch_of([3, 20, 1], [80, 20, 40]), spec)


# ---- bits ----


@computes
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (HALF, None), (HALF, torch.int8)], ids=str)
def test_a_decode_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention alone, between the products with the heads' matrix: beside others, as one of several drafts, beside a
    chunk, in a captured step, by one program, and with fewer slots than parts."""
    from tandem.workers.attention.triton_paged import Multiprocessors

    rowwise_products(monkeypatch)
    spec = mla(5, 40, 8, 16, 8)
    everything = batch_of([1, 9, 1, 20, 17], [150, 130, 64, 30, 90])
    inputs = Inputs.random(spec, everything, dtype, kv_dtype or dtype)
    clear_scratch(inputs)
    identity_products(monkeypatch)

    def sums(rows: Sequence[tuple[int, int]], each: Any = None) -> list[torch.Tensor]:
        """rows: their numbers, and how many of their last queries there are."""
        batch, own = rows_of(everything, rows)
        given = inputs._replace(q_TND=inputs.q_TND[own], latents_T1E=inputs.latents_T1E[own])
        ends = [0, *batch.query_starts.tolist()[1:]]
        found = given.attend(each or backend(), batch)
        return [found[start:stop] for start, stop in pairwise(ends)]

    alone = {row: sums([(row, 1)])[0] for row in (0, 1, 2, 4)}
    assert torch.equal(sums([(2, 1), (0, 1), (1, 2)])[1], alone[0])
    assert torch.equal(sums([(3, 20), (1, 9)])[1][-1:], alone[1])
    assert torch.equal(sums([(4, 17), (2, 1)])[0][-1:], alone[4])
    assert torch.equal(sums([(2, 1), (0, 1)], Padded(8, backend=backend()))[1], alone[0])
    assert torch.equal(sums([(0, 1), (2, 1)], backend(Multiprocessors(1, 0)))[0], alone[0])
    for most in (3, 0):
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_decode.MOST_PARTS", most)
        assert torch.equal(sums([(0, 1), (1, 9)])[0], alone[0])
    assert MOST_PARTS > 3


def identity_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's products may sum in another order for other numbers of rows."""
    from tandem.workers.attention.latents.latent_heads import LatentHeads

    def onto_latents(heads: Any, q_TND: torch.Tensor) -> torch.Tensor:
        return q_TND[..., :1].expand(*q_TND.shape[:2], heads.spec.kv_rank).contiguous()

    def release(heads: Any, sums_TNL: torch.Tensor, out_TNV: torch.Tensor) -> torch.Tensor:
        return out_TNV.copy_(sums_TNL[..., : heads.spec.v_dim])

    monkeypatch.setattr(LatentHeads, "onto_latents", onto_latents)
    monkeypatch.setattr(LatentHeads, "release", release)


def rows_of(batch: ForwardBatch, rows: Sequence[tuple[int, int]]) -> tuple[ForwardBatch, torch.Tensor]:
    """Returns a step of the last queries of some rows, and where these are in the batch."""
    stops = batch.query_starts.tolist()[1:]
    own = torch.tensor([place for row, count in rows for place in range(stops[row] - count, stops[row])], device=DEVICE)
    counts, lens = [count for _, count in rows], [batch.seq_lens_list[row] for row, _ in rows]
    made = random_batch(random.Random(0), batch.block_size, counts, lens)
    table_RN = batch.block_table_RN[[row for row, _ in rows]]
    return on_device(replace(made, block_table_RN=table_RN, slot_mapping_T=batch.slot_mapping_T[own])), own


# ---- long prompts ----


class Counted(SdpaVarlen):
    """The twin of the flash kernel; `calls` has the heads and the positions of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Ragged, params: Any) -> torch.Tensor:
        assert q.shape[2] == k.shape[2] == v.shape[2], "heads of one width"
        self.calls.append((k.shape[1], rows.most_keys))
        return super().attend(q, k, v, rows, params)


@computes
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_long_prompts_are_expanded(kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In large steps, where that multiplies less and there is memory; others in the same step are the kernel's, decodes
    between them too. Heads attend in parts."""
    spec, dtype = mla(3, 64, 24, 16, 20), torch.float32 if kv_dtype is None else HALF
    batch = batch_of([1, 30, 25, 19, 2, 35], [20, 30, 50, 40, 33, 60])
    monkeypatch.setattr(f"{LATENTS}.FEWEST_TOKENS", batch.num_tokens)
    monkeypatch.setattr(f"{LATENTS}.FEWEST_EXPANDED", 25)
    of_position = (24 + 20 + 40) * dtype.itemsize
    monkeypatch.setattr(f"{LATENTS}.EXPANDED_BYTES", 2 * 60 * of_position)
    varlen = Counted()
    check(backend(None, varlen), batch, spec, dtype, kv_dtype)
    assert varlen.calls == [(3, 30), (2, 50), (1, 50), (2, 60), (1, 60)]
    for name, value in (("EXPANDED_BYTES", 1), ("FEWEST_TOKENS", batch.num_tokens + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"{LATENTS}.{name}", value)
            untouched = Counted()
            check(backend(None, untouched), batch, spec, dtype, kv_dtype)
            assert not untouched.calls
    monkeypatch.setattr(f"{LATENTS}.FEWEST_TOKENS", 1)
    untouched = Counted()
    check(Padded(64, has_chunks=True, backend=backend(None, untouched)), batch_of([30], [30]), spec, dtype, kv_dtype)
    assert not untouched.calls, "a graph holds no call whose arguments are the host's"


def test_memory_is_what_the_planner_counts() -> None:
    from tandem.workers.attention.latents import paged_latents
    from tandem.workers.kernels.triton.triton_attention import PARTS_BYTES

    spec = mla(128, 512, 128, 64, 128)
    made = paged_latents.EXPANDED_BYTES * (128 + 128 + 2 * spec.key_dim) / (128 + 128 + spec.key_dim)
    for at_once in (paged_latents.ABSORBED_BYTES, paged_latents.EXPANDED_BYTES + made):
        assert PARTS_BYTES + at_once <= ATTENTION_BYTES


# ---- whole models ----


def latents_of(platform: Platform) -> Platform:
    return replaced(platform, latent_attention=lambda *_: backend())


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has whole models on a device")
def test_replays_of_a_model_equal_eager_steps(tmp_path: Path) -> None:
    """Chunks, decodes and drafts of a crowd: captured with padding and launched again by the recorder, bit for bit what
    the same padded steps give that run eagerly."""
    tiny = BY_NAME["deepseek_v3"]
    dense = {"num_hidden_layers": 1, "first_k_dense_replace": 1}  # torch's experts are not captured
    folder = save_tiny_model(replace(tiny, changes={**tiny.changes, **dense}), tmp_path)
    plans, ran = crowd(3, 7, samplings=PLAIN, drafts=2, rows=2), list[Rank]()
    captures: tuple[Capture, ...] = (recorded_with_launches, eagerly)
    for capture in captures:
        platform = latents_of(device(capture))
        decoder = decoder_on(platform, folder)
        rank = Rank.of(decoder, platform, settings_of(2, drafts=2), capture, vocab_size=load_spec(folder).vocab_size)
        assert rank.report is not None and not rank.report.failures
        rank.run(plans)
        ran.append(rank)
    replayed, eager = ran
    assert all(replayed.num_replays) and replayed.num_replays == eager.num_replays
    assert all(map(torch.equal, replayed.logits, eager.logits)) and replayed.tokens == eager.tokens


def test_kinds_of_a_run() -> None:
    """What a cut row has left decides; a captured step's kinds are those that it was made for."""
    from tandem.workers.attention.latents.paged_latents import _kinds_in
    from tandem.workers.attention.triton_paged import CHUNKS, DECODES

    batch = random_batch(random.Random(0), 16, [1, 40, 30], [9, 40, 35])
    found = [_kinds_in(batch, tokens) for tokens in (range(71), range(1, 41), range(35, 45), range(20, 71))]
    assert found == [[DECODES, CHUNKS], [CHUNKS], [DECODES], [CHUNKS]]
