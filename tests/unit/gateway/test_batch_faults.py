"""Batches whose gateway wakes up late, whose input goes, whose lines meet limits, whose tenants crowd each other."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.cluster.gateway.batches import batch_run, batch_runner, batch_store
from tandem.cluster.gateway.batches.batch_lines import BatchLine
from tandem.cluster.gateway.batches.batch_records import StoredBatch
from tandem.cluster.gateway.batches.batch_store import BatchPlace, BatchStore
from tandem.cluster.gateway.batches.idle_rows import IdleRows
from tandem.cluster.gateway.batches.line_calls import TryAgain
from tandem.cluster.gateway.batches.tenant_shares import TURN_S, LineShares, giver, next_place
from tandem.cluster.gateway.files import file_routes, file_store
from tandem.cluster.state import keys
from tandem.cluster.state.lease import LeaseLost
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.batch_rig import BATCHES, FILES, Batching, batching, hurry, line
from tests.unit.gateway.rig import COMPLETE, DEADLINE_S, EOS, MODEL
from tests.unit.gateway.test_files import check_sums


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def manual() -> FakeBackend:
    return FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)


class Frozen:
    """Stops a gateway at its at[1]-th call of at[0]. is_cut_off: its lease is not renewed; later it takes that again as
    soon as it is free, which it may be when another gateway is done."""

    def __init__(self, store: BatchStore, monkeypatch: pytest.MonkeyPatch, at: tuple[str, int]) -> None:
        self.stands, self.thaws = asyncio.Event(), asyncio.Event()
        self.is_cut_off = False
        self._left = Counter({at[0]: at[1]})
        for name in ("numbers", "rows"):
            monkeypatch.setattr(store, name, self._stopping(name, getattr(store, name)))
        lease = store.lease
        monkeypatch.setattr(store, "lease", lambda place: self._cut(lease(place)))

    def _stopping(self, name: str, call: Any) -> Any:
        async def stopping(*asked: Any) -> Any:
            self._left[name] -= 1
            if self._left[name] == 0:
                self.stands.set()
                await self.thaws.wait()
            return await call(*asked)

        return stopping

    def _cut(self, lease: Any) -> Any:
        take = lease.take

        async def taken() -> bool:
            if self.is_cut_off:
                raise RedisUnavailable("frozen")
            return bool(await take())

        lease.take = taken
        return lease


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("at", [("numbers", 2), ("rows", 1)])
async def test_who_wakes_up_late_leaves_the_output_alone(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch, at: tuple[str, int], comes_back: bool
) -> None:
    """g1 is frozen while it writes the files; g2 writes them, and ends the batch."""
    async with batching(redis, name="g1") as one:
        frozen = Frozen(one.runner._store, monkeypatch, at)
        made = await one.create([line("a"), line("b"), line("c", temperature=-1)])
        await asyncio.wait_for(frozen.stands.wait(), DEADLINE_S)
        frozen.is_cut_off = True
        lease = keys.batch_lease("acme", made["id"])
        await redis.command("DEL", lease)
        async with batching(redis, name="g2") as two:
            over = await two.until(made)
            async with asyncio.timeout(DEADLINE_S):
                frozen.is_cut_off = not comes_back
                while await redis.command("GET", lease) != (b"g1" if comes_back else None):
                    await asyncio.sleep(0.005)
                frozen.thaws.set()
                while one.runner._runs:
                    await asyncio.sleep(0.005)
            assert await two.show(made) == over and over["status"] == "completed"
            assert [row["custom_id"] for row in await two.rows(over["output_file_id"])] == ["a", "b"]
            assert [row["custom_id"] for row in await two.rows(over["error_file_id"])] == ["c"]
            await check_sums(redis, "acme")


async def facts_of(batching: Batching, made: dict[str, Any]) -> StoredBatch:
    found = await batching.runner._store.get(BatchPlace("acme", made["id"]))
    assert found is not None
    return found


async def test_nothing_of_a_runner_goes_without_its_lease(redis: BackgroundClient) -> None:
    """Each call that it makes, of a batch that another one has, and of one that is over or gone."""
    async with batching(redis) as batches:
        made = await batches.create([line("a")])
        over = await batches.until(made)
        facts = (await facts_of(batches, made)).facts
        place = BatchPlace("acme", made["id"])
        batch, lease = keys.batch("acme", made["id"]), keys.batch_lease("acme", made["id"])
        late = BatchStore(redis, MODEL, "late")
        output = file_store.FileWriter(batches.runner._services.files, "acme", facts.output_file_id, late.right(place))

        def calls(*, is_over: bool) -> dict[str, Any]:
            writes = {
                "begin": output.begin,
                "finish": lambda: output.finish("x", "batch_output", 1, 60),
                "drop": output.drop,
                "keep_row": lambda: late.keep_row(facts, 7, b"x", succeeded=True),
            }
            reads = {
                "numbers": lambda: late.numbers(place),
                "rows": lambda: late.rows(place, [1]),
                "move": lambda: late.move(place, "failed", 1, {}, is_owner=True),
            }
            return writes if is_over else writes | reads

        await redis.command("SET", lease, "g2")
        before = await redis.command("HGETALL", batch)
        for name, call in calls(is_over=False).items():
            with pytest.raises(LeaseLost):
                raise AssertionError(f"{name}: {await call()}")
        await redis.command("SET", lease, "late")
        for name, call in calls(is_over=True).items():
            with pytest.raises(LeaseLost):
                raise AssertionError(f"{name}: {await call()}")
        assert await redis.command("HGETALL", batch) == before
        assert len(await batches.rows(over["output_file_id"])) == 1
        assert not await redis.command("EXISTS", keys.batch_rows("acme", made["id"]))
        await redis.command("DEL", batch)
        with pytest.raises(LeaseLost):
            await late.keep_row(facts, 7, b"x", succeeded=True)
        assert not await redis.command("EXISTS", batch), "no key without a lifetime"
        await check_sums(redis, "acme")


async def test_rows_of_a_batch_whose_input_goes_are_in_its_output(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it is run, what was billed is there, and nothing else stays."""
    monkeypatch.setattr(file_store, "PIECE_BYTES", 300)
    async with batching(redis, manual(), rows=3) as batches:
        made = await batches.create([line(str(n), "hello " * 10, max_tokens=1) for n in range(60)])
        await batches.until_asked(2)
        batches.rig.backend.step()
        await batches.until_answered(made, 2)
        assert (await batches.rig.client.delete(f"{FILES}/{made['input_file_id']}")).status_code == 200
        async with asyncio.timeout(DEADLINE_S):
            while (over := await batches.show(made))["status"] not in ("failed", "completed"):
                batches.rig.backend.step()
                await asyncio.sleep(0.002)
        assert over["status"] == "failed" and over["errors"]["data"][0]["code"] == "input_file_gone"
        rows = await batches.rows(over["output_file_id"])
        assert len(rows) == over["request_counts"]["completed"] == len(batches.rig.ledger.rows) < 60
        assert {one["id"] for one in (await batches.rig.client.get(FILES)).json()["data"]} == {over["output_file_id"]}
        await check_sums(redis, "acme")
        assert await batches.runner._services.files.held_bytes("acme") == sum(map(len, await _lines(batches, over)))
        assert not await redis.command("EXISTS", keys.batch_rows("acme", made["id"]))


async def _lines(batches: Batching, batch: dict[str, Any]) -> list[bytes]:
    answer = await batches.rig.client.get(f"{FILES}/{batch['output_file_id']}/content")
    return answer.content.splitlines(keepends=True)


async def test_a_batch_that_fails_keeps_no_place(redis: BackgroundClient) -> None:
    async with batching(redis) as batches:
        over = await batches.until(await batches.create(b"\n"))
        assert over["status"] == "failed"
        assert await redis.command("ZRANGE", keys.files("acme"), 0, -1) == [over["input_file_id"].encode()]
        await check_sums(redis, "acme")


async def test_an_input_lives_as_long_as_it_is_read(redis: BackgroundClient) -> None:
    """Files live for an hour here, the window is a day."""
    async with batching(redis, manual(), ttl_s=3600) as batches:
        made = await batches.create([line("a")], completion_window="24h")
        given = made["input_file_id"]
        day_ms = 86_400_000
        for key in (keys.file_record("acme", given), keys.file_data("acme", given), keys.files("acme")):
            assert await redis.command("PTTL", key) > day_ms
        score = float(await redis.command("ZSCORE", keys.files("acme"), given))
        (now_s, _) = await redis.command("TIME")
        assert score > int(now_s) * 1000 + day_ms
        longer = await batches.create([line("a")], completion_window="1m")
        assert await redis.command("PTTL", keys.file_data("acme", longer["input_file_id"])) <= 3_660_000
        for one in (made, longer):
            await batches.rig.client.post(f"{BATCHES}/{one['id']}/cancel")


async def test_what_a_tenant_has_of_batches_ends(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that are over go, the list of the live ones with the service, and no batch brings a file too many."""
    async with batching(redis) as batches:
        made = [await batches.until(await batches.create([line("first")]))]
        elsewhere = replace((await facts_of(batches, made[0])).facts, id="batch_1", output_file_id="file-1")
        await BatchStore(redis, "another-model", "g1").create(elsewhere)
        monkeypatch.setattr(batch_store, "MAX_BATCHES", 3)
        made += [await batches.until(await batches.create([line(str(n))])) for n in range(3)]
        listed = (await batches.rig.client.get(BATCHES)).json()["data"]
        assert {one["id"] for one in listed} == {"batch_1", *(one["id"] for one in made[-2:])}
        assert len(await redis.command("KEYS", keys.batch("acme", "*"))) == 3
        batches.leaving[0] = True
        asked = {"input_file_id": made[0]["input_file_id"], "endpoint": COMPLETE, "completion_window": "1h"}
        assert (await batches.rig.client.post(BATCHES, json=asked)).status_code == 200
        assert await redis.command("PTTL", keys.live_batches(MODEL)) > 0
        monkeypatch.setattr(batch_store, "MAX_FILES", 10)
        assert len(await redis.command("ZRANGE", keys.files("acme"), 0, -1)) == 10
        assert (await batches.rig.client.post(BATCHES, json=asked)).status_code == 400


async def test_a_client_that_does_not_take_the_first_piece_is_let_go(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_routes, "STUCK_S", 0.01)
    async with batching(redis) as batches:
        given = await batches.upload([line("a")])
        files = batches.runner._services.files
        record = await files.get("acme", given["id"])
        content = file_routes.FileContent(files, "acme", record, await files.piece("acme", record, 0))

        async def receive() -> Any:
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        sending = asyncio.ensure_future(content({"type": "http"}, receive, send))
        done, _ = await asyncio.wait({sending}, timeout=DEADLINE_S)
        assert done and isinstance(sending.exception(), TimeoutError)


async def test_lines_that_met_a_limit_go_before_others_and_one_by_one(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that lasts: no line begins but those that it has refused, and one of them at a time, when it said."""
    monkeypatch.setattr(batch_run, "PROBE_S", 0.001)
    clock, answer_line = asyncio.get_running_loop().time, batch_run.answer_line
    tried: list[tuple[int, float]] = []
    all_begun, lifted = asyncio.Event(), asyncio.Event()

    async def limited(handler: Any, tenant: str, one: BatchLine, *more: Any) -> None:
        tried.append((one.number, clock()))
        if len(tried) == 7:
            all_begun.set()
        await all_begun.wait()
        if not lifted.is_set():
            raise TryAgain(0.02)
        await answer_line(handler, tenant, one, *more)

    monkeypatch.setattr(batch_run, "answer_line", limited)
    async with batching(redis, rows=8) as batches:
        made = await batches.create([line(str(n)) for n in range(40)])
        async with asyncio.timeout(DEADLINE_S):
            while len(tried) < 20:
                await asyncio.sleep(0.005)
        numbers, times = zip(*tried[:20], strict=True)
        assert set(numbers) == set(range(1, 8)), "seven rows are free, and no other line joins those that wait"
        assert all(later - before >= 0.02 for before, later in pairwise(times[6:]))
        lifted.set()
        over = await batches.until(made)
        assert over["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert len(batches.rig.ledger.rows) == 40


async def test_no_tenant_keeps_another_ones_batches_out(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """acme has all places of the gateway, and its lines wait for a limit that lasts; other's are run all the same."""
    monkeypatch.setattr(batch_runner, "MOST", 2)
    answer_line, refused = batch_run.answer_line, asyncio.Event()

    async def limited(handler: Any, tenant: str, *more: Any) -> None:
        if tenant == "acme":
            refused.set()
            raise TryAgain(3600)
        await answer_line(handler, tenant, *more)

    monkeypatch.setattr(batch_run, "answer_line", limited)
    async with batching(redis) as batches:
        given = [await batches.create([line("a"), line("b")]) for _ in range(2)]
        await asyncio.wait_for(refused.wait(), DEADLINE_S)
        for one in given:
            await batches.until(one, "in_progress")
        batches.rig.client.headers["authorization"] = "Bearer other"
        over = await batches.until(await batches.create([line(str(n)) for n in range(3)]))
        assert over["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        batches.rig.client.headers["authorization"] = "Bearer acme"
        for one in given:
            await batches.rig.client.post(f"{BATCHES}/{one['id']}/cancel")
            assert (await batches.until(one))["status"] == "cancelled"


def places(*names: str) -> list[BatchPlace]:
    return [BatchPlace(*name.split("/")) for name in names]


def test_tenants_take_turns_at_the_places_of_a_gateway() -> None:
    waiting, running = places("a/2", "a/3", "b/1", "c/1"), places("a/1")
    assert next_place(waiting, running, {}) == BatchPlace("b", "1"), "the oldest of those who have none"
    assert next_place(waiting, running, {"b": 5.0, "c": 4.0}) == BatchPlace("c", "1"), "its last turn was earlier"
    assert next_place(places("a/2"), running, {}) == BatchPlace("a", "2")
    two = dict.fromkeys(places("a/1", "a/2", "b/1"), 0.0) | {BatchPlace("a", "2"): -1.0}
    assert giver("c", two, 0.0) == BatchPlace("a", "2"), "the one that has run for longest of who has two more"
    assert giver("b", two, TURN_S - 2) is None
    assert giver("b", two, TURN_S) == BatchPlace("a", "2"), "it has one less, and waits its time"
    assert giver("a", two, TURN_S) is None, "it has as many as anybody"
    one = dict.fromkeys(places("a/1", "b/1"), 0.0)
    assert giver("c", one, 0.0) is None and giver("c", one, TURN_S) == BatchPlace("a", "1")


async def test_idle_rows_go_to_who_has_the_fewest() -> None:
    """Four that ask for `a` and one for `b`: b has as many rows as a."""
    rows = IdleRows(lambda: {"num_requests_running": 0, "num_requests_waiting": 0}, 8, lambda: False)
    taken: list[str] = []
    is_over = False

    async def ask(tenant: str) -> None:
        while await rows.take(tenant, lambda: None, lambda: is_over):
            taken.append(tenant)

    asking = [asyncio.ensure_future(ask(tenant)) for tenant in "aaaab"]
    async with asyncio.timeout(DEADLINE_S):
        while len(taken) < 7:
            await asyncio.sleep(0)
        for _ in range(6):  # who gives a row back has one less
            rows.give_back(taken[0])
            count = len(taken)
            while len(taken) == count:
                await asyncio.sleep(0)
    is_over = True
    rows.give_back("a")
    await asyncio.gather(*asking)
    assert abs(Counter(taken)["a"] - 6 - Counter(taken)["b"]) <= 1, taken


def test_the_half_of_a_tenant_is_dealt_out_to_the_gateways_that_run_its_batches() -> None:
    shares = {name: LineShares(name) for name in ("g1", "g2", "g3")}
    held = list(zip(places("a/1", "a/2", "a/3", "b/1", "b/2"), ("g1", "g2", "g2", "g3", ""), strict=True))
    for one in shares.values():
        assert one.most("a", None) is None and one.most("a", 8) == 4 and one.most("a", 1) == 1
        one.note(held)
    assert [shares[name].most("a", 7) for name in ("g1", "g2")] == [2, 1]
    assert [shares[name].most("a", 1) for name in ("g1", "g2")] == [1, 0]
    assert shares["g3"].most("b", 8) == 4, "alone"
    for limit in range(1, 40):
        assert sum(shares[name].most("a", limit) or 0 for name in ("g1", "g2")) == max(1, limit // 2)


async def test_a_runner_knows_who_holds_the_batches_of_a_tenant(redis: BackgroundClient) -> None:
    async with batching(redis, manual(), name="g1") as one:
        made = [await one.create([line("a")]) for _ in range(2)]
        await one.until_asked(2)
        places_ = [BatchPlace("acme", batch["id"]) for batch in made]
        assert await one.runner._store.holders(places_) == [(place, "g1") for place in places_]
        await redis.command("SET", keys.batch_lease("acme", made[0]["id"]), "g2")
        async with asyncio.timeout(DEADLINE_S):
            while one.runner._services.shares.most("acme", 8) != 2:
                await asyncio.sleep(0.005)
        await one.rig.client.post(f"{BATCHES}/{made[1]['id']}/cancel")
