"""Scores over HTTP and of LLM.score() are transformers': cosines of embeddings, and the two-way softmax of a judging
model's tokens."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import LLM, PoolingParams
from tandem.cluster.cli.batch.local_dispatch import LocalDispatch
from tandem.cluster.deploy.resolved_settings import resolve_settings
from tandem.cluster.gateway.app import wiring
from tandem.cluster.gateway.app.routes import build_gateway_app
from tandem.configs.load import merge_config
from tandem.workers.build import offline_settings
from tests.parity.test_prompt_logprobs import DEMO

QUERY, DOCUMENTS = "Who has a boat?", ["The cat sleeps.", "Tom has a boat and a dog.", "A boat"]
NEAR = 2e-4


@asynccontextmanager
async def served(**flags: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = resolve_settings(merge_config(None, "demo", {"dtype": "float32", **flags}))
    async with LocalDispatch(offline_settings(settings.engine)) as dispatch:
        metrics = wiring.build_metrics(settings)
        text = wiring.build_text_services(settings, metrics)
        accounts = wiring.build_accounts(settings.gateway, open_port=False)
        app = build_gateway_app(text, accounts, wiring.build_context(settings, dispatch, accounts, metrics))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client
        text.workers.close()


@lru_cache(maxsize=1)
def peer() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(DEMO)


def embedding(text: str) -> torch.Tensor:
    model, tokenizer = peer()
    with torch.inference_mode():
        state: torch.Tensor = model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1]
    return state


async def test_cosines_of_embeddings() -> None:
    async with served() as client:
        answer = (await client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS})).json()
        ranked = (await client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})).json()
    with LLM("demo", dtype="float32") as llm:
        offline = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    own = [torch.cosine_similarity(embedding(QUERY), embedding(text), dim=0).item() for text in DOCUMENTS]
    assert [output.outputs.score for output in offline] == pytest.approx(own, abs=NEAR)
    assert [item["score"] for item in answer["data"]] == pytest.approx(own, abs=NEAR)
    order = sorted(range(3), key=lambda i: -own[i])
    assert [result["index"] for result in ranked["results"]] == order
    assert [result["relevance_score"] for result in ranked["results"]] == pytest.approx(
        [own[i] for i in order], abs=NEAR
    )


async def test_a_judging_models_two_way_softmax() -> None:
    """As Qwen3-Reranker's own code does it: softmax over the logits of both tokens behind the prompt."""
    model, tokenizer = peer()
    no, yes = tokenizer.convert_ids_to_tokens([300, 400])
    kind = model.config.architectures[0].replace("ForCausalLM", "ForSequenceClassification")
    overrides = {"architectures": [kind], "classifier_from_token": [no, yes], "is_original_qwen3_reranker": True}
    async with served(hf_overrides=overrides) as client:
        answer = (await client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS})).json()
    with LLM("demo", dtype="float32", hf_overrides=overrides) as llm:
        offline = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        logits = llm.score(QUERY, DOCUMENTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    own, differences = [], []
    for text in DOCUMENTS:
        with torch.inference_mode():
            logits_V = model(torch.tensor([tokenizer(QUERY + text).input_ids])).logits[0, -1]
        own.append(logits_V[[300, 400]].softmax(0)[1].item())
        differences.append((logits_V[400] - logits_V[300]).item())
    assert [output.outputs.score for output in offline] == pytest.approx(own, abs=NEAR)
    assert [output.outputs.score for output in logits] == pytest.approx(differences, abs=NEAR)
    assert [output.prompt_token_ids for output in offline] == [tokenizer(QUERY + text).input_ids for text in DOCUMENTS]
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx(own, abs=NEAR) and len({round(one, 4) for one in own}) == 3
    used = sum(len(tokenizer(QUERY + text).input_ids) for text in DOCUMENTS)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (used, 0)
