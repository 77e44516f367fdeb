"""The compiled attention over latents against the definition in float32: random steps, widths, caches, many heads; and
that a token's bits depend on nothing beside it."""

import random
from collections.abc import Sequence

import pytest
import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latents.cpu_latents import CpuLatents
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.kernels.cpu.attention import cpu_latent_attention
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import PARTITION_TOKENS
from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention
from tandem.workers.kernels.cpu.cpu_build import obstacle
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.models.spec.arch import Mla
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.attention_check import random_batch
from tests.support.latent_steps import Inputs, mla
from tests.support.reference_attention import ReferenceAttention

CACHES = [
    (torch.float32, torch.float32),
    pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.parity),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value."""
pytestmark = pytest.mark.skipif(obstacle(torch.float32) is not None, reason="there is no C compiler")


def compiled(spec: Mla, dtype: torch.dtype, storage: torch.dtype) -> list[LatentBackend]:
    """The usual backend, and that of --batch-invariant."""
    usual = CpuPlatform().latent_attention(dtype, spec, storage)
    kernel, store = CpuLatentAttention.make(dtype, spec.head_dim, storage), CpuKVStore.make(dtype, storage)
    assert usual.name == "cpu-paged" and kernel is not None and store is not None
    return [usual, CpuLatents(kernel, store, chunk_kernel=None)]


def check(spec: Mla, batch: ForwardBatch, dtype: torch.dtype, storage: torch.dtype) -> None:
    inputs = Inputs.random(spec, batch, dtype, storage)
    truth = inputs.wide().attend(ReferenceAttention(), batch)
    for backend in compiled(spec, dtype, storage):
        found = inputs.attend(backend, batch).float()
        torch.testing.assert_close(found, truth, rtol=0, atol=TOLERANCE[dtype] * float(truth.abs().max()))


def random_rows(rng: random.Random) -> tuple[list[int], list[int]]:
    """Queries and lengths: decodes, drafts and chunks; ends at borders of blocks and partitions."""
    lens = [rng.choice((1, 3, 16, 17, 40, 127, 128, 129, 300)) for _ in range(rng.randint(1, 7))]
    return [rng.choice((1, 1, min(3, length), length)) for length in lens], lens


@pytest.mark.parametrize(("dtype", "storage"), CACHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int, dtype: torch.dtype, storage: torch.dtype) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        spec = mla(
            heads=rng.choice((1, 2, 3, 5, 8, 35)),
            kv_rank=rng.choice((8, 16, 24, 40, 64, 100, 136)),
            nope=rng.choice((4, 16, 24, 40)),
            rope=rng.choice((8, 16, 20)),
            v_dim=rng.choice((4, 16, 20, 40)),
        )
        batch = random_batch(rng, rng.choice((1, 4, 16, 256)), *random_rows(rng))
        check(spec, batch, dtype, storage)


@pytest.mark.parametrize(("dtype", "storage"), CACHES, ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_the_widths_of_deepseek(heads: int, dtype: torch.dtype, storage: torch.dtype) -> None:
    batch = random_batch(random.Random(0), 16, [1, 2], [140, 33])
    check(mla(heads, 512, 128, 64, 128), batch, dtype, storage)


def rows_alone(inputs: Inputs, batch: ForwardBatch, backend: LatentBackend, queries: Sequence[int]) -> torch.Tensor:
    """Each row in a step of its own, the last token before those ahead of it: as many at a time as `queries` says."""
    outputs, starts = [], batch.query_starts.tolist()
    for row, length in enumerate(batch.seq_lens_list):
        start, left = starts[row], batch.query_lens_list[row]
        while left:
            count = min(left, queries[row])
            alone = ForwardBatch(
                input_ids_T=batch.input_ids_T[start : start + count],
                positions_T=batch.positions_T[start : start + count],
                slot_mapping_T=batch.slot_mapping_T[start : start + count],
                query_starts=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([length - left + count], dtype=torch.int32),
                block_table_RN=batch.block_table_RN[row : row + 1],
                logits_rows_S=torch.tensor([count - 1]),
                query_lens_list=[count],
                seq_lens_list=[length - left + count],
                block_size=batch.block_size,
            )
            own = slice(start, start + count)
            outputs.append(
                inputs._replace(q_TND=inputs.q_TND[own], latents_T1E=inputs.latents_T1E[own]).attend(backend, alone)
            )
            start, left = start + count, left - count
    return torch.cat(outputs)


@pytest.mark.parametrize(("dtype", "storage"), CACHES, ids=str)
def test_a_tokens_bits_are_its_own(dtype: torch.dtype, storage: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed beside it, by one thread or two, with memory for all parts of contexts or for few."""
    spec, rng = mla(35, 72, 24, 16, 20), random.Random(0)
    lens = [1, 2 * PARTITION_TOKENS + 3, 17, 40, PARTITION_TOKENS]
    batch = random_batch(rng, 16, [1, 9, 2, 30, 1], lens)
    inputs, backend = Inputs.random(spec, batch, dtype, storage), compiled(spec, dtype, storage)[1]
    together = inputs.attend(backend, batch)
    assert torch.equal(rows_alone(inputs, batch, backend, [1, 4, 1, 7, 1]), together)
    monkeypatch.setattr(cpu_latent_attention, "PARTS_BYTES", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    few = inputs.attend(backend, batch)
    torch.set_num_threads(threads)
    assert torch.equal(few, together)


def test_what_is_not_finite_stays_in_its_row() -> None:
    spec = mla(3, 40, 8, 8, 8)
    batch = random_batch(random.Random(0), 16, [1, 1], [20, 40])
    inputs = Inputs.random(spec, batch, torch.float32, torch.float32)
    slot = int(batch.slot_mapping_T[0])
    inputs.kv.keys.view(-1, spec.head_dim)[slot, 5] = float("nan")
    for backend in compiled(spec, torch.float32, torch.float32):
        out = inputs.attend(backend, batch)
        assert not out[0].isfinite().any() and out[1].isfinite().all()


def test_selection() -> None:
    """Widths and types that the kernel does not take are torch's."""
    platform = CpuPlatform()
    assert platform.latent_attention(torch.bfloat16, mla(16, 512, 128, 64, 128)).name == "cpu-paged"
    assert platform.latent_attention(torch.bfloat16, mla(16, 976, 128, 64, 128)).name == "torch-sdpa"
    assert platform.latent_attention(torch.float16, mla(16, 512, 128, 64, 128)).name == "torch-sdpa"
