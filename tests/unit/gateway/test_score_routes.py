"""POST /v1/score and /v1/rerank: bodies, both kinds of scorers, truncation, usage, refusals."""

import math
from typing import Any

import numpy as np
import pytest

from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.models.spec.config.classifier_config import read_classifier
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.pair_judge import PairJudge
from tests.support.fake_backend import FakeBackend, embedding_of
from tests.unit.gateway.rig import BOS, CONTEXT, MODEL, Rig, error_of, gateway

SCORE, RERANK = "/v1/score", "/v1/rerank"
NO, YES = ord("n"), ord("y")
TEMPLATE = (
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}|"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}?"
)
JUDGE = PairJudge(NO, YES, ChatTemplate(TEMPLATE, {}))
PAIR = {"text_1": "a", "text_2": "b"}


class JudgingBackend(FakeBackend):
    """Says of each prompt that the difference of the two tokens' logits is its length less 10."""

    def step(self) -> None:
        for stream in self.streams.values():
            take = stream.part.take

            def told(deltas: Any, stream: Any = stream, take: Any = take) -> Any:
                size = len(stream.request.prompt_token_ids)
                entry = TokenLogprobs(token_id=YES, logprob=-1.0, top=[(NO, -3.0), (YES, -13.0 + size)])
                replaced = [
                    delta if not delta.token_ids else type(delta)(**{**_fields(delta), "logprobs": [entry]})
                    for delta in deltas
                ]
                return take(replaced)

            stream.part.take = told
        super().step()


def _fields(delta: Any) -> dict[str, Any]:
    return {name: getattr(delta, name) for name in delta.__struct_fields__}


async def post(rig: Rig, path: str, **body: Any) -> Any:
    return await rig.client.post(path, json=body)


def cosine(a: list[float], b: list[float]) -> float:
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


async def test_texts_are_compared_by_their_embeddings() -> None:
    async with gateway() as rig:
        answer = (await post(rig, SCORE, model=MODEL, text_1="one", text_2=["two", "three", "one"])).json()
        one, *rest = [embedding_of(request) for request in rig.backend.requests]
        assert len(rest) == 3, "the first text is embedded once"
        scores = [item["score"] for item in answer["data"]]
        assert scores == pytest.approx([cosine(one, other) for other in rest]) and scores[2] == pytest.approx(1)
        assert [item["index"] for item in answer["data"]] == [0, 1, 2] and answer["data"][0]["object"] == "score"
        assert answer["id"].startswith("score-") and (answer["object"], answer["model"]) == ("list", MODEL)
        used = sum(len(request.prompt_token_ids) for request in rig.backend.requests)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == used
        await rig.settle()
        (row,) = rig.ledger.rows
        assert (row.prompt_tokens, row.completion_tokens) == (used, 0)


async def test_as_many_of_both_are_pairs_and_all_names_are_known() -> None:
    bodies = (
        {"text_1": ["a", "bc"], "text_2": ["a", "b"]},
        {"queries": ["a", "bc"], "documents": [{"text": "a"}, "b"]},
        {"queries": ["a", "bc"], "items": ["a", "b"]},
        {"data_1": ["a", "bc"], "data_2": ["a", "b"]},
    )
    async with gateway() as rig:
        for path in (SCORE, "/score"):
            for body in bodies:
                first, second = (await post(rig, path, **body)).json()["data"]
                assert first["score"] == pytest.approx(1) and second["score"] < 1


async def test_documents_come_by_their_scores() -> None:
    documents = ["zzz", "query", {"text": "quern"}]
    async with gateway() as rig:
        for path in (RERANK, "/v2/rerank", "/rerank"):
            answer = (await post(rig, path, query="query", documents=documents)).json()
            results = answer["results"]
            assert [result["index"] for result in results] == [1, 2, 0]
            assert results[1]["document"] == {"text": "quern"} and answer["id"].startswith("rerank-")
            scores = [result["relevance_score"] for result in results]
            assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1)
            assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
        best = (await post(rig, RERANK, query="query", documents=documents, top_n=1, return_documents=False)).json()
        assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(1)}]


async def test_a_judging_model_says_how_probable_yes_is() -> None:
    async with gateway(JudgingBackend(), text={"judge": JUDGE}) as rig:
        answer = (await post(rig, SCORE, text_1="ask", text_2=["ab", "abcdefgh"])).json()
        prompts = [request.prompt_token_ids for request in rig.backend.requests]
        assert prompts[0] == [BOS, *b"ask|ab?"] and len(prompts) == 2
        sampling = rig.backend.requests[0].sampling
        assert (sampling.max_tokens, sampling.logprob_token_ids) == (1, (NO, YES))
        expected = [1 / (1 + math.exp(10 - len(prompt))) for prompt in prompts]
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected)
        raw = (await post(rig, SCORE, text_1="ask", text_2="ab", use_activation=False)).json()
        assert raw["data"][0]["score"] == pytest.approx(len(prompts[0]) - 10)
        assert answer["usage"]["completion_tokens"] == 0
        await rig.settle()
        assert [row.completion_tokens for row in rig.ledger.rows] == [0, 0]
    async with gateway(JudgingBackend(), text={"judge": PairJudge(NO, YES)}) as rig:
        await post(rig, SCORE, text_1="ask", text_2="ab")
        assert rig.backend.requests[0].prompt_token_ids == [BOS, *b"askab"]


async def test_texts_are_cut_as_asked() -> None:
    async with gateway() as rig:
        await post(rig, RERANK, query="abcd", documents=["efgh"], max_tokens_per_query=2, max_tokens_per_doc=3)
        assert [request.prompt_token_ids for request in rig.backend.requests] == [[BOS, *b"ab"], [BOS, *b"efg"]]
        await post(rig, SCORE, text_1="abcd", text_2="efgh", truncate_prompt_tokens=2)
        assert [request.prompt_token_ids for request in rig.backend.requests[2:]] == [[*b"cd"], [*b"gh"]]
        assert (await post(rig, SCORE, text_1="x" * 600, text_2="y", truncate_prompt_tokens=-1)).status_code == 200


async def test_what_means_nothing_is_named() -> None:
    async with gateway() as rig:
        answer = await post(rig, SCORE, **PAIR, use_activation=True, metadata={"a": 1})
        assert answer.headers["x-tandem-ignored"] == "metadata, use_activation" and answer.status_code == 200


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (SCORE, {}, "text_1", "invalid_value"),
    (SCORE, {"text_1": "a"}, "text_1", "invalid_value"),
    (SCORE, {"text_1": "a", "documents": "b"}, "documents", "invalid_value"),
    (SCORE, {**PAIR, "queries": "c"}, "queries", "invalid_value"),
    (SCORE, {"text_1": [], "text_2": "b"}, "text_1", "invalid_value"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "invalid_value"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_2", "invalid_value"),
    (SCORE, {"text_1": "a", "text_2": [5]}, "text_2[0]", "invalid_value"),
    (SCORE, {"text_1": "a", "text_2": {"content": []}}, "text_2.content", "unsupported_parameter"),
    (SCORE, {"text_1": "a", "text_2": "x" * 600}, "text_2", "context_length_exceeded"),
    (SCORE, {"text_1": "a", "text_2": "", "add_special_tokens": False}, "text_2", "invalid_value"),
    (SCORE, {**PAIR, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    (SCORE, {**PAIR, "bogus": 1}, "bogus", "unsupported_parameter"),
    (SCORE, {**PAIR, "model": "nobody"}, "model", "model_not_found"),
    (RERANK, {"query": "a"}, "documents", "invalid_value"),
    (RERANK, {"query": ["a"], "documents": ["b"]}, "query", "invalid_value"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "invalid_value"),
    (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": CONTEXT}, "max_tokens_per_doc", "invalid_value"),
    (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents", "invalid_value"),
    (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "unsupported_parameter"),
]


async def test_it_is_refused_by_name() -> None:
    wrong = []
    async with gateway() as rig:
        for path, body, param, code in REFUSED:
            error = error_of(await post(rig, path, **body))
            if (error["param"], error["code"]) != (param, code):
                wrong.append((body, error))
        assert not wrong and not rig.backend.requests, wrong


QWEN = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"classifier_from_token": ["Yes"], "method": "no_post_processing"}, "no_post_processing"),
    ({"classifier_from_token": ["no", "yes"]}, "method None"),
    ({**QWEN, "classifier_from_token": ["no"]}, "two tokens"),
    ({**QWEN, "classifier_from_token": ["no", "maybe"]}, "no token 'maybe'"),
]


def test_the_tokens_of_a_judging_model() -> None:
    known = {"no": 5, "yes": 7}
    assert read_classifier({}, known.get) is None
    assert read_classifier(QWEN, known.get) == (5, 7)
    two_way = {"classifier_from_token": ["yes", "no"], "method": "from_2_way_softmax"}
    assert read_classifier(two_way, known.get) == (7, 5)
    for config, words in WRONG:
        with pytest.raises(Exception, match=words) as error:
            read_classifier(config, known.get)
        assert "--hf-overrides" in str(error.value)


async def test_tokenizer_info_has_what_lm_eval_reads() -> None:
    async with gateway() as rig:
        info = (await rig.client.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", None)
        assert info["chat_template"].startswith("{% for m in messages %}") and info["model_max_length"] == CONTEXT


async def test_prefix_caches_are_reset_with_the_admin_key() -> None:
    backend, path = FakeBackend(), "/reset_prefix_cache"
    async with gateway(backend, auth=StaticKeys(["user"], ["root"])) as rig:
        for key, status in (("nobody", 401), ("user", 403)):
            assert (await rig.client.post(path, headers={"authorization": f"Bearer {key}"})).status_code == status
        assert backend.num_resets == 0
        root = {"authorization": "Bearer root"}
        assert (await rig.client.post(path, headers=root)).json() == {"status": "ok"} and backend.num_resets == 1
        backend.unconfirmed = ("g2",)
        late = await rig.client.post(path, headers=root)
        assert late.status_code == 503 and "g2" in error_of(late)["message"]
        assert error_of(await rig.client.post(f"{path}?reset_external=1", headers=root))["param"] == "reset_external"
