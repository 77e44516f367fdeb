"""POST /v1/embeddings over the fake backend: inputs, formats, refusals, bills, hang-ups, the official client."""

import asyncio
import base64
import contextlib
import struct
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tandem.cluster.gateway.openai.embeddings import AT_ONCE
from tandem.cluster.tenants.tenant_admission import Reservation, Tenancy
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import NO_TOKENS, Pool
from tandem.workers.models.spec.config.pooling_config import PoolingFacts
from tests.support.fake_backend import FakeBackend, embedding_of
from tests.unit.gateway.rig import BOS, CONTEXT, MODEL, VOCAB, Rig, error_of, gateway, served

PATH = "/v1/embeddings"
MATRYOSHKA = {"pooling": PoolingFacts(size=8, dimensions=())}


async def embed(rig: Rig, given: Any, **body: Any) -> httpx.Response:
    return await rig.client.post(PATH, json={"input": given, **body})


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


async def test_an_answer_has_all_its_parts() -> None:
    async with gateway() as rig:
        answer = await embed(rig, "hi", model=MODEL)
        body = answer.json()
        assert set(body) == {"id", "created", "object", "data", "model", "usage"}
        assert (body["object"], body["model"]) == ("list", MODEL) and body["id"].startswith("embd-")
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        (request,) = rig.backend.requests
        assert request.prompt_token_ids == [BOS, *b"hi"] and request.pool == Pool() and request.sampling == NO_TOKENS
        assert body["data"] == [{"object": "embedding", "index": 0, "embedding": embedding_of(request)}]
        await rig.settle()
        (row,) = rig.ledger.rows
        assert (row.terminal, row.prompt_tokens, row.completion_tokens) == ("stop", 3, 0)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [[BOS, 97]]),
        (["a", "bc"], [[BOS, 97], [BOS, 98, 99]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("", [[BOS]]),
    ],
)
async def test_each_form_of_input(given: Any, prompts: list[list[int]]) -> None:
    async with gateway() as rig:
        got = vectors(await embed(rig, given))
        asked = {tuple(request.prompt_token_ids): embedding_of(request) for request in rig.backend.requests}
        assert list(asked) == [tuple(prompt) for prompt in prompts]
        assert got == [asked[tuple(prompt)] for prompt in prompts]


async def test_many_inputs_are_answered_in_order_and_not_dispatched_at_once() -> None:
    backend = FakeBackend(manual=True)
    async with gateway(backend) as rig:
        asking = asyncio.create_task(embed(rig, [[i % 250, 3] for i in range(200)]))
        most, steps = 0, 0
        while not asking.done():
            most = max(most, len(backend.streams))
            backend.step()
            steps += 1
            await asyncio.sleep(0)
        got = vectors(await asking)
        assert [vector[0] for vector in got] == [i % 250 for i in range(200)]
        assert most == AT_ONCE < 200
        assert (await asking).json()["usage"]["prompt_tokens"] == 400
        await rig.settle()
        assert len(rig.ledger.rows) == 1 and rig.ledger.rows[0].prompt_tokens == 400


async def test_base64_is_the_same_numbers() -> None:
    async with gateway() as rig:
        floats = vectors(await embed(rig, ["one", "two"]))
        packed = vectors(await embed(rig, ["one", "two"], encoding_format="base64"))
        assert [list(struct.unpack("<8f", base64.b64decode(text))) for text in packed] == floats


async def test_dimensions_and_normalize_reach_the_group() -> None:
    async with gateway(text=MATRYOSHKA) as rig:
        assert len(vectors(await embed(rig, "x", dimensions=3))[0]) == 3
        await embed(rig, "x", normalize=False)
        assert [request.pool for request in rig.backend.requests] == [Pool(dimensions=3), Pool(normalize=False)]
        error = error_of(await embed(rig, "x", dimensions=9))
        assert error["param"] == "dimensions" and "1 to 8" in error["message"]
    async with gateway(text={"pooling": PoolingFacts(size=8, dimensions=(2, 4))}) as rig:
        assert len(vectors(await embed(rig, "x", dimensions=4))[0]) == 4
        assert "2, 4" in error_of(await embed(rig, "x", dimensions=3))["message"]


async def test_truncation_keeps_the_last_tokens() -> None:
    async with gateway() as rig:
        assert (await embed(rig, [list(range(9)), [1, 2]], truncate_prompt_tokens=3)).status_code == 200
        assert [request.prompt_token_ids for request in rig.backend.requests] == [[6, 7, 8], [1, 2]]
        assert (await embed(rig, [[7] * 900], truncate_prompt_tokens=-1)).status_code == 200
        assert len(rig.backend.requests[-1].prompt_token_ids) == CONTEXT
        await embed(rig, "x", add_special_tokens=False)
        assert rig.backend.requests[-1].prompt_token_ids == [120]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_value", "input"),
        ({"input": None}, 400, "invalid_value", "input"),
        ({"input": 5}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": ["a", 5]}, 400, "invalid_value", "input"),
        ({"input": [[5], []]}, 400, "invalid_value", "input"),
        ({"input": [VOCAB]}, 400, "invalid_value", "input"),
        ({"input": [-1]}, 400, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ({"input": "", "add_special_tokens": False}, 400, "invalid_value", "input"),
        ({"input": [1] * (CONTEXT + 1)}, 400, "context_length_exceeded", "input"),
        ({"input": "x" * 2_000_000}, 400, "context_length_exceeded", "input"),
        ({"input": "x", "encoding_format": "int8"}, 400, "invalid_value", "encoding_format"),
        ({"input": "x", "dimensions": 0}, 400, "invalid_value", "dimensions"),
        ({"input": "x", "dimensions": 4}, 400, "invalid_value", "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, 400, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "x", "stream": True}, 400, "unsupported_parameter", "stream"),
        ({"input": "x", "messages": []}, 400, "unsupported_parameter", "messages"),
        ({"input": "x", "model": "another"}, 404, "model_not_found", "model"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], status: int, code: str, param: str) -> None:
    async with gateway() as rig:
        answer = await rig.client.post(PATH, json=body)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (status, code), error
        assert (error["param"] or "").partition("[")[0] == param, error
        assert rig.backend.requests == []


async def test_what_is_wrong_is_named_and_the_id_is_the_requests() -> None:
    async with gateway() as rig:
        assert error_of(await embed(rig, []))["message"].startswith("input is empty")
        wrong = error_of(await embed(rig, "a", encoding_format="hex"))
        assert wrong["message"] == 'encoding_format must be one of "base64", "float", not "hex".'
        for foreign in ([VOCAB], [[1, 2], [3, VOCAB]]):
            said = error_of(await embed(rig, foreign))["message"]
            assert f"Token id {VOCAB} is outside" in said and "check_embedding_ctx_length=False" in said
        assert (await embed(rig, ["a", "b"])).json()["id"].count("-") == 1


async def test_the_whole_context_may_be_embedded() -> None:
    async with gateway() as rig:
        assert (await embed(rig, [1] * CONTEXT)).status_code == 200


async def test_more_than_an_answer_may_take_is_refused_before_any_is_computed() -> None:
    async with gateway(settings=GatewaySettings(max_answer_bytes=2000)) as rig:
        answer = await embed(rig, ["a"] * 9)
        assert (answer.status_code, error_of(answer)["param"]) == (413, "input") and not rig.backend.requests
        assert (await embed(rig, ["a"] * 9, encoding_format="base64")).status_code == 200


async def test_a_failed_row_is_an_error_of_the_request() -> None:
    async with gateway(FakeBackend(fail_at_position=0)) as rig:
        answer = await embed(rig, ["a", "b"])
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
        await rig.settle()
        assert [row.terminal for row in rig.ledger.rows] == ["error"]


async def test_a_client_that_leaves_ends_what_still_runs() -> None:
    backend = FakeBackend(manual=True)
    async with gateway(backend) as rig, served(rig.app) as url, httpx.AsyncClient(base_url=url) as client:
        asking = asyncio.create_task(client.post(PATH, json={"input": [[i] for i in range(100)]}))
        while len(backend.streams) < AT_ONCE:
            await asyncio.sleep(0.001)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        while len(backend.aborts) < AT_ONCE:
            await asyncio.sleep(0.001)
        await rig.settle()
        assert len(backend.requests) == AT_ONCE, "the others were never sent"
        assert [row.terminal for row in rig.ledger.rows] == ["abort"]


async def test_tenants_reserve_the_prompts_and_no_output() -> None:
    class Noting(Tenancy):
        async def admit(
            self, tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
        ) -> Reservation:
            admitted.append((prompt_tokens, output_tokens, is_open_ended))
            return await super().admit(tenant, prompt_tokens, output_tokens, is_open_ended=is_open_ended)

    admitted: list[tuple[int, int, bool]] = []
    async with gateway(tenancy=Noting()) as rig:
        await embed(rig, [[1, 2, 3], [4]])
    assert admitted == [(4, 0, False)]


async def test_the_official_client_reads_it() -> None:
    async with gateway(text=MATRYOSHKA) as rig, served(rig.app) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            packed = await client.embeddings.create(model=MODEL, input=["one", "two"])  # it asks for base64
            plain = await client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
            cut = await client.embeddings.create(model=MODEL, input="one", dimensions=5)
        assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
        assert packed.data[0].embedding == embedding_of(rig.backend.requests[0])
        assert len(cut.data[0].embedding) == 5 and packed.usage.total_tokens == packed.usage.prompt_tokens == 8
