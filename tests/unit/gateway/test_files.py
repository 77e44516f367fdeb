"""Files of tenants in a real Redis: forms in pieces, limits, lifetimes, privacy, and that nothing of a refused one
stays."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.cluster.gateway.files import file_store
from tandem.cluster.gateway.files.file_store import PIECE_BYTES
from tandem.cluster.gateway.files.form_reader import FormPart, FormReader, boundary_of
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.unit.gateway.batch_rig import BATCHES, FILES, Batching, batching
from tests.unit.gateway.rig import DEADLINE_S, error_of, gateway, served


async def check_sums(redis: BackgroundClient, *tenants: str) -> None:
    """No byte is counted that is not there, and none is there that is not counted."""
    for tenant in tenants:
        sizes = {
            name.decode(): int(size) for name, size in (await redis.command("HGETALL", keys.file_sizes(tenant))).items()
        }
        total = sizes.pop(keys.FILES_TOTAL, 0)
        assert total == sum(sizes.values())
        ids = [one.decode() for one in await redis.command("ZRANGE", keys.files(tenant), 0, -1)]
        assert sorted(ids) == sorted(sizes)
        data = await redis.command("KEYS", keys.file_data(tenant, "*"))
        assert {one.decode().rpartition(":")[2] for one in data} == {name for name, size in sizes.items() if size}


async def settled(files: Batching) -> None:
    assert await files.rig.context.tasks.wait_idle(DEADLINE_S)


async def test_a_file_is_taken_shown_read_and_deleted(redis: BackgroundClient) -> None:
    data = random.Random(1).randbytes(2 * PIECE_BYTES + 7)
    async with batching(redis, max_file_bytes=2**21) as one, batching(redis, name="g2") as other:
        shown = await one.upload(data)
        assert {name: shown[name] for name in ("object", "bytes", "filename", "purpose", "status")} == {
            "object": "file", "bytes": len(data), "filename": "in.jsonl", "purpose": "batch", "status": "processed",
        }  # fmt: skip
        assert shown["expires_at"] == shown["created_at"] + 3600
        place = f"{FILES}/{shown['id']}"
        for through in (one, other):
            assert (await through.rig.client.get(place)).json() == shown
            answer = await through.rig.client.get(f"{place}/content")
            assert answer.content == data and answer.headers["content-length"] == str(len(data))
        await check_sums(redis, "acme")
        for method, path in (("GET", place), ("GET", f"{place}/content"), ("DELETE", place)):
            hidden = await one.rig.client.request(method, path, headers={"authorization": "Bearer other"})
            unknown = await one.rig.client.request(method, path.replace(shown["id"], "file-" + "0" * 32))
            assert (hidden.status_code, unknown.status_code) == (404, 404)
            said = [
                error_of(answer)["message"].replace(shown["id"], "file-" + "0" * 32) for answer in (hidden, unknown)
            ]
            assert said[0] == said[1], "another tenant's file is as one that never was"
        assert (await other.rig.client.delete(place)).json() == {"id": shown["id"], "object": "file", "deleted": True}
        assert (await one.rig.client.get(f"{place}/content")).status_code == 404
        await check_sums(redis, "acme")
        assert not await redis.command("KEYS", "tandem:files:*:*-*")


async def test_lists_have_pages(redis: BackgroundClient) -> None:
    async with batching(redis) as files:
        made = [(await files.upload([str(n)]))["id"] for n in range(3)]

        async def listed(query: str) -> list[str]:
            return [one["id"] for one in (await files.rig.client.get(FILES + query)).json()["data"]]

        everything = await listed("")
        assert sorted(everything) == sorted(made)
        assert await listed("?order=asc") == everything[::-1]
        first = (await files.rig.client.get(FILES + "?limit=2")).json()
        assert first["has_more"] and (first["first_id"], first["last_id"]) == (everything[0], everything[1])
        assert await listed(f"?after={everything[1]}") == everything[2:]
        assert await listed("?purpose=batch_output") == []
        for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("x=1", "x")):
            refused = await files.rig.client.get(f"{FILES}?{query}")
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
        assert (await files.rig.client.get(FILES, headers={"authorization": "Bearer other"})).json()["data"] == []


def form(*parts: str, boundary: str = "b") -> tuple[bytes, dict[str, str]]:
    body = "".join(f"--{boundary}\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
    return f"{body}--{boundary}--\r\n".encode(), {"content-type": f"multipart/form-data; boundary={boundary}"}


PURPOSE = 'name="purpose"\r\n\r\nbatch'
FILE = 'name="file"; filename="a.jsonl"\r\n\r\n{}'


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ((PURPOSE.replace("batch", "fine-tune"), FILE), 400, "purpose"),
        ((FILE, PURPOSE.replace("batch", "fine-tune")), 400, "purpose"),
        ((FILE,), 400, "purpose"),
        ((PURPOSE,), 400, "file"),
        ((PURPOSE, FILE, FILE), 400, "file"),
        ((PURPOSE, PURPOSE, FILE), 400, "purpose"),
        ((PURPOSE, FILE.replace('; filename="a.jsonl"', "")), 400, "file"),
        ((PURPOSE, FILE, 'name="more"\r\n\r\nx'), 400, "more"),
        ((PURPOSE, FILE, 'name="expires_after[seconds]"\r\n\r\n60'), 400, "expires_after[anchor]"),
        ((PURPOSE, FILE, 'name="expires_after[anchor]"\r\n\r\ncreated_at'), 400, "expires_after[seconds]"),
        ((PURPOSE, FILE.replace("{}", "x" * 1001)), 413, "file"),
        (('title="x"\r\n\r\ny', PURPOSE, FILE), 400, None),
    ],
)
async def test_what_is_wrong_with_a_form_is_said(
    redis: BackgroundClient, parts: tuple[str, ...], status: int, param: str | None
) -> None:
    async with batching(redis, max_file_bytes=1000) as files:
        body, headers = form(*parts)
        refused = await files.rig.client.post(FILES, content=body, headers=headers)
        assert (refused.status_code, error_of(refused)["param"]) == (status, param), refused.text
        await settled(files)
        await check_sums(redis, "acme")
        assert not await redis.command("KEYS", "tandem:files:*:data:*"), "nothing of it stays"


async def test_what_is_no_form_is_refused(redis: BackgroundClient) -> None:
    body, headers = form(PURPOSE, FILE)
    async with batching(redis, max_file_bytes=1000) as files:
        cases: list[tuple[bytes, dict[str, str], int]] = [
            (body, {"content-type": "application/json"}, 415),
            (body, {"content-type": "multipart/form-data"}, 415),
            (body[:-8], headers, 400),
            (b"nothing", headers, 400),
            (body.replace(b"filename=", b"x" * 9000 + b"="), headers, 400),
            (body, {**headers, "content-length": "100000000"}, 413),
        ]
        for content, sent, status in cases:
            refused = await files.rig.client.post(FILES, content=content, headers=sent)
            assert (refused.status_code, bool(error_of(refused))) == (status, True), refused.text
        assert (await files.rig.client.post(FILES, content=body, headers=headers)).status_code == 200
    async with gateway() as rig:
        for answer in (
            await rig.client.post(FILES, content=body, headers=headers),
            await rig.client.get(FILES),
            await rig.client.get(BATCHES),
            await rig.client.post(f"{BATCHES}/x/cancel"),
        ):
            assert answer.status_code == 400 and "--files-ttl" in error_of(answer)["message"]


async def test_a_life_may_be_shorter(redis: BackgroundClient) -> None:
    async with batching(redis, ttl_s=7200) as files:
        ends = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        shown = await files.upload(["x"], **ends)
        assert shown["expires_at"] == shown["created_at"] + 3600
        for name in (keys.file_record("acme", shown["id"]), keys.file_data("acme", shown["id"])):
            assert 3500_000 < await redis.command("PTTL", name) <= 3600_000
        for seconds in ("3599", "7201", "-1", "x"):
            refused = await files.post_file(b"x", **{**ends, "expires_after[seconds]": seconds})
            assert (refused.status_code, error_of(refused)["param"]) == (400, "expires_after[seconds]")


async def test_files_of_a_tenant_have_room_for_so_many_bytes(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batching(redis, max_bytes=1000) as files:
        first = await files.upload(b"x" * 600)
        refused = await files.post_file(b"x" * 600)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "content_too_large")
        await settled(files)
        await check_sums(redis, "acme")
        files.rig.client.headers["authorization"] = "Bearer other"
        await files.upload(b"x" * 600)
        files.rig.client.headers["authorization"] = "Bearer acme"
        await redis.command("ZADD", keys.files("acme"), 1, first["id"])  # its life is over
        await files.upload(b"x" * 600)
        await check_sums(redis, "acme", "other")
        monkeypatch.setattr(file_store, "MAX_FILES", 1)
        assert (await files.post_file(b"")).status_code == 400


async def test_a_gateway_holds_a_piece_of_a_file(redis: BackgroundClient) -> None:
    """Of 24 MiB, where it may hold 4 of all bodies together."""
    settings = GatewaySettings(max_bodies_bytes=4 * 2**20)
    async with batching(redis, max_file_bytes=2**25, max_bytes=2**25, settings=settings) as files:
        head, headers = form(PURPOSE, FILE.replace("{}", ""))
        start, end = head[: -len(b"--b--\r\n") - 2], head[-len(b"--b--\r\n") - 2 :]

        async def body() -> AsyncIterator[bytes]:
            yield start
            for _ in range(24):
                yield b"x" * 2**20
            yield end

        answer = await files.rig.client.post(FILES, content=body(), headers=headers)
        assert (answer.status_code, answer.json()["bytes"]) == (200, 24 * 2**20)


async def test_a_file_that_is_gone_half_way_is_cut(redis: BackgroundClient) -> None:
    async with batching(redis, max_file_bytes=2**21) as files:
        shown = await files.upload(b"x" * (PIECE_BYTES + 1))
        await redis.command("HDEL", keys.file_data("acme", shown["id"]), 1)
        with pytest.raises(file_store.FileGone):
            await files.rig.client.get(f"{FILES}/{shown['id']}/content")


class Away:
    """A Redis that is not there."""

    async def command(self, *parts: Any) -> object:
        raise RedisUnavailable("away")

    async def pipeline(self, commands: Any) -> list[object]:
        raise RedisUnavailable("away")


async def test_without_redis_files_and_batches_are_unavailable() -> None:
    async with batching(Away()) as files:
        some = "file-" + "0" * 32
        asked = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": some}
        answers = [
            await files.post_file(b"x"),
            await files.rig.client.get(FILES),
            await files.rig.client.get(f"{FILES}/{some}/content"),
            await files.rig.client.delete(f"{FILES}/{some}"),
            await files.rig.client.post(BATCHES, json=asked),
            await files.rig.client.get(BATCHES),
            await files.rig.client.post(f"{BATCHES}/x/cancel"),
        ]
        assert [answer.status_code for answer in answers] == [503] * len(answers)
        assert all("Redis is away" in error_of(answer)["message"] for answer in answers)


async def read_form(body: bytes, boundary: bytes, cut: int) -> list[tuple[FormPart, bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), cut):
            yield body[start : start + cut]
            await asyncio.sleep(0)

    reader, found = FormReader(pieces(), boundary), []
    while (part := await reader.next_part()) is not None:
        found.append((part, b"".join([piece async for piece in reader.body()])))
    return found


async def test_forms_are_read_however_they_are_cut() -> None:
    """Parts with what looks like a boundary, none, and only line ends."""
    boundary = b"--x-y"
    contents = [b"", b"\r\n", b"\r\n----x-", b"a\r\n--\r\n----x", b"\x00\xff" * 50, b"----x-y", b"\r\n\r\n--"]
    body = b"preamble"
    for number, content in enumerate(contents):
        body += b'\r\n----x-y\r\nX: y\r\ncontent-disposition: form-data; name="a\\"%d"; filename=b.c\r\n\r\n' % number
        body += content
    body += b"\r\n----x-y--epilogue"
    wanted = [(FormPart(f'a"{number}', "b.c"), content) for number, content in enumerate(contents)]
    for cut in (1, 2, 3, 5, 8, 64, len(body)):
        assert await read_form(body, boundary, cut) == wanted
    for end in range(len(body) - len(b"--epilogue")):
        with pytest.raises(RequestRefused):
            await read_form(body[:end], boundary, 7)


def test_the_boundary_is_the_content_types() -> None:
    for text in ('multipart/form-data; boundary="a b"', "Multipart/Form-Data;charset=x; boundary=a+b"):
        assert boundary_of(text) in (b"a b", b"a+b")
    for text in ("", "text/plain; boundary=x", "multipart/form-data; boundary="):
        with pytest.raises(RequestRefused):
            boundary_of(text)


async def test_a_client_that_leaves_leaves_nothing(redis: BackgroundClient) -> None:
    async with batching(redis, max_file_bytes=2**22) as files, served(files.rig.app) as url:
        head, headers = form(PURPOSE, FILE)
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        lines = {"host": "x", "authorization": "Bearer acme", "content-length": str(2**21), **headers}
        writer.write(f"POST {FILES} HTTP/1.1\r\n".encode())
        writer.write("".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode() + b"\r\n")
        writer.write(head[:-9] + b"x" * 2 * PIECE_BYTES)
        async with asyncio.timeout(DEADLINE_S):
            while not await redis.command("KEYS", "tandem:files:*:data:*"):
                await asyncio.sleep(0.01)
            writer.close()
            while await redis.command("KEYS", "tandem:files:*:data:*"):
                await asyncio.sleep(0.01)
        await settled(files)
        await check_sums(redis, "acme")
