"""Adapters over HTTP: names, tenants, vLLM's routes, a switch under running streams."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.adapters.sources import FILES
from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.configs.errors import TandemError
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import AdapterRef, GenerationRequest, SamplingParams
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import EOS, MODEL, Rig, error_of, gateway

KEYS = {"Bearer a": Principal("acme", False), "Bearer b": Principal("beta", False), "Bearer root": Principal("x", True)}
A, B, ROOT = ({"authorization": key} for key in KEYS)


class ThreeKeys:
    """An Authenticator with two tenants and an admin."""

    is_open = False

    def authenticate(self, authorization: str | None) -> Principal:
        if authorization not in KEYS:
            raise RequestRefused("no", code="invalid_api_key", status=401)
        return KEYS[authorization]

    def check_metrics(self, authorization: str | None) -> None:
        """Anybody may read them."""


def content(source: str) -> str:
    text = (Path(source) / FILES[1]).read_text()
    if not text.startswith("weights "):
        raise TandemError("tensor q_proj holds NaN")
    return text.removeprefix("weights ") * 64


def write(folder: Path, digest: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / FILES[0]).write_text("{}")
    (folder / FILES[1]).write_text(f"weights {digest}")
    return str(folder)


Opened = Callable[..., Any]


def service(rig: Rig) -> AdapterService:
    """The gateway's adapters, which count requests."""
    assert rig.context.adapters is not None
    return rig.context.adapters


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """gateway() with an AdapterService whose root is tmp_path."""

    @asynccontextmanager
    async def open_rig(backend: FakeBackend | None = None, **more: Any) -> AsyncIterator[Rig]:
        adapter_service = AdapterService(AdapterList(None, MODEL), content, (MODEL, "alias/echo"))
        async with gateway(backend, adapters=adapter_service, adapter_roots=(str(tmp_path),), **more) as rig:
            yield rig
        adapter_service.close()

    return open_rig


async def load(rig: Rig, name: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await rig.client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(rig: Rig, name: str) -> httpx.Response:
    return await rig.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def names(rig: Rig, headers: dict[str, str] | None = None) -> list[str]:
    answer = await rig.client.get("/v1/models", headers=headers)
    return [model["id"] for model in answer.json()["data"]]


async def test_what_is_another_about_the_same_content_is_said(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        here, there = write(tmp_path / "pirate", "a"), write(tmp_path / "copy", "a")
        await load(rig, "pirate", here)
        assert (await load(rig, "pirate", here)).text == "Success: LoRA adapter 'pirate' there already, unchanged."
        moved = (await load(rig, "pirate", there, pinned=True)).text
        said = f"there already, unchanged; source moved from {here} to {there}, pinned."
        assert moved == f"Success: LoRA adapter 'pirate' {said}"


async def test_an_adapter_is_loaded_named_and_unloaded(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        path = write(tmp_path / "pirate", "a")
        answer = await load(rig, "pirate", path)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' added.")
        assert await names(rig) == [MODEL, "alias/echo", "pirate"]
        ref = AdapterRef(name="pirate", digest="a" * 64, source=path)
        for model in ("pirate", f"{MODEL}:pirate", "pirate@" + "a" * 8):
            answer = await rig.chat(model=model, max_tokens=1)
            assert answer.status_code == 200
            assert answer.json()["model"] == model
            assert rig.backend.requests[-1].adapter == ref
            assert (await rig.complete(model=model, max_tokens=1)).status_code == 200
            assert rig.backend.requests[-1].adapter == ref
        for model in (MODEL, "alias/echo", None):
            await rig.chat(**({} if model is None else {"model": model}), max_tokens=1)
            assert rig.backend.requests[-1].adapter is None
        tokenized = await rig.client.post("/tokenize", json={"model": "pirate", "prompt": "x"})
        assert tokenized.status_code == 200
        answer = await unload(rig, "pirate")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' removed.")
        assert (await rig.chat(model="pirate")).status_code == 404
        assert await names(rig) == [MODEL, "alias/echo"]
        again = await unload(rig, "pirate")
        assert (again.status_code, error_of(again)["code"]) == (404, "model_not_found")


async def test_an_adapter_embeds_under_its_name(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        await load(rig, "pirate", write(tmp_path / "p", "a"))
        answer = await rig.client.post("/v1/embeddings", json={"model": "pirate", "input": ["x", "y"]})
        assert (answer.status_code, answer.json()["model"]) == (200, "pirate")
        assert [request.adapter and request.adapter.name for request in rig.backend.requests] == ["pirate"] * 2
        await rig.settle()
        assert rig.ledger.rows[-1].adapter is not None and rig.ledger.rows[-1].adapter.startswith("pirate@")
        assert service(rig).requests_of(rig.backend.requests[0].adapter) == 0


async def test_the_model_object_has_root_and_parent(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        path = write(tmp_path / "pirate", "a")
        await load(rig, "pirate", path)
        shown = (await rig.client.get("/v1/models/pirate")).json()
        assert (shown["id"], shown["root"], shown["parent"]) == ("pirate", path, MODEL)
        assert shown["version"] == "pirate@" + "a" * 64
        base = (await rig.client.get(f"/v1/models/{MODEL}")).json()
        assert (base["root"], base["parent"]) == (MODEL, None)


async def test_anothers_adapter_is_not_there_in_the_words_of_an_unknown_one(opened: Opened, tmp_path: Path) -> None:
    """TN-01."""
    async with opened(auth=ThreeKeys()) as rig:
        path = write(tmp_path / "mine", "a")
        assert (await load(rig, "mine", path, ROOT, tenant="acme")).status_code == 200
        assert (await load(rig, "ours", write(tmp_path / "ours", "b"), ROOT)).status_code == 200
        assert await names(rig, A) == [MODEL, "alias/echo", "mine", "ours"]
        assert await names(rig, B) == [MODEL, "alias/echo", "ours"]
        assert await names(rig, ROOT) == [MODEL, "alias/echo", "mine", "ours"], "an admin sees all"
        seen = [(await rig.client.get(f"/v1/models/{name}", headers=ROOT)).json() for name in (MODEL, "mine", "ours")]
        assert [model["owned_by"] for model in seen] == ["tandem", "acme", "tandem"]
        assert seen[1]["root"] == path
        asked = {"model": "mine", "prompt": "x"}
        used = await rig.client.post("/v1/completions", json=asked, headers=ROOT)
        assert used.status_code == 404, "and uses what is its tenant's"
        shown = (await rig.client.get("/v1/models/mine", headers=A)).json()
        assert shown["root"] == "mine@" + "a" * 64, "where it lies is not a tenant's to know"
        for name in ("mine", f"{MODEL}:mine", "mine@" + "a" * 64):
            unknown = name.replace("mine", "none")
            for method, path, body in (
                ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("POST", "/v1/completions", {"prompt": "x"}),
                ("POST", "/tokenize", {"prompt": "x"}),
                ("POST", "/detokenize", {"tokens": [1]}),
                ("GET", "/v1/models/{}", None),
            ):
                own, others, no = [
                    await rig.client.request(
                        method, path.format(asked), json=None if body is None else {**body, "model": asked}, headers=key
                    )
                    for asked, key in ((name, A), (name, B), (unknown, B))
                ]
                assert own.status_code == 200
                assert (others.status_code, no.status_code) == (404, 404)
                assert others.text.replace("mine", "none") == no.text
        assert all(request.tenant == "acme" for request in rig.backend.requests)


async def test_an_adapter_is_made_everyones_by_an_empty_tenant(opened: Opened, tmp_path: Path) -> None:
    async with opened(auth=ThreeKeys()) as rig:
        path = write(tmp_path / "mine", "a")
        for more, is_seen in (
            ({"tenant": "acme"}, False),
            ({}, False),
            ({"tenant": None}, False),
            ({"tenant": ""}, True),
        ):
            assert (await load(rig, "mine", path, ROOT, **more)).status_code == 200
            assert ("mine" in await names(rig, B)) == is_seen
            assert "mine" in await names(rig, A)


async def test_only_an_admin_may_change_the_list(opened: Opened, tmp_path: Path) -> None:
    async with opened(auth=ThreeKeys()) as rig:
        path = write(tmp_path / "mine", "a")
        for headers, status in ((A, 403), (None, 401)):
            assert (await load(rig, "mine", path, headers)).status_code == status
            body = {"lora_name": "mine"}
            answer = await rig.client.post("/v1/unload_lora_adapter", json=body, headers=headers)
            assert answer.status_code == status
        assert await names(rig, ROOT) == [MODEL, "alias/echo"]


async def test_what_cannot_be_served_is_refused_and_not_listed(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        (tmp_path / "odd").mkdir()
        for name in FILES:
            (tmp_path / "odd" / name).write_text("nonsense")
        refused = await load(rig, "odd", str(tmp_path / "odd"))
        assert (refused.status_code, error_of(refused)["message"]) == (400, "tensor q_proj holds NaN")
        outside = await load(rig, "odd", "/etc")
        assert (outside.status_code, error_of(outside)["param"]) == (400, "lora_path")
        for body in (
            {"lora_name": "x"},
            {"lora_name": "x", "lora_path": "/x", "odd": 1},
            {"lora_name": 1, "lora_path": "/x"},
            {"lora_name": "x", "lora_path": "/x", "base_model_name": "other"},
        ):
            answer = await rig.client.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == 400
            error_of(answer)
        assert await names(rig) == [MODEL, "alias/echo"]


async def test_without_the_flag_the_routes_say_so() -> None:
    async with gateway() as rig:
        for answer in (await load(rig, "x", "/x"), await unload(rig, "x")):
            assert (answer.status_code, error_of(answer)["code"]) == (400, "unsupported_parameter")
            assert "--enable-lora" in error_of(answer)["message"]
        assert (await rig.chat(model="x")).status_code == 404


async def test_a_reload_switches_for_later_requests_only(opened: Opened, tmp_path: Path) -> None:
    """TN-02: 50 streams run on the old version; those that come later have the new one; all end."""
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)
    async with opened(backend) as rig:
        path = write(tmp_path / "pirate", "a")
        await load(rig, "pirate", path)
        before = [asyncio.create_task(rig.complete(model="pirate", max_tokens=4)) for _ in range(50)]
        await submitted(backend, 50)
        backend.step()
        write(tmp_path / "pirate", "b")
        refused = await load(rig, "pirate", path)
        assert refused.status_code == 400
        assert "load_inplace" in error_of(refused)["message"]
        answer = await load(rig, "pirate", path, load_inplace=True)
        assert answer.text == "Success: LoRA adapter 'pirate' replaced."
        after = [asyncio.create_task(rig.complete(model="pirate", max_tokens=4)) for _ in range(50)]
        await submitted(backend, 100)
        digests = [request.adapter.digest[0] for request in backend.requests if request.adapter is not None]
        assert digests == ["a"] * 50 + ["b"] * 50
        old = await rig.complete(model="pirate@" + "a" * 64)
        assert old.status_code == 404, "a version that was replaced is not listed any more"
        backend.step(4)
        assert [(await task).status_code for task in before + after] == [200] * 100


async def test_an_unload_waits_for_the_last_request_and_lets_it_end(opened: Opened, tmp_path: Path) -> None:
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)
    async with opened(backend) as rig:
        await load(rig, "pirate", write(tmp_path / "pirate", "a"))
        running = asyncio.create_task(rig.complete(model="pirate", max_tokens=2))
        await submitted(backend, 1)
        unloading = asyncio.create_task(unload(rig, "pirate"))
        async with asyncio.timeout(30):
            while "pirate" in await names(rig):
                await asyncio.sleep(0.001)
        assert (await rig.complete(model="pirate")).status_code == 404, "no new request"
        backend.step()
        assert not unloading.done()
        backend.step()
        assert (await running).json()["usage"]["completion_tokens"] == 2
        assert (await unloading).text == "Success: LoRA adapter 'pirate' removed."


async def test_an_unload_does_not_wait_for_what_is_listed_later_under_the_name(opened: Opened, tmp_path: Path) -> None:
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)
    async with opened(backend) as rig:
        path = write(tmp_path / "pirate", "a")
        await load(rig, "pirate", path)
        old = asyncio.create_task(rig.complete(model="pirate", max_tokens=1))
        await submitted(backend, 1)
        unloading = asyncio.create_task(unload(rig, "pirate"))
        async with asyncio.timeout(30):
            while "pirate" in await names(rig):
                await asyncio.sleep(0.001)
        write(tmp_path / "pirate", "b")
        await load(rig, "pirate", path)
        new = asyncio.create_task(rig.complete(model="pirate", max_tokens=2))
        await submitted(backend, 2)
        assert not unloading.done()
        backend.step()
        assert (await old).status_code == 200
        async with asyncio.timeout(30):
            assert (await unloading).text == "Success: LoRA adapter 'pirate' removed."
        assert not new.done()
        backend.step()
        assert (await new).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("ends_well", [True, False])
async def test_an_unload_waits_for_requests_that_are_being_tokenized(
    opened: Opened, tmp_path: Path, path: str, ends_well: bool
) -> None:
    """They have resolved the name: the version is theirs."""
    async with opened() as rig:
        await load(rig, "pirate", write(tmp_path / "pirate", "a"))
        ref = AdapterRef(name="pirate", digest="a" * 64, source="")
        tokenizing, go_on, plain = asyncio.Event(), asyncio.Event(), TextWorkers.run

        async def slow(tenant: str, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not args:  # the body is parsed and checked
                return await plain(rig.text.workers, tenant, size, function, *args, **kwargs)
            tokenizing.set()
            await go_on.wait()
            if not ends_well:
                raise RequestRefused("no", code="service_unavailable", status=503)
            return await plain(rig.text.workers, tenant, size, function, *args, **kwargs)

        rig.text.workers.run = slow  # type: ignore[method-assign]
        body = {"model": "pirate", "max_tokens": 1, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        del body["prompt" if "chat" in path else "messages"]
        asked = asyncio.create_task(rig.client.post(path, json=body))
        await asyncio.wait_for(tokenizing.wait(), 30)
        assert service(rig).requests_of(ref) == 1
        unloading = asyncio.create_task(unload(rig, "pirate"))
        async with asyncio.timeout(30):
            while "pirate" in await names(rig):
                await asyncio.sleep(0.001)
        assert not unloading.done()
        go_on.set()
        assert (await asked).status_code == (200 if ends_well else 503)
        assert (await asyncio.wait_for(unloading, 30)).text == "Success: LoRA adapter 'pirate' removed."
        await rig.settle()
        assert service(rig).requests_of(ref) == 0


async def test_a_request_whose_client_left_before_it_was_opened_holds_nothing(opened: Opened) -> None:
    async with opened() as rig:
        ref = AdapterRef(name="pirate", digest="a" * 64, source="")
        asked = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
        part = RequestPart(request=asked, choices=[], first_choice=0)
        held = ExitStack()
        held.enter_context(service(rig).request(ref))
        generation = Generation(rig.context, [part], tenant="acme", model="pirate", began_s=0.0, held=held)
        assert service(rig).requests_of(ref) == 1
        generation.close()
        generation.close()
        assert service(rig).requests_of(ref) == 0


async def test_an_unload_does_not_wait_for_ever(opened: Opened, tmp_path: Path) -> None:
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)
    async with opened(backend, times=GatewayTimes(unload_s=0.01)) as rig:
        await load(rig, "pirate", write(tmp_path / "pirate", "a"))
        running = asyncio.create_task(rig.complete(model="pirate", max_tokens=1))
        await submitted(backend, 1)
        answer = await unload(rig, "pirate")
        assert answer.text == "Success: LoRA adapter 'pirate' removed; 1 requests still use it."
        backend.step()
        assert (await running).status_code == 200


async def test_a_client_that_leaves_does_not_leave_a_load_half_done(opened: Opened, tmp_path: Path) -> None:
    async with opened() as rig:
        loading = asyncio.create_task(load(rig, "pirate", write(tmp_path / "pirate", "a")))
        async with asyncio.timeout(30):
            while not len(rig.context.tasks):
                await asyncio.sleep(0)
        loading.cancel()
        assert await rig.context.tasks.wait_idle(30)
        assert await names(rig) == [MODEL, "alias/echo", "pirate"]


async def test_what_others_list_is_served_at_once(opened: Opened) -> None:
    async with opened() as rig:
        adapter_service = rig.context.adapters
        assert adapter_service is not None
        entry = AdapterEntry(name="pirate", digest="c" * 64, source="/x")
        await adapter_service.adapters.replace(None, entry, "pirate")
        assert (await rig.chat(model="pirate", max_tokens=1)).status_code == 200
        assert rig.backend.requests[-1].adapter == entry.ref


async def submitted(backend: FakeBackend, count: int) -> None:
    async with asyncio.timeout(30):
        while len(backend.requests) < count:
            backend.submitted.clear()
            await backend.submitted.wait()
