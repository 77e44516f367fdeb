"""Log probabilities of prompts are transformers' log_softmax: in chunks, in several pieces, beside other rows, after
prefix hits and preemption, over TP and PP ranks, and when memory runs out on the way."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tandem import LLM
from tandem.workers.messages.request import NO_TOKENS, GenerationRequest, Pool, SamplingParams
from tests.support.adapters import ALL_LINEARS, load_adapted_peer, save_random_adapter
from tests.support.engine_ranks import GROUPS, IN_CHUNKS, EngineCase, Fault, Told, run_engine
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import load_peer

Folder = Callable[[str], Path]
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
NEAR = 1e-4
"""Logits are of the order of 10; float32, sums in another order."""
OFTEN = {(1, 1, False), (1, 1, True), (2, 1, True), (1, 2, False), (2, 2, False)}
OUT_OF_MEMORY = [
    pytest.param(tp, pp, late, marks=() if (tp, pp, late) in OFTEN else pytest.mark.chaos)
    for tp, pp in GROUPS
    for late in (False, True)
]
"""TP and PP size, and whether the host learns a step late that memory ran out, as on a device."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * seed + 5 * k + k * k) % 190 for k in range(length)]


def scored(name: str, length: int, wanted: int = 3, seed: int = 0, **more: Any) -> GenerationRequest:
    params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **more}
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt_of(length, seed),
        sampling=msgspec.structs.replace(SamplingParams(prompt_logprobs=wanted), **params),  # max_tokens may be 0
    )


def mixed() -> tuple[GenerationRequest, ...]:
    """Prompts of all kinds beside rows that generate, and rows that are pooled."""
    plain = [
        GenerationRequest(
            request_id=f"text-{i}",
            prompt_token_ids=prompt_of(5 + 6 * i, 40 + i),
            sampling=SamplingParams(max_tokens=5 + i, temperature=0.0, ignore_eos=True),
        )
        for i in range(2)
    ]
    pooled = GenerationRequest(
        request_id="pooled", prompt_token_ids=prompt_of(20, 9), sampling=NO_TOKENS, pool=Pool(kind="mean")
    )
    return (
        plain[0],
        scored("one", 1),
        scored("two", 2, 0),
        pooled,
        scored("several", 17, 5, seed=1, n=2),
        plain[1],
        scored("long", 37, 1, seed=2),
        scored("only", 30, 2, seed=3, max_tokens=0),
    )


@lru_cache(maxsize=1)
def peer(folder: Path) -> Any:
    return load_peer(folder)


def serve(case: EngineCase) -> list[Told]:
    torch.set_num_threads(1)
    return ThreadRanks().call(run_engine, case.tp_size, case.pp_size, case)  # type: ignore[no-any-return]


def check(told: Told, folder: Path, requests: Sequence[GenerationRequest]) -> None:
    assert told.errors == []
    for request in requests:
        wanted, ids = request.sampling.prompt_logprobs, request.prompt_token_ids
        entries = told.prompt_logprobs.get(request.request_id, [])
        if wanted is None:
            assert entries == []
            continue
        with torch.inference_mode():
            logits_TV = peer(folder)(torch.tensor([ids])).logits[0].float()
        logprobs_TV = torch.log_softmax(logits_TV, -1)[:-1]
        assert [entry.token_id for entry in entries] == ids[1:]
        for entry, of_V, token in zip(entries, logprobs_TV, ids[1:], strict=True):
            assert entry.logprob == pytest.approx(float(of_V[token]), abs=NEAR)
            assert len(entry.top) == wanted
            best = torch.topk(of_V, wanted).values.numpy()
            np.testing.assert_allclose([logprob for _, logprob in entry.top], best, atol=NEAR)
            assert all(logprob == pytest.approx(float(of_V[i]), abs=NEAR) for i, logprob in entry.top)
            low, high = (int((of_V > of_V[token] + by).sum()) + 1 for by in (NEAR, -NEAR))
            assert low <= entry.rank <= high


@pytest.mark.parametrize(("tp", "pp", "late"), IN_CHUNKS)
def test_chunks_beside_other_rows(tiny_folder: Folder, tp: int, pp: int, late: bool) -> None:
    folder, requests = tiny_folder("qwen3"), mixed()
    case = EngineCase(folder, tp, pp, requests, late=late, max_num_batched_tokens=7, num_blocks=96)
    told = serve(case)[0]
    check(told, folder, requests)
    assert told.tokens["only", 0] == [] and told.reasons["only"] == ["length"]
    assert told.usages["only"].completion_tokens == 0 and told.usages["only"].prompt_tokens == 30
    assert len(told.embeddings) == 1
    plain = tuple(r for r in requests if r.sampling.prompt_logprobs is None)
    alone = serve(EngineCase(folder, 1, 1, plain, num_blocks=96))[0]
    assert {key: told.tokens[key] for key in alone.tokens} == alone.tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_more_positions_than_one_piece(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    monkeypatch.setattr("tandem.workers.sampling.prompt_logprobs.PIECE_ROWS", 5)
    folder = tiny_folder("llama-gqa")
    requests = (scored("a", 60), scored("b", 23, 0, seed=1), scored("c", 9, 7, seed=2))
    check(serve(EngineCase(folder, tp, 1, requests, max_num_batched_tokens=64))[0], folder, requests)


def test_the_whole_context_without_a_token(tiny_folder: Folder) -> None:
    """256 tokens in one step are 255 positions; no position is kept for an output token."""
    folder, request = tiny_folder("llama-gqa"), scored("a", 256, max_tokens=0)
    told = serve(EngineCase(folder, 1, 1, (request,), max_num_batched_tokens=256))[0]
    check(told, folder, (request,))


def test_a_prefix_in_the_cache_is_computed_again(tiny_folder: Folder) -> None:
    folder = tiny_folder("llama-gqa")
    text = GenerationRequest(request_id="t", prompt_token_ids=prompt_of(37), sampling=SamplingParams(max_tokens=2))
    requests = (text, scored("a", 37), scored("b", 37, 0, max_tokens=0))
    told = serve(EngineCase(folder, 1, 1, requests, most_rows=1))[0]
    check(told, folder, requests)
    assert [told.usages[name].cached_tokens for name in ("a", "b")] == [0, 0]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1)])
def test_preemption_repeats_nothing(tiny_folder: Folder, tp: int, pp: int) -> None:
    folder = tiny_folder("llama-gqa")
    requests = tuple(scored(f"r{i}", 21 + i, 2, seed=i, max_tokens=20) for i in range(4))
    told = serve(EngineCase(folder, tp, pp, requests, num_blocks=20, max_num_batched_tokens=9))[0]
    assert told.num_preempted
    check(told, folder, requests)


@pytest.mark.parametrize(("tp", "pp", "late"), OUT_OF_MEMORY)
def test_memory_that_runs_out_repeats_nothing(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, late: bool
) -> None:
    """On the first and the last rank: at once, between the layers, and between the pieces that pass the head."""
    monkeypatch.setattr("tandem.workers.sampling.prompt_logprobs.PIECE_ROWS", 3)
    folder, requests = tiny_folder("qwen3"), mixed()
    struck: Counter[int] = Counter()
    ranks = sorted({0, tp * pp - 1})
    places = ((3, 11) if pp == 1 else (3, 7)) if tp > 1 else (0,)
    often = zip(ranks, places, strict=True) if (tp, pp, late) == (2, 1, True) else product(ranks, places)
    for rank, collectives in often:
        faults = tuple(Fault(rank, step, collectives, 2) for step in (1, 4, 7))
        case = EngineCase(folder, tp, pp, requests, faults, late, max_num_batched_tokens=12, num_blocks=96)
        told = serve(case)
        assert len(told[0].failures) >= told[rank].num_struck
        struck[collectives] += told[rank].num_struck
        check(told[0], folder, requests)
    assert all(struck.values())


def test_rows_with_adapters_on_all_linears_and_both_tables(tmp_path: Path) -> None:
    """Three adapters and none in each step, in chunks: as peft's own models."""
    modules = (*ALL_LINEARS, "embed_tokens", "lm_head")
    folders = [save_random_adapter(DEMO, tmp_path / str(n), rank=4, seed=n, modules=modules) for n in range(3)]
    prompts = [prompt_of(11 + 9 * row, row) for row in range(6)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    with LLM(
        DEMO, dtype="float32", device="cpu", enable_lora=True, max_loras=3, max_num_seqs=6, max_num_batched_tokens=24
    ) as llm:
        refs = [None if row == 4 else llm.load_adapter(folders[row % 3]) for row in range(6)]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=refs)
        plain = llm.generate(prompts[0], SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain[0].prompt_logprobs is None
    models = [load_adapted_peer(DEMO, folder) for folder in folders]
    for row, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.outputs[0].error is None and output.prompt_logprobs is not None
        first, *entries = output.prompt_logprobs
        assert first is None and len(entries) == len(ids) - 1
        model: Any = load_peer(DEMO) if row == 4 else models[row % 3]
        with torch.inference_mode():
            logprobs_TV = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        for of_V, token, entry in zip(logprobs_TV, ids[1:], entries, strict=False):
            assert entry is not None and len(entry) in (2, 3)
            assert entry[token].logprob == pytest.approx(float(of_V[token]), abs=NEAR)
