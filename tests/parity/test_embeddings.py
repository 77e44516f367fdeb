"""Embeddings are transformers' hidden states after the final norm, pooled by hand: in chunks, beside rows that
generate, after prefix hits and preemption, over TP and PP ranks, and when memory runs out on the way.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.workers.messages.request import NO_TOKENS, GenerationRequest, Pool, SamplingParams, Usage
from tests.support.engine_ranks import GROUPS, IN_CHUNKS, EngineCase, Fault, Told, run_engine
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import load_peer

Folder = Callable[[str], Path]
Vector = npt.NDArray[np.float32]
POOLS = (
    Pool(kind="last"),
    Pool(kind="mean"),
    Pool(kind="last", normalize=False),
    Pool(kind="mean", normalize=False),
    Pool(kind="mean", dimensions=10),
    Pool(kind="last", dimensions=7, normalize=False),
)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * seed + 5 * k + k * k) % 190 for k in range(length)]


def pools(lengths: Sequence[int]) -> tuple[GenerationRequest, ...]:
    """Each length with each pooling."""
    return tuple(
        GenerationRequest(
            request_id=f"{kind}-{length}", prompt_token_ids=prompt_of(length, kind), sampling=NO_TOKENS, pool=pool
        )
        for length in lengths
        for kind, pool in enumerate(POOLS)
    )


def generations(count: int, max_tokens: int = 5) -> tuple[GenerationRequest, ...]:
    return tuple(
        GenerationRequest(
            request_id=f"text-{i}",
            prompt_token_ids=prompt_of(5 + 6 * i, 40 + i),
            sampling=SamplingParams(max_tokens=max_tokens + i, temperature=0.0, ignore_eos=True, n=1 + i % 2),
        )
        for i in range(count)
    )


@lru_cache(maxsize=1)
def peer(folder: Path) -> Any:
    return load_peer(folder)


def pooled(folder: Path, request: GenerationRequest) -> Vector:
    """The embedding by transformers."""
    pool = request.pool
    assert pool is not None
    with torch.inference_mode():
        hidden_TH = peer(folder).model(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
    vector_H = hidden_TH[-1] if pool.kind == "last" else hidden_TH.mean(0)
    vector_H = vector_H[: pool.dimensions]
    return (vector_H / vector_H.norm() if pool.normalize else vector_H).numpy()


def serve(case: EngineCase) -> list[Told]:
    torch.set_num_threads(1)
    return ThreadRanks().call(run_engine, case.tp_size, case.pp_size, case)  # type: ignore[no-any-return]


def check(told: Told, folder: Path, requests: Sequence[GenerationRequest]) -> None:
    wanted = [request for request in requests if request.pool is not None]
    assert len(told.embeddings) == len(wanted) > 0 and told.errors == []
    for request in wanted:
        got = np.frombuffer(told.embeddings[request.request_id], "<f4")
        np.testing.assert_allclose(got, pooled(folder, request), atol=2e-5, err_msg=request.request_id)
        assert told.reasons[request.request_id] == ["stop"] and told.tokens[request.request_id, 0] == []
        assert told.usages[request.request_id].completion_tokens == 0
        assert told.usages[request.request_id].prompt_tokens == len(request.prompt_token_ids)


@pytest.mark.parametrize(("tp", "pp", "late"), IN_CHUNKS)
def test_chunks_beside_rows_that_generate(tiny_folder: Folder, tp: int, pp: int, late: bool) -> None:
    """Seven tokens a step: most prompts take several, and nearly every step has rows of both kinds."""
    folder = tiny_folder("qwen3")
    texts = generations(4)
    embedded = pools((1, 17, 2, 37))
    requests = (*texts[:2], *embedded[:12], *texts[2:], *embedded[12:])
    case = EngineCase(folder, tp, pp, requests, late=late, max_num_batched_tokens=7, num_blocks=96)
    told = serve(case)
    check(told[0], folder, requests)
    alone = serve(EngineCase(folder, 1, 1, texts, num_blocks=96))[0]
    assert {key: tokens for key, tokens in told[0].tokens.items() if key in alone.tokens} == alone.tokens


@pytest.mark.parametrize("name", ["llama-mha-tied", "llama-mqa-biased", "mistral-window", "qwen2", "smollm3"])
def test_families(tiny_folder: Folder, name: str) -> None:
    requests = pools((1, 30))
    check(serve(EngineCase(tiny_folder(name), 1, 1, requests))[0], tiny_folder(name), requests)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied"])
def test_a_checkpoint_without_a_head(tiny_folder: Folder, tmp_path: Path, name: str) -> None:
    """As embedding models are saved: no tensor is called model.something, and there is no lm_head; the second one also
    says that its head is a table of its own, which an override takes back."""
    load_peer(tiny_folder(name)).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    changed = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    requests = pools((2, 30))
    check(serve(EngineCase(tmp_path, 2, 1, requests))[0], tiny_folder(name), requests)


def test_batch_mates_and_chunks_do_not_matter(tiny_folder: Folder) -> None:
    folder, requests = tiny_folder("llama-gqa"), pools((13, 37))
    together = serve(EngineCase(folder, 1, 1, requests, max_num_batched_tokens=11))[0].embeddings
    for request in requests:
        (alone,) = serve(EngineCase(folder, 1, 1, (request,), max_num_batched_tokens=64))[0].embeddings.values()
        got = np.frombuffer(together[request.request_id], "<f4")
        np.testing.assert_allclose(got, np.frombuffer(alone, "<f4"), rtol=0, atol=1e-5)


def test_a_last_token_finds_its_prefix_and_a_mean_computes_all_of_it(tiny_folder: Folder) -> None:
    """A prompt that has been generated from is embedded; what an embedding has computed, others find."""
    folder, prompt = tiny_folder("llama-gqa"), prompt_of(21)
    text = GenerationRequest(request_id="text", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2))
    last, mean = (
        GenerationRequest(request_id=kind, prompt_token_ids=prompt, sampling=NO_TOKENS, pool=Pool(kind=kind))
        for kind in ("last", "mean")
    )
    for requests, cached in (((text, last), [0, 20]), ((text, mean), [0, 0]), ((mean, text), [0, 20])):
        told = serve(EngineCase(folder, 1, 1, requests, most_rows=1))[0]
        check(told, folder, requests)
        assert [told.usages[request.request_id].cached_tokens for request in requests] == cached


@pytest.mark.parametrize("kind", [0, 1], ids=["last", "mean"])
@pytest.mark.parametrize(("tp", "pp"), GROUPS)
def test_preempted_rows_begin_again(tiny_folder: Folder, tp: int, pp: int, kind: int) -> None:
    """Thirteen blocks of four tokens, of which a prompt of 37 takes ten: the text beside it soon needs one of them."""
    folder, requests = tiny_folder("llama-gqa"), (*generations(1, max_tokens=40), pools((37,))[kind])
    case = EngineCase(folder, tp, pp, requests, num_blocks=13, max_num_batched_tokens=3, most_rows=3)
    told = serve(case)[0]
    assert told.num_preempted == 1
    check(told, folder, requests)


@pytest.mark.parametrize(
    ("tp", "pp", "late"), [(1, 1, True), (2, 1, False), (1, 2, False), (1, 2, True), (2, 2, False)]
)
def test_a_step_without_memory_is_taken_back(tiny_folder: Folder, tp: int, pp: int, late: bool) -> None:
    """Means keep the sum of the steps that count: on the rank that fails, and on its peers."""
    means = [request for request in pools((37,)) if request.pool is not None and request.pool.kind == "mean"]
    folder, requests = tiny_folder("llama-gqa"), (*means, *generations(1), *pools((13,))[:1])
    for rank in range(tp * pp):
        faults = tuple(Fault(rank, step, 0, 9) for step in (1, 6))
        case = EngineCase(folder, tp, pp, requests, faults, late, max_num_batched_tokens=12)
        told = serve(case)
        assert told[rank].num_struck == 2 <= len(told[0].failures)
        check(told[0], folder, requests)


def test_a_state_that_is_not_finite_is_the_requests_own_error(tiny_folder: Folder) -> None:
    folder, requests = tiny_folder("llama-gqa"), pools((13, 37))
    faults = (Fault(0, None, prompt_len=37, nan=True),)
    told = serve(EngineCase(folder, 1, 1, requests, faults, max_num_batched_tokens=16))[0]
    assert told.num_struck and len(told.errors) >= 1 and all("not finite" in error for error in told.errors)
    healthy = {request.request_id for request in requests if len(request.prompt_token_ids) == 13}
    assert healthy <= told.embeddings.keys()


def test_the_whole_context_can_be_embedded(tiny_folder: Folder) -> None:
    """No position is kept for an output token."""
    folder = tiny_folder("llama-gqa")
    whole = tuple(
        GenerationRequest(request_id=kind, prompt_token_ids=prompt_of(256), sampling=NO_TOKENS, pool=Pool(kind=kind))
        for kind in ("last", "mean")
    )
    for request in whole:
        told = serve(EngineCase(folder, 1, 1, (request,), num_blocks=64, max_num_batched_tokens=51))[0]
        check(told, folder, (request,))
        assert told.usages[request.request_id] == Usage(256, 0)
