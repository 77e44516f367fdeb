"""A gateway over the fake backend: a byte-level tokenizer with a few special tokens, and a tiny chat template."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tandem.cluster.gateway.app.routes import NO_BATCHES, build_gateway_app
from tandem.cluster.gateway.app.wiring import static_keys
from tandem.cluster.gateway.batches.batch_routes import Batches
from tandem.cluster.gateway.generation.dispatch import Dispatch
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.quarantine import Quarantine
from tandem.cluster.gateway.http.auth import Authenticator
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.cluster.gateway.idempotency.key_store import KeyStore
from tandem.cluster.gateway.responses.response_store import ResponseStore
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.text_services import TextServices, extra_stop_token_ids
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.tenant_admin import TenantAdmin
from tandem.cluster.tenants.tenant_admission import Tenancy
from tandem.configs.schema import GatewaySettings
from tandem.workers.models.spec.config.pooling_config import PoolingFacts
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.detokenizer import DetokenizerFactory, byte_level_alphabet
from tandem.workers.text.generation_config import GenerationDefaults
from tandem.workers.text.tokenizer import ModelTokenizer
from tests.support.fake_backend import FakeBackend

MODEL = "echo"
BOS, EOS, TURN = 256, 257, 258
VOCAB = 264  # the model's; larger than the tokenizer's 259, as padded models are
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<turn>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
DEADLINE_S = 30.0
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETE)
EMBED = "/v1/embeddings"
ALL = (*BOTH, EMBED, "/tokenize", "/detokenize")
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETE: {"prompt": "x"},
    EMBED: {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


def make_tokenizer(defaults: GenerationDefaults | None = None) -> ModelTokenizer:
    """Token id = byte value; then <bos>, <eos>, <turn>. Completions get <bos>."""
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(byte_level_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<turn>")])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return ModelTokenizer(
        backend,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        eos_token_ids=frozenset({EOS}),
        defaults=defaults or GenerationDefaults(),
        config={},
    )


class ListLedger:
    """Keeps what was settled."""

    def __init__(self) -> None:
        self.opened: list[BillingRecord] = []
        self.rows: list[BillingRecord] = []

    def accepted(self, record: BillingRecord) -> None:
        self.opened.append(record)

    async def settle(self, record: BillingRecord) -> None:
        self.rows.append(record)


@dataclass
class Rig:
    """One gateway app, its parts, and a client that talks to it in this process."""

    app: FastAPI
    text: TextServices
    accounts: Accounts
    context: GatewayContext
    backend: FakeBackend
    ledger: ListLedger
    client: httpx.AsyncClient

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"messages": USER, **body})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "hello", **body})

    async def settle(self) -> None:
        """Waits until every owner task has ended, and holds the laws that nothing may break."""
        assert await self.context.tasks.wait_idle(DEADLINE_S), "a task was leaked"
        assert not self.backend.streams, "a stream was leaked"
        ids = [row.id for row in self.ledger.rows]
        assert len(ids) == len(set(ids)), "a request was settled twice"
        assert sorted(ids) == sorted(o.id for o in self.ledger.opened), "every accepted request has its row"


def make_text(
    settings: GatewaySettings, metrics: GatewayMetrics, tokenizer: ModelTokenizer, **more: Any
) -> TextServices:
    """TextServices of MODEL; `more` beats what is given here."""
    given = {
        "model_names": (MODEL,),
        "detokenizers": DetokenizerFactory(tokenizer),
        "chat_template": None,
        "max_model_len": CONTEXT,
        "vocab_size": VOCAB,
        "extra_stop_token_ids": (),
        "pooling": PoolingFacts(size=8),
        "workers": TextWorkers(meter=metrics),
    }
    return TextServices(settings=settings, tokenizer=tokenizer, **(given | more))


def make_context(
    settings: GatewaySettings, dispatch: Dispatch, accounts: Accounts, metrics: GatewayMetrics, **more: Any
) -> GatewayContext:
    """Generations with the limits of the settings."""
    return GatewayContext(
        dispatch=dispatch,
        tenancy=accounts.tenancy,
        ledger=accounts.ledger,
        metrics=metrics,
        quarantine=Quarantine(time.monotonic),
        max_answer_bytes=settings.max_answer_bytes,
        queue_timeout_s=settings.queue_timeout_s,
        **more,
    )


@contextlib.asynccontextmanager
async def gateway(
    backend: FakeBackend | None = None,
    *,
    settings: GatewaySettings | None = None,
    defaults: GenerationDefaults | None = None,
    template: str | None = TEMPLATE,
    auth: Authenticator | None = None,
    tenancy: Tenancy | None = None,
    tenants: TenantAdmin | None = None,
    engine_eos_token_ids: frozenset[int] = frozenset({EOS}),
    text: dict[str, Any] | None = None,
    store: Callable[[TaskOwner], ResponseStore] | None = None,
    batches: Batches = NO_BATCHES,
    keys: KeyStore | None = None,
    **more: Any,
) -> AsyncIterator[Rig]:
    """A Rig; on leaving, nothing may be left running. text: of TextServices, store: makes that of responses, batches:
    with the files, keys: of Idempotency-Key, more: of GatewayContext."""
    backend = backend if backend is not None else FakeBackend(eos_token_ids=frozenset({EOS}))
    settings = settings or GatewaySettings()
    tokenizer = make_tokenizer(defaults)
    ledger = ListLedger()
    metrics = GatewayMetrics(CollectorRegistry(), settings.metrics_prefix, MODEL)
    accounts = Accounts(
        auth=auth or static_keys(settings),
        tenancy=tenancy or Tenancy(),
        tenants=tenants or TenantAdmin(),
        ledger=ledger,
    )
    services = make_text(
        settings,
        metrics,
        tokenizer,
        model_names=(MODEL, "alias/echo"),
        chat_template=ChatTemplate(template, tokenizer.special_tokens) if template is not None else None,
        extra_stop_token_ids=extra_stop_token_ids(tokenizer, engine_eos_token_ids),
        **(text or {}),
    )
    context = make_context(settings, backend, accounts, metrics, **more)
    responses = store(context.tasks) if store is not None else None
    app = build_gateway_app(services, accounts, context, responses, batches, keys)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        rig = Rig(app, services, accounts, context, backend, ledger, client)
        yield rig
        await rig.settle()
    services.workers.close()


class _StartedServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """The app behind real uvicorn on a free port, in this loop; yields the base URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = _StartedServer(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait_for(server.ready.wait(), DEADLINE_S)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, DEADLINE_S)
        listener.close()


def events(text: str) -> list[Any]:
    """The data of each SSE event; `[DONE]` as the string, comments dropped."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after checking the contract's shape."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    return error
