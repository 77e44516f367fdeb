"""Batches in a real Redis: lines in, rows out in their order, once each, whatever becomes of the gateway that runs
them."""

import asyncio
import json
import zlib
from typing import Any

import pytest

from tandem.cluster.gateway.batches import batch_store
from tandem.cluster.gateway.batches.batch_lines import ENDPOINTS
from tandem.cluster.gateway.batches.idle_rows import IdleRows
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.tenant import Limits
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation, Tenancy
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import IDLE_PRIORITY
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.batch_rig import BATCHES, FILES, Batching, batching, hurry, line
from tests.unit.gateway.rig import CHAT, COMPLETE, DEADLINE_S, EMBED, EOS, MODEL, USER, error_of
from tests.unit.gateway.test_files import check_sums


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def manual() -> FakeBackend:
    return FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)


def counts(batch: dict[str, Any]) -> tuple[int, int, int]:
    given = batch["request_counts"]
    return given["total"], given["completed"], given["failed"]


async def finish(batching: Batching, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
    """Steps a manual backend until the batch has one of these statuses, or is over."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            shown = await batching.show(batch)
            if shown["status"] in (statuses or ("completed", "failed", "expired", "cancelled")):
                return shown
            batching.rig.backend.step()
            await asyncio.sleep(0.002)


async def test_lines_become_rows_in_their_order(redis: BackgroundClient) -> None:
    """Those that end first do not stand first; what is wrong with a line is an error of the line."""
    lines = [line("long", max_tokens=40), line("short", max_tokens=1), "not json", line("short"), ""]
    lines += [line("elsewhere", url=CHAT), line("refused", temperature=-1), line("no model", model="other")]
    lines += [line("streamed", stream=True), json.dumps({"custom_id": 1}), line("last", "größe", priority=-5)]
    async with batching(redis) as batches:
        made = await batches.create(lines, metadata={"for": "tests"})
        assert made["metadata"] == {"for": "tests"} and made["output_file_id"] is None
        done = await batches.until(made)
        assert (done["status"], counts(done), done["errors"]) == ("completed", (10, 3, 7), None)
        times = [done[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
        assert times == sorted(times) and done["expires_at"] == done["created_at"] + 86400
        rows, errors = await batches.rows(done["output_file_id"]), await batches.rows(done["error_file_id"])
        assert [row["custom_id"] for row in rows] == ["long", "short", "last"]
        assert [row["response"]["body"]["usage"]["completion_tokens"] for row in rows] == [40, 1, 4]
        assert rows[0]["response"]["request_id"] == f"{made['id']}-1" and rows[0]["error"] is None
        assert [row["response"].get("ignored") for row in rows] == [None, None, ["priority"]]
        wrong = [None, "short", "elsewhere", "refused", "no model", "streamed", None]
        assert [row["custom_id"] for row in errors] == wrong
        assert [(row["response"] or {}).get("status_code") for row in errors] == [
            None,
            None,
            None,
            400,
            404,
            None,
            None,
        ]
        for row, says in zip(errors, ("line 3", "line 2's", CHAT, "", "", "stream", "custom_id"), strict=True):
            assert row["error"] is None if not says else says in row["error"]["message"]
        assert {request.priority for request in batches.rig.backend.requests} == {IDLE_PRIORITY}
        assert len(batches.rig.ledger.rows) == 3 and {row.tenant for row in batches.rig.ledger.rows} == {"acme"}
        for kind in ("output", "error"):
            shown = (await batches.rig.client.get(f"{FILES}/{done[f'{kind}_file_id']}")).json()
            assert shown["purpose"] == "batch_output" and shown["filename"].startswith(made["id"])
        await check_sums(redis, "acme")
        assert not await redis.command("KEYS", "tandem:batches:*rows*")
        assert not await redis.command("KEYS", "tandem:live-batches:*") and not batches.rig.context.draining.in_flight
        metrics = (await batches.rig.client.get("/metrics")).text
        assert 'batches_total{model_name="echo",outcome="completed"} 1.0' in metrics
        assert 'file="errors",model_name="echo"} 7.0' in metrics
        again = await batches.rig.client.post(BATCHES + f"/{made['id']}/cancel")
        assert again.json() == done, "what is over stays as it is"


async def test_every_route_that_is_offered_is_served(redis: BackgroundClient) -> None:
    bodies = {
        CHAT: {"messages": USER},
        COMPLETE: {"prompt": "x"},
        EMBED: {"input": "x"},
        "/v1/responses": {"input": "x"},
    }
    async with batching(redis) as batches:
        for url, body in bodies.items():
            asked = json.dumps({"custom_id": "a", "url": url, "body": {"model": MODEL, **body}})
            done = await batches.until(await batches.create([asked], endpoint=url))
            assert counts(done) == (1, 1, 0), url
        assert set(ENDPOINTS) == set(batches.rig.app.state.line_handlers)


async def test_what_is_wrong_with_a_batch_is_said(redis: BackgroundClient) -> None:
    async with batching(redis) as batches:
        given = await batches.upload([line("a")])
        good = {"input_file_id": given["id"], "endpoint": COMPLETE, "completion_window": "24h"}
        output = (await batches.until(await batches.create((), **good)))["output_file_id"]
        cases: list[tuple[dict[str, Any], int, str | None]] = [
            ({"endpoint": "/v1/images"}, 400, "endpoint"),
            ({"completion_window": "24"}, 400, "completion_window"),
            ({"completion_window": "8d"}, 400, "completion_window"),
            ({"completion_window": None}, 400, "completion_window"),
            ({"input_file_id": "file-x"}, 404, "input_file_id"),
            ({"input_file_id": output}, 400, "input_file_id"),
            ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
            ({"metadata": {"a": 1}}, 400, "metadata[...]"),
            ({"output_expires_after": {"seconds": 1}}, 400, "output_expires_after.seconds"),
            ({"output_expires_after": {"seconds": 3600, "anchor": "x"}}, 400, "output_expires_after.anchor"),
            ({"priority": 1}, 400, "priority"),
        ]
        for change, status, param in cases:
            refused = await batches.rig.client.post(BATCHES, json={**good, **change})
            assert (refused.status_code, error_of(refused)["param"]) == (status, param), refused.text
        batches.rig.client.headers["authorization"] = "Bearer other"
        assert (await batches.rig.client.post(BATCHES, json=good)).status_code == 404
        assert (await batches.rig.client.get(BATCHES)).json()["data"] == []


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"\n\n", "empty_file"), (b"a\nb\nc", "too_many_lines")]
)
async def test_a_file_that_is_no_batch_fails_it(redis: BackgroundClient, content: bytes, code: str) -> None:
    async with batching(redis, max_lines=2) as batches:
        failed = await batches.until(await batches.create(content))
        assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", code)
        assert failed["failed_at"] and not failed["output_file_id"] and not failed["error_file_id"]
        await check_sums(redis, "acme")


async def test_a_batch_without_its_file_fails(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), rows=2) as batches:
        made = await batches.create([line(str(n)) for n in range(4)])
        await batches.until(made, "in_progress")
        async with batching(redis, name="g2") as other:
            assert (await other.rig.client.delete(f"{FILES}/{made['input_file_id']}")).status_code == 200
        await finish(batches, made)  # what was read of it is run
        again = await batches.create((), input_file_id=(await batches.upload([line("a")]))["id"])
        await batches.rig.client.delete(f"{FILES}/{again['input_file_id']}")
        over = await finish(batches, again)
        assert over["status"] in ("failed", "completed"), "by who was first"


async def test_one_is_cancelled_through_any_gateway(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), rows=4) as batches:
        made = await batches.create([line("short", max_tokens=1), *(line(str(n), max_tokens=50) for n in range(9))])
        await batches.until_asked(3)
        batches.rig.backend.step()
        await batches.until_answered(made, 1)
        async with batching(redis, name="g2") as other:
            answer = await other.rig.client.post(f"{BATCHES}/{made['id']}/cancel")
            assert answer.json()["status"] in ("cancelling", "cancelled")
            over = await batches.until(made)
            assert (over["status"], counts(over)) == ("cancelled", (10, 1, 0))
            assert over["cancelling_at"] <= over["cancelled_at"] and over["error_file_id"] is None
            assert [row["custom_id"] for row in await other.rows(over["output_file_id"])] == ["short"]
            hidden = await other.rig.client.post(
                f"{BATCHES}/{made['id']}/cancel", headers={"authorization": "Bearer o"}
            )
            assert hidden.status_code == 404
        assert batches.rig.backend.aborts, "what ran has ended in its group"
        await check_sums(redis, "acme")


async def test_that_of_a_removed_tenant_is_cancelled(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), rows=4) as batches:
        made = await batches.create([line(str(n), max_tokens=50) for n in range(9)])
        await batches.until_asked(3)
        batches.removed.add("acme")
        assert (await batches.until(made))["status"] == "cancelled"
        assert batches.rig.backend.aborts


async def test_another_gateway_goes_on_when_one_leaves(redis: BackgroundClient) -> None:
    """What runs there ends as requests do, and nothing runs twice."""
    async with batching(redis, manual(), rows=3) as first:
        made = await first.create([line(str(n)) for n in range(6)])
        await first.until_asked(2)
        first.leaving[0] = True
        async with batching(redis, name="g2") as second:
            assert (await finish(first, made, "completed"))["request_counts"]["completed"] == 6
            assert await first.rig.context.tasks.wait_idle(DEADLINE_S)
            rows = await second.rows((await second.show(made))["output_file_id"])
            assert [row["custom_id"] for row in rows] == [str(n) for n in range(6)]
            asked = [len(one.rig.backend.requests) for one in (first, second)]
            assert asked == [2, 4]
        await check_sums(redis, "acme")


async def test_another_gateway_goes_on_when_one_is_lost(redis: BackgroundClient) -> None:
    """Lines with rows are not run again; who comes back after its lease keeps nothing."""
    async with batching(redis, manual(), rows=4) as first:
        made = await first.create([line("short", max_tokens=1), *(line(str(n)) for n in range(5))])
        await first.until_asked(3)
        first.rig.backend.step()
        await first.until_answered(made, 1)
        lease = keys.batch_lease("acme", made["id"])
        await redis.command("SET", lease, "g2", "PX", 60_000)
        assert await first.rig.context.tasks.wait_idle(DEADLINE_S), "it gives up what it ran"
        assert first.rig.backend.aborts and not first.rig.context.draining.in_flight
        first.leaving[0] = True
        await redis.command("DEL", lease)
        async with batching(redis, name="g2") as second:
            over = await second.until(made)
            assert (over["status"], counts(over)) == ("completed", (6, 6, 0))
            assert len(second.rig.backend.requests) == 5, "all but the line that has its row"
            rows = await second.rows(over["output_file_id"])
            assert [row["custom_id"] for row in rows] == ["short", *map(str, range(5))]
        await check_sums(redis, "acme")


async def test_files_are_written_again_when_their_gateway_is_lost(redis: BackgroundClient) -> None:
    """By whoever takes up a batch that was finalizing."""
    async with batching(redis) as first:
        over = await first.until(await first.create([line(str(n)) for n in range(3)]))
        rows = await first.rows(over["output_file_id"])
        held = keys.batch("acme", over["id"])
        # as it was before the files were whole
        packed = [batch_store.SUCCEEDED + _packed(row) for row in rows]
        await redis.command("HSET", keys.batch_rows("acme", over["id"]), *_pairs(packed))
        await redis.command("HSET", held, "status", "finalizing", "has_output", 0)
        await redis.command("ZADD", keys.live_batches(MODEL), 1, f"acme/{over['id']}")
        again = await first.until(over)
        assert (again["status"], again["output_file_id"]) == ("completed", over["output_file_id"])
        assert await first.rows(again["output_file_id"]) == rows
        await check_sums(redis, "acme")


def _packed(row: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(row).encode())


def _pairs(packed: list[bytes]) -> list[Any]:
    return [part for number, value in enumerate(packed, 1) for part in (number, value)]


async def test_what_the_window_has_no_time_for_is_an_error(redis: BackgroundClient) -> None:
    now = [1_000_000_000.0]
    async with batching(redis, manual(), rows=3, wall_clock=lambda: now[0]) as batches:
        made = await batches.create(
            [line("short", max_tokens=1), *(line(str(n)) for n in range(4))], completion_window="1m"
        )
        await batches.until_asked(2)
        batches.rig.backend.step()
        await batches.until_answered(made, 1)
        now[0] += 60
        over = await batches.until(made)
        assert (over["status"], counts(over)) == ("expired", (5, 1, 4)) and over["expired_at"]
        errors = await batches.rows(over["error_file_id"])
        assert [row["error"]["code"] for row in errors] == ["batch_expired"] * 4
        assert [row["custom_id"] for row in await batches.rows(over["output_file_id"])] == ["short"]


class Crowded(Tenancy):
    """A tenant that may have two requests at once, and one request in its turn."""

    def __init__(self, retry_after_s: float | None) -> None:
        self.asked = 0
        self._retry_after_s = retry_after_s

    def limits(self, tenant: str) -> Limits:
        return Limits(concurrency=2)

    async def admit(self, tenant: str, prompt: int, output: int, *, is_open_ended: bool = False) -> Reservation:
        self.asked += 1
        if self.asked == 1:
            code = "insufficient_quota" if self._retry_after_s is None else "rate_limit_exceeded"
            raise OverLimit("too much", reason="requests", retry_after_s=self._retry_after_s, code=code)
        return Reservation(tenant)


async def test_a_limit_makes_lines_wait_and_an_empty_budget_fails_them(redis: BackgroundClient) -> None:
    for retry_after_s, wanted in ((0.5, (3, 3, 0)), (None, (3, 2, 1))):
        async with batching(redis, tenancy=Crowded(retry_after_s)) as batches:
            over = await batches.until(await batches.create([line(str(n)) for n in range(3)]))
            assert counts(over) == wanted
            if over["error_file_id"]:
                (row,) = await batches.rows(over["error_file_id"])
                assert row["response"]["body"]["error"]["code"] == "insufficient_quota"


async def test_half_of_a_tenants_requests_at_once_are_left_to_it(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), tenancy=Crowded(0.5), rows=64) as batches:
        made = await batches.create([line(str(n)) for n in range(3)])
        done = await finish(batches, made)
        assert counts(done) == (3, 3, 0)
        assert batches.rig.backend.requests


async def test_lines_wait_while_others_do(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), rows=8) as batches:
        batches.load["others"] = 6
        made = await batches.create([line(str(n), max_tokens=2) for n in range(20)])
        await batches.until_asked(1)
        assert len(batches.rig.backend.requests) == 1, "one of eight rows is left free"
        batches.load["others"] = 0
        await batches.until_asked(7)
        assert len(batches.rig.backend.requests) == 7
        batches.load["waiting"] = 30
        batches.rig.backend.step(2)
        await batches.until_answered(made, 7)
        assert len(batches.rig.backend.requests) == 7, "others wait"
        batches.load["waiting"] = 0
        assert counts(await finish(batches, made)) == (20, 20, 0)


async def test_idle_rows_are_what_others_leave() -> None:
    load: dict[str, float] = {"num_requests_running": 0, "num_requests_waiting": 0, "groups_serving": 0}
    asleep = [False]
    rows = IdleRows(lambda: {**load}, 16, lambda: asleep[0])
    looks = iter([False, True])

    async def taken(tenant: str = "a", most: int | None = None) -> bool:
        nonlocal looks
        looks = iter([False, True])
        return await rows.take(tenant, lambda: most, lambda: next(looks))

    assert not await taken(), "no group serves"
    asleep[0] = True
    assert await taken() and not await taken(), "one line wakes a group"
    asleep[0] = False
    rows.give_back("a")
    load["groups_serving"] = 2
    assert [await taken() for _ in range(2)] == [True, True] and not await taken(most=2)

    def run(requests: int, lines: int) -> None:
        load["num_requests_running"], load["idle_work_running"] = requests + lines, lines

    run(0, 2)  # its own
    assert [await taken("b") for _ in range(26)] == [True] * 26
    run(0, 28)
    assert not await taken("b"), "4 of 32 rows are left free"
    rows.give_back("b")
    run(1, 27)
    assert not await taken("b"), "a request has come"
    run(0, 27)
    load["kv_cache_usage_perc"] = 0.95
    assert not await taken("b")
    load["kv_cache_usage_perc"] = 0.5
    load["num_requests_waiting"] = 1
    assert not await taken("b"), "a request waits, in whatever group"
    load["idle_work_waiting"] = 1
    assert await taken("b") and rows.lines == 28, "what waits is a line"
    load["num_requests_waiting"] = load["idle_work_waiting"] = 0
    for _ in range(18):
        rows.give_back("b")
    run(0, 29)
    assert not await taken("b"), "how many of the 29 lines are its own is not known: of 10 it is sure"


async def test_a_tenant_has_so_many_batches(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_LIVE", 2)
    async with batching(redis, manual()) as batches:
        made = [await batches.create([line("a")]) for _ in range(2)]
        asked = {"input_file_id": made[0]["input_file_id"], "endpoint": COMPLETE, "completion_window": "1h"}
        refused = await batches.rig.client.post(BATCHES, json=asked)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        for one in made:
            await finish(batches, one)
        assert (await batches.rig.client.post(BATCHES, json=asked)).status_code == 200
        listed = (await batches.rig.client.get(BATCHES + "?limit=2")).json()
        assert listed["has_more"] and len(listed["data"]) == 2
        for one in (await batches.rig.client.get(BATCHES)).json()["data"]:
            await finish(batches, one)


async def test_outputs_beyond_a_tenants_bytes_end_a_batch(redis: BackgroundClient) -> None:
    async with batching(redis, max_bytes=3000, rows=2) as batches:
        over = await batches.until(await batches.create([line(str(n)) for n in range(12)]))
        total, completed, failed = counts(over)
        assert over["status"] == "completed" and 0 < completed < 12 and completed + failed == total == 12
        errors = await batches.rows(over["error_file_id"])
        assert {row["error"]["code"] for row in errors} == {"content_too_large"}
        asked = {"input_file_id": over["input_file_id"], "endpoint": COMPLETE, "completion_window": "1h"}
        assert (await batches.rig.client.post(BATCHES, json=asked)).status_code == 413
        await check_sums(redis, "acme")


async def test_a_line_that_is_too_long_is_an_error_of_the_line(redis: BackgroundClient) -> None:
    settings = GatewaySettings(max_body_bytes=1000)
    async with batching(redis, settings=settings) as batches:
        lines = [line("a"), line("b", "x" * 70_000), line("c", "x" * 1100), line("d")]
        over = await batches.until(await batches.create(lines))
        assert counts(over) == (4, 2, 2)
        first, second = await batches.rows(over["error_file_id"])
        assert "line 2 has more than 1000 bytes" in first["error"]["message"]
        assert second["response"]["status_code"] == 413
