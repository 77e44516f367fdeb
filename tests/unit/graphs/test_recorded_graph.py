"""What the recorded-graph twin holds and refuses, and that a decode step of the decoder can be one."""

import random
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.offload.weights.weight_copiers import InlineCopier
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.checkpoint import DummySource
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.step_arrays import sending_with
from tandem.workers.messages.step import RowSampling
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.arch import (
    Activation,
    ArchSpec,
    AttentionParams,
    Gated,
    Gqa,
    LayerSpec,
    Norm,
    QkNorm,
    RopeSpec,
)
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.sampler import Sampling, sample
from tandem.workers.sampling.sampling_table import READS_TOKENS, SamplingTable
from tests.support.platforms import GpuOnHost
from tests.support.recorded_graph import RecordedGraph, RefusedError

CPU = torch.device("cpu")
GPU = GpuOnHost(HostAccelerator())
"""The platform of a GPU, on CPU memory: torch's operations, and weights that are not packed for a CPU."""
BLOCK, NUM_BLOCKS, LAYERS = 4, 40, 2
SAMPLINGS = {
    "greedy": RowSampling(temperature=0.0),
    "random": RowSampling(temperature=1.0),
    "top-p": RowSampling(temperature=1.0, top_p=0.9, top_k=7, min_p=0.01, frequency_penalty=0.5),
    "all": RowSampling(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        min_tokens=7,
        stop_token_ids=(3, 90),
        bad_words_token_ids=((11, 12, 40), (13, 41), (42,)),
        logit_bias=((5, 1.0),),
        thinking_budget=ThinkingBudget(tokens=6, start=(50,), end=(13, 14), inside=True),
    ),
}


def test_a_replay_computes_with_the_inputs_of_now() -> None:
    x, weight, kept = torch.randn(3, 4), torch.randn(4, 4), torch.zeros(3, 4)

    def body() -> dict[str, torch.Tensor]:
        a, b = (x @ weight).chunk(2, dim=1)
        kept.add_(1)
        return {"sum": torch.cat((b, a), 1).softmax(-1).reshape(-1), "view": kept[1:]}

    graph = RecordedGraph.capture(body)
    first = graph.outputs["sum"].clone()
    x.copy_(torch.randn(3, 4))
    graph.replay()
    expected = torch.cat((x @ weight).chunk(2, dim=1)[::-1], 1).softmax(-1).reshape(-1)
    assert torch.equal(graph.outputs["sum"], expected) and not torch.equal(first, expected)
    assert torch.equal(graph.outputs["view"], torch.full((2, 4), 2.0))


def test_a_decision_of_the_host_stays_as_it_was() -> None:
    """As in a graph: the length that Python knew is a constant."""
    x, length = torch.arange(4.0), [4]
    graph = RecordedGraph.capture(lambda: x[: length[0]] * 2)
    length[0] = 2
    assert graph.replay().tolist() == [0, 2, 4, 6]


X = torch.tensor([1.0, 0.0, 2.0])
REFUSALS: dict[str, Callable[[], object]] = {
    "aten._local_scalar_dense.default": lambda: X.sum().item(),
    "aten.equal.default": lambda: torch.equal(X, X),
    "aten.nonzero.default": lambda: X.nonzero(),
    "aten.masked_select.default": lambda: X.masked_select(X > 0),
    "aten.repeat_interleave.Tensor": lambda: torch.repeat_interleave(torch.ones(3, dtype=torch.int64)),
    "aten.index.Tensor": lambda: X[X > 0],
    "aten.index_put_.default": lambda: X.clone().index_put_((X > 0,), X[:2]),
    "aten.lift_fresh.default": lambda: torch.tensor([1, 2]) + torch.from_numpy(np.zeros(2)),
    "aten._to_copy.default": lambda: X.to("meta"),
    "aten.copy_.default": lambda: torch.empty(3, device="meta").copy_(X),
    "torch.frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8),
    "Tensor.tolist": lambda: X.tolist(),
    "Tensor.numpy": lambda: np.asarray(X),
    "Kernel.__call__": lambda: CpuPlatform().fused_ops(torch.float32).silu_mul(torch.zeros(1, 64)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses_what_a_graph_cannot_hold(name: str) -> None:
    if name == "Kernel.__call__" and isinstance(CpuPlatform().fused_ops(torch.float32), TorchFusedOps):
        pytest.skip("there is no compiler")
    with pytest.raises(RefusedError, match=name.replace(".", r"\.")):
        RecordedGraph.capture(REFUSALS[name])
    assert set(RecordedGraph.capture(REFUSALS[name], frozenset({name})).refused) == {name}


def test_it_holds_reads_by_index_and_copies_that_do_not_block() -> None:
    index, x = torch.tensor([2, 0]), torch.randn(3)
    graph = RecordedGraph.capture(lambda: (x[index], x.to(torch.bfloat16), x.to("meta", non_blocking=True)))
    x.copy_(torch.randn(3))
    taken, half, _ = graph.replay()
    assert torch.equal(taken, x[index]) and torch.equal(half, x.bfloat16())


# ---- the decoder ----


def spec_of(qk_norm: bool) -> ArchSpec:
    """Qwen3's shape of a layer with a norm of q and k, else Llama's; 2 layers."""
    dim, norm = 16 if qk_norm else 8, Norm(1e-6)
    layer = LayerSpec(
        attention=Gqa(num_heads=4, num_kv_heads=2, head_dim=dim, qk_norm=QkNorm.PER_HEAD if qk_norm else None),
        params=AttentionParams(dim**-0.5), position=RopeSpec(), norm=norm, mlp=Gated(48, Activation.SILU),
    )  # fmt: skip
    return ArchSpec(
        architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM", vocab_size=97, hidden_size=32,
        layers=(layer,) * LAYERS, max_position_embeddings=256, final_norm=norm, tie_word_embeddings=qk_norm,
        torch_dtype="bfloat16", eos_token_ids=(),
    )  # fmt: skip


def make_decoder(qk_norm: bool, dtype: torch.dtype) -> Decoder:
    """The decoder as a GPU would have it."""
    spec = spec_of(qk_norm)
    attention, stream = GPU.attention(dtype, spec.head_dim), WeightStream((), InlineCopier())
    decoder = Decoder(spec, ParallelContext.single(), attention, GPU, dtype, stream)
    decoder.load(DummySource(0, dtype), dtype=dtype, device=CPU, progress=False)
    return decoder


def decode_batch(lens: list[int], seed: int) -> ForwardBatch:
    """A step of one token per row, with tokens and blocks of its own; row r's context has lens[r] tokens."""
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(-(-length // BLOCK))] for length in lens]
    width = max(map(len, tables))
    slots = [table[-1] * BLOCK + (length - 1) % BLOCK for table, length in zip(tables, lens, strict=True)]
    return ForwardBatch(
        input_ids_T=torch.tensor([rng.randrange(97) for _ in lens]),
        positions_T=torch.tensor(lens) - 1,
        slot_mapping_T=torch.tensor(slots),
        query_starts=torch.arange(len(lens) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table_RN=torch.tensor([table + table[:1] * (width - len(table)) for table in tables], dtype=torch.int32),
        logits_rows_S=torch.arange(len(lens)),
        query_lens_list=[1] * len(lens),
        seq_lens_list=lens,
        block_size=BLOCK,
    )


def tensors_of(batch: ForwardBatch) -> list[torch.Tensor]:
    return [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)]


def fresh_kv(decoder: Decoder, dtype: torch.dtype) -> KVCache:
    kv = KVCache.allocate(decoder.kv_layouts, NUM_BLOCKS, BLOCK, dtype, GPU)
    kv.slab.copy_(torch.randn(kv.slab.shape, generator=torch.Generator().manual_seed(1)))
    return kv


DECODERS = {
    (qk_norm, dtype): make_decoder(qk_norm, dtype)
    for qk_norm in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
}
# The groups of rows are constants: a graph's key holds the number of blocks of each row, and one that is not full.
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5).flatmap(
    lambda blocks: st.tuples(
        *[st.tuples(*[st.integers((n - 1) * BLOCK + 1, n * BLOCK - (i == 0)) for i, n in enumerate(blocks)])] * 2
    )
)


@pytest.mark.parametrize(("qk_norm", "dtype"), DECODERS, ids=lambda value: str(value))
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 1000))
def test_a_decode_step_replays_another_batch(
    qk_norm: bool, dtype: torch.dtype, lengths: tuple[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    """Captured with batch A in static inputs; with B's copied in, the replay equals B computed eagerly, bit for bit,
    logits and cache."""
    decoder = DECODERS[qk_norm, dtype]
    a, b = (decode_batch(list(lens), seed + place) for place, lens in enumerate(lengths))
    static = replace(a, **{f.name: v.clone() for f in fields(a) if isinstance(v := getattr(a, f.name), torch.Tensor)})
    kv, eager_kv = fresh_kv(decoder, dtype), fresh_kv(decoder, dtype)
    graph = RecordedGraph.capture(lambda: forward(decoder, static, kv.tensors))
    assert torch.equal(graph.outputs, forward(decoder, a, fresh_kv(decoder, dtype).tensors))
    kv.slab.copy_(eager_kv.slab)
    for mine, its in zip(tensors_of(static), tensors_of(b), strict=True):
        mine.copy_(its)
    expected = forward(decoder, b, eager_kv.tensors)
    assert torch.equal(graph.replay(), expected)
    assert torch.equal(kv.slab, eager_kv.slab)


@torch.no_grad()
def forward(decoder: Decoder, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
    return decoder.forward(batch, kv, None)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_graph_can_hold_sampling(kind: str) -> None:
    """Its parameters have come with the rows; a replay draws what other logits, positions and tokens ask for: logits
    processors read them on the device."""
    rows, accelerator, held = np.arange(3), HostAccelerator(), np.arange(5, 25, dtype=np.int32) % 17

    def bound() -> SamplingTable:
        table = SamplingTable(3, 97)
        for row in rows:
            table.bind(int(row), SAMPLINGS[kind])
        return table

    def history(row: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
        return held[:position], 5

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        edited = logits.clone()
        return sample(edited, rows, at.numpy(), bound(), history, GPU).ids_S, edited

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        edited = logits.clone()
        return mine.draw(edited, accelerator, at, there).ids_S, edited

    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    positions, table, send = rows + 9, bound(), sending_with(accelerator.to_device)
    reads = table.flags[0] & READS_TOKENS > 0
    tokens = DeviceTokens(np.full(3, 5), np.full(3, 7), positions + 4) if reads else None
    mine = Sampling(rows, positions, table, history, GPU.sampling_ops(), send, is_ahead=True, tokens=tokens)
    at, there = torch.from_numpy(positions.copy()), torch.from_numpy(np.tile(held, (3, 1)))
    graph = RecordedGraph.capture(body)
    assert all(map(torch.equal, graph.outputs, plain()))
    for step in range(1, 4):
        logits.copy_(logits.flip(1))
        at += 1
        held[7:] = np.roll(held[7:], step)  # behind those that the host has read
        there.copy_(torch.from_numpy(np.tile(held, (3, 1))))
        assert all(map(torch.equal, graph.replay(), plain())), step


def test_a_row_with_more_blocks_needs_another_graph_today() -> None:
    """The blocks to gather are chosen on the host: a replay does not read those that row 0 has gained."""
    decoder, dtype = DECODERS[False, torch.float32], torch.float32
    now = decode_batch([11, 6], 0)
    lens = torch.tensor([3, 6], dtype=torch.int32)
    static = replace(now, seq_lens=lens, seq_lens_list=lens.tolist(), positions_T=lens.long() - 1)
    kv, eager_kv = fresh_kv(decoder, dtype), fresh_kv(decoder, dtype)
    graph = RecordedGraph.capture(lambda: forward(decoder, static, kv.tensors))
    kv.slab.copy_(eager_kv.slab)
    for mine, its in zip(tensors_of(static), tensors_of(now), strict=True):
        mine.copy_(its)
    replayed, expected = graph.replay(), forward(decoder, now, eager_kv.tensors)
    assert torch.allclose(replayed[1], expected[1], atol=1e-5)
    assert not torch.allclose(replayed[0], expected[0], atol=1e-2)
