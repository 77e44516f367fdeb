"""Triton's paged attention against the reference: in its interpreter, and on a CUDA device where one is.

As in test_triton_lora.py, the tests run in a process of their own, whose interpreter multiplies no bf16.
"""

import dataclasses
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tandem.offload.kv.kv_groups import KVGroups
from tandem.workers.attention.backend import AttentionStep
from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable
from tandem.workers.models.spec.config_reader import load_spec
from tandem.workers.planning.graph_room import table_bytes
from tests.support.attention_check import QUANTIZED, check, random_batch

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
LIMIT_S = 540
SCRATCH = 0
"""The block that belongs to nobody."""

pytest.importorskip("triton")
computes = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no interpreter, no CUDA device"
)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.PROGRAMS", 24)


class Padded:
    """A backend whose steps go through prepare_replay: made for `first`, pointed at each batch that is asked for."""

    name = "padded"

    def __init__(self, first: ForwardBatch, num_tokens: int) -> None:
        from tandem.workers.attention.triton_paged import TritonAttention

        self.backend = TritonAttention()
        self._step = self.backend.prepare_replay(first, num_tokens, SCRATCH)
        self._num_tokens = num_tokens

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        self._step.set_batch(batch)
        step, room = self._step, self._num_tokens

        class Cut:
            def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: Any, params: Any) -> torch.Tensor:
                padded = [torch.cat((x, x.new_zeros((room - len(x), *x.shape[1:])))) for x in (q, k, v)]
                return step.attend(*padded, kv, params)[: len(q)]

        return Cut()

    def replay_key(self, *of_step: Any) -> None:
        raise AssertionError("not asked")

    prepare_replay = replay_key


def triton_backend() -> Any:
    from tandem.workers.attention.triton_paged import TritonAttention

    return TritonAttention()


def on_device(batch: ForwardBatch) -> ForwardBatch:
    tensors = {
        field.name: value.to(DEVICE)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def some_batch(rng: random.Random, block_size: int, *, decodes: bool = False) -> ForwardBatch:
    seq_lens = [rng.choice((1, 2, 15, 16, 17, 40, 130)) for _ in range(rng.randint(1, 5))]
    query_lens = [min(length, rng.choice((1, 1, 3, 5) if decodes else (1, 3, 18, length))) for length in seq_lens]
    return on_device(random_batch(rng, block_size, query_lens, seq_lens))


@computes
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 12))
def test_random_steps(seed: int, kv_dtype: torch.dtype | None) -> None:
    """Decodes, drafts and chunks in one step; heads of any number and size; windows; block sizes."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2, 3))
    heads = (num_kv_heads * rng.choice((1, 2, 3, 4, 5, 12)), num_kv_heads)
    window, head_dim = rng.choice((None, None, 1, 7, 16, 33, 500)), rng.choice((8, 24, 48, 64, 128))
    check(triton_backend(), some_batch(rng, rng.choice((1, 4, 16))), heads, head_dim, window, kv_dtype=kv_dtype)


@computes
@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 6))
def test_decodes_are_split_and_padded(seed: int) -> None:
    """Steps without chunks: contexts in parts; the same through a captured step's tables, made for another batch."""
    rng = random.Random(100 + seed)
    longest = on_device(random_batch(rng, 16, [1], [250]))
    own = GroupTable(longest.slot_mapping_T, longest.block_table_RN)
    longest = dataclasses.replace(longest, further_groups=(own,))
    for backend in (triton_backend(), Padded(longest, 12)):
        for window, softcap in ((None, None), (33, 3.0)):
            check(backend, some_batch(rng, 16, decodes=True), (6, 2), 64, window, softcap=softcap)


@computes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_half_precision(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    rng = random.Random(7)
    for decodes in (True, False):
        check(triton_backend(), some_batch(rng, 16, decodes=decodes), (8, 2), 128, dtype=dtype, kv_dtype=kv_dtype)


@computes
def test_soft_caps_slopes_and_sinks() -> None:
    rng = random.Random(3)
    slopes = tuple(2.0 ** -rng.uniform(0, 8) for _ in range(6))
    sinks = tuple(rng.uniform(-3, 5) for _ in range(6))
    for softcap, own, sunk in ((5.0, None, None), (None, slopes, None), (None, None, sinks), (2.0, slopes, sinks)):
        for decodes in (True, False):
            batch, window = some_batch(rng, 16, decodes=decodes), rng.choice((None, 7, 33))
            check(triton_backend(), batch, (6, 2), 32, window, softcap=softcap, slopes=own, sinks=sunk)


@computes
def test_heads_of_256_elements() -> None:
    rng = random.Random(5)
    for dtype in HALVES:
        check(triton_backend(), some_batch(rng, 16), (4, 2), 256, dtype=dtype)


@computes
def test_captured_tables_have_room_for_more() -> None:
    """Keys of steps grow by fours: a context may grow for long before a step is captured anew."""
    backend, rng = triton_backend(), random.Random(0)
    keys = [
        backend.replay_key(on_device(random_batch(rng, 16, [1], [length])), None, torch.float32)
        for length in (1, 100, 256, 257, 1024, 1025, 5000)
    ]
    assert keys == [16, 16, 16, 64, 64, 256, 1024]
    assert all(before <= after for before, after in pairwise(keys))
    assert backend.replay_key(on_device(random_batch(rng, 16, [18], [18])), None, torch.float32) is None


@computes
def test_a_captured_step_keeps_no_more_than_the_plan_says() -> None:
    spec = load_spec(ROOT / "configs" / "demo" / "model")
    for length, blocks in ((100, 16), (3000, 256)):
        batch = on_device(random_batch(random.Random(0), 16, [1, 1], [length, 2]))
        step = triton_backend().prepare_replay(batch, 24, SCRATCH)
        kept = sum(leaf.nbytes for leaf in tree_leaves(vars(step)) if isinstance(leaf, torch.Tensor))
        assert 24 * 4 * blocks <= kept <= table_bytes(spec, KVGroups(16), 24, blocks, 4)
