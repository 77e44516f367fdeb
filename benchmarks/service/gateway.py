"""CPU time of the gateway: tokens per second of one core, streaming chat over a fake engine.

    python -m benchmarks.service.gateway [--streams 16 64] [--tokens 400] [--tokenizer FOLDER] [--out FILE]

`fake` runs the fake engine and its streams alone, without text and HTTP; `app` the ASGI app, whose output is dropped;
`http` the same app behind uvicorn, with a client in another process. Figures are CPU seconds of this process. `paced`
sends a step every 10 ms, as an engine does, and prints the share of a core.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from benchmarks.models import DEMO
from tandem.cluster.gateway.app.routes import build_gateway_app
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.quarantine import Quarantine
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.http.text_workers import TextWorkers
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.routing.route_hint import hint_of
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import Ended, GenerationRequest, SamplingParams, TokenDelta
from tandem.workers.models.spec.config.pooling_config import PoolingFacts
from tandem.workers.text.chat_template import find_chat_template
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.support.fake_backend import FakeBackend

PROMPT = "Write a long letter to a friend about the sea, the weather and the price of bread. "
PACE_S = 0.01


class Server(uvicorn.Server):
    """A server with an event for its start; it handles no signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def new_app(folder: Path, tokenizer: ModelTokenizer, backend: FakeBackend, **watched: Any) -> FastAPI:
    """watched: fields of the context that watch its requests."""
    settings = GatewaySettings()
    metrics = GatewayMetrics(CollectorRegistry(), settings.metrics_prefix, "bench")
    text = TextServices(
        settings=settings,
        model_names=("bench",),
        tokenizer=tokenizer,
        detokenizers=DetokenizerFactory(tokenizer),
        chat_template=find_chat_template(folder, None, tokenizer),
        max_model_len=8192,
        vocab_size=tokenizer.vocab_size,
        extra_stop_token_ids=(),
        pooling=PoolingFacts(size=64),
        workers=TextWorkers(meter=metrics),
    )
    accounts = Accounts(auth=StaticKeys())
    context = GatewayContext(
        dispatch=backend,
        tenancy=accounts.tenancy,
        ledger=accounts.ledger,
        metrics=metrics,
        quarantine=Quarantine(time.monotonic),
        max_answer_bytes=settings.max_answer_bytes,
        queue_timeout_s=settings.queue_timeout_s,
        **watched,
    )
    return build_gateway_app(text, accounts, context)


def body(tokens: int, options: dict[str, Any]) -> bytes:
    fields = {"messages": [{"role": "user", "content": PROMPT * 4}], "max_tokens": tokens, "stream": True, **options}
    return json.dumps(fields).encode()


async def run_fake(streams: int, tokens: int, ids: list[int], pace_s: float | None) -> None:
    """Reads the streams of the engine by bare tasks."""
    backend = FakeBackend(step_s=pace_s)

    class Reader:
        """As much of RequestPart as the fake engine uses."""

        def __init__(self, request: GenerationRequest) -> None:
            self.request = request
            self.is_over = asyncio.Event()

        def take(self, deltas: list[TokenDelta]) -> bool:
            return True

        def end(self, ended: Ended) -> None:
            self.is_over.set()

    async def read(number: int) -> None:
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=ids, sampling=SamplingParams(max_tokens=tokens)
        )
        reader = Reader(request)
        backend.send(reader, hint_of(request))
        await reader.is_over.wait()

    await asyncio.gather(*(read(number) for number in range(streams)))


async def run_app(app: FastAPI, streams: int, payload: bytes) -> None:
    """Calls the ASGI app and drops its output."""

    async def call() -> None:
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await asyncio.Event().wait()
            given = True
            return {"type": "http.request", "body": payload, "more_body": False}

        async def send(message: Any) -> None:
            del message

        path = "/v1/chat/completions"
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
        rest = {"asgi": {"version": "3.0"}, "query_string": b"", "root_path": "", "scheme": "http"}
        await app({**scope, **rest, "headers": [(b"content-type", b"application/json")]}, receive, send)

    await asyncio.gather(*(call() for _ in range(streams)))


def client_process(port: int, streams: int, payload: bytes) -> None:
    """Reads every stream to its end over raw sockets."""

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(payload) + payload)
        tail = b""
        while b"data: [DONE]" not in tail:
            data = await reader.read(65536)
            if not data:
                raise SystemExit("a stream was cut")
            tail = tail[-16:] + data
        writer.close()

    async def all_streams() -> None:
        await asyncio.gather(*(read() for _ in range(streams)))

    uvloop.run(all_streams())


async def run_http(app: FastAPI, streams: int, payload: bytes) -> None:
    """Runs uvicorn in this process and the client in another."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", http="httptools"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    client = multiprocessing.get_context("spawn").Process(
        target=client_process, args=(listener.getsockname()[1], streams, payload)
    )
    client.start()
    await asyncio.to_thread(client.join)
    if client.exitcode:
        raise SystemExit("the client failed")
    server.should_exit = True
    await serving


def measure(name: str, work: Any, tokens: int) -> dict[str, Any]:
    """CPU and wall seconds of one run, on a fresh uvloop."""
    cpu, wall = time.process_time(), time.perf_counter()
    uvloop.run(work())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"run": name, "tokens": tokens, "cpu_s": cpu, "wall_s": wall, "tokens_per_cpu_s": tokens / cpu}


def run_all(streams: int, tokens: int, folder: Path, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    ids = tokenizer.encode(PROMPT * 4, add_special_tokens=True)
    total = streams * tokens

    def app(pace_s: float | None = None) -> FastAPI:
        return new_app(folder, tokenizer, FakeBackend(step_s=pace_s))

    plain, stops = body(tokens, {}), body(tokens, {"stop": ["\n\nHuman:", "###"]})
    logprobs = body(tokens, {"logprobs": True, "top_logprobs": 5})
    return [
        measure("fake", lambda: run_fake(streams, tokens, ids, None), total),
        measure("app", lambda: run_app(app(), streams, plain), total),
        measure("app, stop strings", lambda: run_app(app(), streams, stops), total),
        measure("app, 5 top logprobs", lambda: run_app(app(), streams, logprobs), total),
        measure("http", lambda: run_http(app(), streams, plain), total),
        measure("http paced 10 ms", lambda: run_http(app(PACE_S), streams, plain), total),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--tokenizer", type=Path, default=DEMO)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    results = []
    for streams in args.streams:
        for row in run_all(streams, args.tokens, args.tokenizer, tokenizer):
            results.append({"streams": streams, **row})
            share = f"{row['cpu_s'] / row['wall_s']:6.1%} of a core" if "paced" in row["run"] else ""
            print(
                f"{streams:4d} streams  {row['run']:22s} {row['tokens_per_cpu_s']:10,.0f} tokens/s/core "
                f"{1e6 * row['cpu_s'] / row['tokens']:7.1f} us/token  {share}",
                flush=True,
            )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
