"""A whole gateway behind the server of `tandem serve`, on a free loopback port, in a thread or a process of its own.

Tenants are real, over a private Redis; adapters are listed from a folder; the engine is the fake one.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.gateway.app.interpreter import give_way_soon
from tandem.cluster.gateway.batches.batch_routes import Batches
from tandem.cluster.gateway.batches.batch_store import BatchStore
from tandem.cluster.gateway.files.file_store import FileStore
from tandem.cluster.gateway.http.auth import StaticKeys, TenantKeys
from tandem.cluster.gateway.http.http_server import HttpLimits, make_server
from tandem.cluster.gateway.idempotency.key_store import KeyStore
from tandem.cluster.gateway.responses.response_store import ResponseStore
from tandem.cluster.state.redis_client import RequestClient
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant_admin import StoreAdmin
from tests.support.fake_backend import FakeBackend
from tests.support.plain_http import plain_http
from tests.support.private_redis import private_redis
from tests.support.service import REPOSITORY
from tests.unit.gateway.rig import EOS, MODEL, Rig, gateway
from tests.unit.tenants.tenant_rig import patient

API_KEY, ADMIN_KEY = "sk-of-the-api", "root-of-the-house"
USER_HEADERS, ADMIN_HEADERS = ({"authorization": f"Bearer {key}"} for key in (API_KEY, ADMIN_KEY))
DEADLINE_S = 30.0
Opened = Callable[[], AbstractAsyncContextManager[Rig]]


@contextlib.asynccontextmanager
async def full_gateway(adapter_root: Path, **more: Any) -> AsyncIterator[Rig]:
    """A rig in which every route does something. Adapters of any content may be listed, from adapter_root only."""
    with private_redis() as server:
        redis, requests = patient(server), RequestClient(lambda: server.url, timeout_s=20.0)
        store = TenantStore(redis)
        directory = TenantDirectory(store, clock=lambda: 0.0)
        await directory.refresh()
        adapters = AdapterService(AdapterList(None, MODEL), lambda source: "ab" * 32, (MODEL,))
        async with gateway(
            auth=TenantKeys(StaticKeys([API_KEY], [ADMIN_KEY]), directory, may_be_open=False, open_admin=False),
            tenancy=Quota(requests, directory, "g"),
            tenants=StoreAdmin(store, directory),
            adapters=adapters,
            adapter_roots=(str(adapter_root),),
            store=lambda tasks: ResponseStore(redis, tasks, ttl_s=60, max_bytes=10**6),
            batches=Batches(
                FileStore(redis, ttl_s=3600, max_file_bytes=10**6, max_bytes=10**7), BatchStore(redis, MODEL, "g")
            ),
            keys=KeyStore(redis, 60),
            **more,
        ) as rig:
            yield rig
        adapters.close()
        await redis.close()
        await requests.close()


@dataclass
class Listener:
    """Where it listens; its thread's event loop."""

    url: str
    loop: asyncio.AbstractEventLoop


@contextlib.contextmanager
def listening(opened: Opened, limits: HttpLimits | None = None) -> Iterator[Listener]:
    """The gateway that `opened` makes, served. On leaving, nothing may be left running (Rig.settle)."""
    ready: list[Listener] = []
    began, ends = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with opened() as rig:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            listener.setblocking(False)
            server = make_server(rig.app, shutdown_timeout_s=2, limits=limits)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            ready.append(Listener(url, asyncio.get_running_loop()))
            began.set()
            await ends.wait()
            server.should_exit = True
            await asyncio.wait_for(running, DEADLINE_S)
            listener.close()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
        finally:
            began.set()

    thread = threading.Thread(target=run, name="listener")
    thread.start()
    assert began.wait(DEADLINE_S)
    try:
        if ready:
            yield ready[0]
    finally:
        if ready and thread.is_alive():
            ready[0].loop.call_soon_threadsafe(ends.set)
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the gateway does not end"
    if errors:
        raise errors[0]


KNOWN = [104, 101, 108, 108, 111]
KNOWN_ANSWER = [*KNOWN, *KNOWN[:2]]
"""What the fake engine makes of a known prompt: the prompt again and again."""
ALIVE_S = 2.0


def known_tokens(url: str, timeout_s: float = ALIVE_S) -> list[int]:
    """The tokens of the known prompt's answer, which are KNOWN_ANSWER as long as the gateway lives."""
    asked = {"prompt": KNOWN, "max_tokens": len(KNOWN_ANSWER), "return_token_ids": True}
    answer = plain_http.post(f"{url}/v1/completions", json=asked, headers=USER_HEADERS, timeout=timeout_s)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextlib.contextmanager
def gateway_process(adapter_root: Path, step_s: float = 0.0) -> Iterator[tuple[str, psutil.Process]]:
    """full_gateway in a process of its own, whose memory is the gateway's: its URL and the process. It must end by
    itself and without a word, with nothing left running. step_s: seconds between two tokens of an answer."""
    command = [sys.executable, "-m", __name__, str(adapter_root), str(step_s)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        yield url, psutil.Process(process.pid)
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(DEADLINE_S) == 0 and not said, said
    finally:
        process.kill()
        process.wait()


def main() -> None:
    give_way_soon()
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), step_s=float(sys.argv[2]) or None)
    with listening(lambda: full_gateway(Path(sys.argv[1]), backend=backend)) as listener:
        print(listener.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
