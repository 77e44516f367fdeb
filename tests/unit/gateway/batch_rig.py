"""A gateway that keeps files in a real Redis and runs batches; several of them are gateways of one service."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem.cluster.gateway.batches import batch_run, batch_runner
from tandem.cluster.gateway.batches.batch_records import LIVE
from tandem.cluster.gateway.batches.batch_routes import Batches
from tandem.cluster.gateway.batches.batch_run import BatchServices
from tandem.cluster.gateway.batches.batch_runner import BatchRunner
from tandem.cluster.gateway.batches.batch_store import BatchStore
from tandem.cluster.gateway.batches.idle_rows import IdleRows
from tandem.cluster.gateway.batches.tenant_shares import LineShares
from tandem.cluster.gateway.files.file_store import FileStore
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import COMPLETE, DEADLINE_S, MODEL, Rig, gateway
from tests.unit.gateway.test_response_store import ByKey

FILES, BATCHES = "/v1/files", "/v1/batches"
SOON_S = 0.02
"""Pauses of a test's gateways, in place of seconds."""


def line(custom_id: str, prompt: str = "hello", url: str = COMPLETE, **body: Any) -> str:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": asked})


@dataclass
class Batching:
    """One gateway. load: sequences of others that run ("others") and wait. removed:
    tenants."""

    rig: Rig
    runner: BatchRunner
    looking: "asyncio.Task[None]"
    load: dict[str, int]
    removed: set[str]
    leaving: list[bool] = field(default_factory=lambda: [False])

    async def upload(self, lines: Iterable[str] | bytes, **fields: str) -> dict[str, Any]:
        data = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
        answer = await self.post_file(data, **fields)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    async def post_file(self, data: bytes, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        return await self.rig.client.post(FILES, data=form, files={"file": ("in.jsonl", data)})

    async def create(self, lines: Iterable[str] | bytes, endpoint: str = COMPLETE, **more: Any) -> dict[str, Any]:
        asked = {"endpoint": endpoint, "completion_window": "24h", **more}
        if "input_file_id" not in more:
            asked["input_file_id"] = (await self.upload(lines))["id"]
        answer = await self.rig.client.post(BATCHES, json=asked)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        assert shown["status"] == "validating"
        return shown

    async def show(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self.rig.client.get(f"{BATCHES}/{batch['id']}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    async def until(self, batch: Mapping[str, Any], *statuses: str) -> dict[str, Any]:
        """The batch, once it has one of these statuses; without any, once it is over."""
        async with asyncio.timeout(DEADLINE_S):
            while (shown := await self.show(batch))["status"] not in statuses:
                if not statuses and shown["status"] not in LIVE:
                    break
                await asyncio.sleep(0.005)
        return shown

    async def until_answered(self, batch: Mapping[str, Any], count: int) -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            while (shown := await self.show(batch))["request_counts"]["completed"] < count:
                await asyncio.sleep(0.005)
        return shown

    async def until_asked(self, count: int) -> None:
        """Waits until the groups have been asked so often."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.rig.backend.requests) < count:
                await asyncio.sleep(0.005)

    async def rows(self, file_id: str) -> list[dict[str, Any]]:
        answer = await self.rig.client.get(f"{FILES}/{file_id}/content")
        assert answer.status_code == 200, answer.text
        assert int(answer.headers["content-length"]) == len(answer.content)
        return [json.loads(row) for row in answer.text.splitlines()]


@asynccontextmanager
async def batching(
    redis: Any,
    backend: FakeBackend | None = None,
    *,
    name: str = "g1",
    rows: int = 8,
    max_lines: int = 100,
    max_file_bytes: int = 10**6,
    max_bytes: int = 10**7,
    ttl_s: int = 3600,
    **more: Any,
) -> AsyncIterator[Batching]:
    """name: of the gateway. rows: of the one group. more: as gateway()."""
    files = FileStore(redis, ttl_s=ttl_s, max_file_bytes=max_file_bytes, max_bytes=max_bytes)
    batches = Batches(files, BatchStore(redis, MODEL, name))
    async with gateway(backend, **({"auth": ByKey()} | more), batches=batches) as rig:
        rig.client.headers["authorization"] = "Bearer acme"
        load = {"others": 0, "waiting": 0}
        leaving, removed = [False], set[str]()
        services = BatchServices(
            store=batches.store,
            files=files,
            text=rig.text,
            context=rig.context,
            handlers=rig.app.state.line_handlers,
            idle=IdleRows(
                lambda: {
                    "num_requests_running": load["others"] + len(rig.backend.streams),
                    "num_requests_waiting": load["waiting"],
                    "idle_work_running": len(rig.backend.streams),
                },
                rows,
                lambda: False,
            ),
            max_lines=max_lines,
            is_leaving=lambda: leaving[0],
            is_tenant=lambda name: name not in removed,
            shares=LineShares(name),
        )
        runner = BatchRunner(services, batches.created)
        looking = asyncio.create_task(runner.run())
        try:
            yield Batching(rig, runner, looking, load, removed, leaving)
        finally:
            leaving[0] = True
            await runner.close(DEADLINE_S)
            await asyncio.wait_for(looking, DEADLINE_S)


def hurry(monkeypatch: Any) -> None:
    """Makes pauses short."""
    for module, names in ((batch_run, ("RENEW_S", "AGAIN_S")), (batch_runner, ("LOOK_S", "FREE_S"))):
        for one in names:
            monkeypatch.setattr(module, one, SOON_S)
