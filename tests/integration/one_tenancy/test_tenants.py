"""Two tenants of a real service: keys, limits hit, headers, usage printed; Redis killed and emptied meanwhile."""

import asyncio
import csv
import io
import json
from pathlib import Path

import httpx
import openai
import pytest

from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.workers.engine.observers.step_log import StepLog
from tandem.workers.messages.step import StepPlan
from tests.support.doors import bearer
from tests.support.plain_http import plain_http
from tests.support.service import Service, wait_for
from tests.support.verbs import run_verb_here

pytestmark = pytest.mark.cluster
ASKED = {"model": "demo", "prompt": "The sun", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
MANY = {"n": 128, "max_tokens": 800}
"""Over eight rows they last for more than ten thousand steps."""
ADMIN = bearer("boss")
ROWS = 8
"""Of the service (conftest.py)."""


def tenants(service: Service, *arguments: str) -> str:
    done = run_verb_here("tenants", *arguments, "--redis-url", redis_url(service))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def redis_url(service: Service) -> str:
    (redis,) = wait_for(lambda: service.titled("tandem redis"), 60, "Redis runs")
    return f"unix://{redis.cmdline()[1].removesuffix('redis.conf')}redis.sock"


def wait_until_known(service: Service, headers: dict[str, str]) -> None:
    """The key is a tenant's."""

    def answers() -> list[int]:
        return [service.get("/v1/models", headers=sent).status_code for sent in ({}, headers)]

    wait_for(lambda: answers() == [401, 200], 60, "the key is known")


def post(service: Service, headers: dict[str, str], **body: object) -> httpx.Response:
    return service.post("/v1/completions", {**ASKED, **body}, headers=headers)


def rows(service: Service, tenant: str) -> list[dict[str, str]]:
    done = run_verb_here("usage", "--tenant", tenant, "--format", "csv", "--redis-url", redis_url(service))
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def at_least(count: int, found: list[dict[str, str]]) -> list[dict[str, str]]:
    return found if len(found) >= count else []


def test_two_tenants_with_limits_and_a_bill(closed: Service) -> None:
    assert post(closed, {}).status_code == 401, "an admin key closes the service"
    assert post(closed, ADMIN).status_code == 200, "what an admin asks is the default tenant's"
    small = bearer(tenants(closed, "add", "small", "--requests-per-minute", "3", "--tokens-per-minute", "5000"))
    made = closed.post("/admin/tenants", {"name": "large", "weight": 2}, headers=ADMIN)
    large = bearer(made.json()["key"])
    wait_until_known(closed, small)

    first = post(closed, small)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    with plain_http.stream(
        "POST", closed.url + "/v1/completions", json={**ASKED, "stream": True}, headers=small, timeout=60
    ) as stream:
        assert int(stream.headers["x-ratelimit-remaining-requests"]) < 3
        stream.read()
    client = openai.OpenAI(base_url=closed.url + "/v1", api_key=small["authorization"][7:], max_retries=0)

    def until_refused() -> None:
        for _ in range(4):  # the minute gives one back every 20 s
            client.completions.create(model="demo", prompt="The", max_tokens=1)

    with pytest.raises(openai.RateLimitError) as refused:
        until_refused()
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert post(closed, large).status_code == 200, "the other tenant's limits are its own"

    tenants(closed, "set", "small", "--requests-per-minute", "none", "--token-budget", "10")
    wait_for(lambda: closed.get("/admin/tenants/small", headers=ADMIN).json()["limits"]["token_budget"], 60, "known")

    def refused_for_good() -> httpx.Response | None:
        answer = post(closed, small)
        return answer if answer.status_code == 429 and answer.json()["error"]["code"] == "insufficient_quota" else None

    gone = wait_for(refused_for_good, 60, "the budget is used up")
    assert gone.headers["x-should-retry"] == "false"

    bill = wait_for(lambda: at_least(4, rows(closed, "small")), 60, "the rows")  # each look starts a process
    assert {row["terminal"] for row in bill} == {"length"}
    assert [int(row["completion_tokens"]) for row in bill[:3]] == [8, 8, 1]
    table = run_verb_here("usage", "--redis-url", redis_url(closed)).stdout.splitlines()
    named = [line.split()[0] for line in table]
    assert named[0] == "tenant" and named[1:] == sorted(named[1:]) and {"default", "large", "small"} <= set(named)
    assert "tandem:tenant_tokens_total" in closed.get("/metrics", headers=ADMIN).text
    assert "tandem:tenant_tokens_total" not in closed.get("/metrics").text


def test_tenants_have_caches_of_their_own(closed: Service) -> None:
    prompt = "A prompt that is long enough to fill several blocks of the cache, said by one tenant first. " * 2
    headers = [bearer(tenants(closed, "add", name)) for name in ("one", "two")]
    wait_until_known(closed, headers[1])

    def cached(sent: dict[str, str]) -> int:
        usage = post(closed, sent, prompt=prompt, max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(headers[0]) == 0
    assert cached(headers[0]) > 0
    assert cached(headers[1]) == 0, "another tenant's words are not found"


FLOOD, FEW = 900, 5
SHORT, LONGER = 8, 40


def test_a_flood_of_one_tenant_delays_no_other_and_leaves_no_row_idle(closed: Service, step_log: Path) -> None:
    """TN-06 in turns, as the step log has them; the lengths of prompts say whose they are. Hundreds of one tenant's
    wait when the other's come, one after the other. What was on its way meanwhile got rows, what waited did not."""
    made = [closed.post("/admin/tenants", {"name": name}, headers=ADMIN) for name in ("loud", "quiet")]
    loud, quiet = (bearer(answer.json()["key"]) for answer in made)
    wait_until_known(closed, quiet)
    flood = {**ASKED, "prompt": [[20] * SHORT] * FLOOD, "max_tokens": 80, "stream": True}
    first, sent = len(plans(step_log)), []
    with plain_http.stream("POST", closed.url + "/v1/completions", json=flood, headers=loud, timeout=60) as response:
        assert response.status_code == 200
        wait_for(lambda: closed.get("/load").json()["num_requests_waiting"] > FLOOD / 2, 30, "they wait")
        for i in range(FEW):
            sent.append(len(plans(step_log)))
            assert post(closed, quiet, prompt=[30] * (LONGER + i), max_tokens=4).status_code == 200
    log = plans(step_log)
    begun = [next(k for k, plan in enumerate(log) if LONGER + i in lengths(plan)) for i in range(FEW)]
    overtakers = [sum(lengths(p).count(SHORT) for p in log[a:b]) for a, b in zip(sent, begun, strict=True)]
    waiting = FLOOD - sum(lengths(plan).count(SHORT) for plan in log[first : begun[-1]])
    print(f"loud ones that went before: {overtakers}; {waiting} waited to the end")
    assert max(overtakers) < waiting, "in order of arrival all of those would have gone before"
    busy = log[sent[0] : begun[-1]]
    idle, ends = sum(ROWS - len(plan.work) for plan in busy), sum(len(plan.new_rows) for plan in busy)
    print(f"{idle} of {ROWS * len(busy)} rows had nothing to do, {ends} were handed over")
    assert idle <= ends + 2 * ROWS, "a row that has ended is free for the one step that was planned meanwhile"


def plans(step_log: Path) -> list[StepPlan]:
    """Of all steps until now."""
    (file,) = step_log.parent.iterdir()
    return StepLog.read(str(file))


def lengths(plan: StepPlan) -> list[int]:
    """Of the prompts that begin with it."""
    return [row.prompt_len for row in plan.new_rows]


def test_redis_killed_and_emptied_costs_no_tenant_and_no_row(closed: Service) -> None:
    key = tenants(closed, "add", "steady", "--concurrency", "4", "--tokens-per-minute", "1000000")
    steady = bearer(key)
    wait_until_known(closed, steady)
    (before,) = closed.titled("tandem redis")
    answers = [post(closed, steady).status_code for _ in range(3)]
    before.suspend()
    answers += [post(closed, steady).status_code for _ in range(3)]
    assert closed.get("/v1/models", headers=bearer("sk-nobody")).status_code in (401, 503)
    wait_for(
        lambda: closed.get("/v1/models", headers=bearer("sk-nobody")).status_code == 503, 15, "unknown keys are 503"
    )
    before.resume()
    wait_for(lambda: closed.get("/v1/models", headers=bearer("sk-nobody")).status_code == 401, 60, "it is back")
    before.kill()
    answers += [post(closed, steady).status_code for _ in range(3)]
    wait_for(lambda: [p for p in closed.titled("tandem redis") if p.pid != before.pid], 60, "Redis restarts")
    wait_for(lambda: flushed(closed), 60, "the new one listens")
    answers += [post(closed, steady).status_code for _ in range(3)]
    assert answers == [200] * 12
    wait_for(lambda: "steady" in tenants(closed, "ls"), 60, "the tenants are written again")
    wait_for(lambda: len(rows(closed, "steady")) == 12, 30, "every row is there")
    assert len({row["id"] for row in rows(closed, "steady")}) == 12
    assert "two" in tenants(closed, "ls") and rows(closed, "two")


def flushed(service: Service) -> bool:
    async def send() -> bool:
        client = BackgroundClient(redis_url(service))
        try:
            return bool(await client.command("FLUSHALL"))
        except RedisUnavailable:
            return False
        finally:
            await client.close()

    return asyncio.run(send())


def test_places_are_held_by_streams_and_freed_by_those_who_leave(closed: Service) -> None:
    busy = bearer(tenants(closed, "add", "busy", "--concurrency", "2"))
    wait_until_known(closed, busy)
    first = {**ASKED, **MANY, "stream": True}
    second = {**first, "priority": -1}  # before those of the first that wait
    with (
        plain_http.stream("POST", closed.url + "/v1/completions", json=first, headers=busy, timeout=60) as one,
        plain_http.stream("POST", closed.url + "/v1/completions", json=second, headers=busy, timeout=60) as two,
    ):
        assert (one.status_code, two.status_code) == (200, 200)
        refused = post(closed, busy, max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    wait_for(lambda: post(closed, busy, max_tokens=1).status_code == 200, 60, "their places are free")
    bill = wait_for(lambda: [r for r in rows(closed, "busy") if r["terminal"] == "abort"], 60, "the rows")
    assert all(0 < int(row["completion_tokens"]) < MANY["n"] * MANY["max_tokens"] for row in bill)
    last = json.loads(run_json(closed, "busy").splitlines()[-1])
    assert last["tenant"] == "busy"


def test_a_kv_share_bounds_what_is_in_flight_and_is_free_again_when_that_ends(closed: Service) -> None:
    """Nine tenths of 8192 blocks of 16 are 117,964 tokens. A prompt of 8 and 128 answers of 920 hold 117,768 of
    them for more than ten thousand steps, while others come: a long prompt, 408 tokens with its answer, and a short
    one, which goes before the answers that wait."""
    made = [{"name": "sharing", "kv_share": 0.9}, {"name": "aside", "kv_share": 0.9}]
    keys = [closed.post("/admin/tenants", tenant, headers=ADMIN).json()["key"] for tenant in made]
    sharing, aside = map(bearer, keys)
    wait_until_known(closed, aside)
    held = {**ASKED, "prompt": [20] * 8, "n": 128, "max_tokens": 920, "stream": True}
    long: dict[str, object] = {"prompt": [20] * 400, "max_tokens": 8}
    with plain_http.stream("POST", closed.url + "/v1/completions", json=held, headers=sharing, timeout=60) as stream:
        assert stream.status_code == 200
        refused = post(closed, sharing, **long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "cache" in refused.json()["error"]["message"] and 1 <= int(refused.headers["retry-after"]) <= 60
        assert post(closed, sharing, priority=-1).status_code == 200, "there is room for a short one"
        assert post(closed, aside, **long).status_code == 200, "another tenant's share is another's"
        assert post(closed, sharing, **long).status_code == 429, "the first goes on, and has given nothing back"
    wait_for(lambda: post(closed, sharing, **long).status_code == 200, 60, "its client left: it holds nothing")
    changed = httpx.patch(closed.url + "/admin/tenants/sharing", json={"kv_share": 0.005}, headers=ADMIN, timeout=60)
    assert changed.json()["limits"]["kv_share"] == 0.005, changed.text
    for _ in range(2):  # 655 tokens: two do not fit beside each other
        wait_for(lambda: post(closed, sharing, **long).status_code == 200, 60, "what ended by itself holds nothing")
    counted = [line for line in closed.get("/metrics", headers=ADMIN).text.splitlines() if 'tenant="sharing"' in line]
    assert any("tenant_rejections_total" in line and 'reason="kv_share"' in line for line in counted), counted


def test_a_gateway_that_dies_leaves_a_row_and_no_place_taken(closed: Service) -> None:
    frail = bearer(tenants(closed, "add", "frail", "--concurrency", "1"))
    wait_until_known(closed, frail)
    asked = {**ASKED, **MANY, "stream": True}
    (gateway,) = closed.titled("ray::ServeReplica:tandem:tandem-gateway")
    with plain_http.stream("POST", closed.url + "/v1/completions", json=asked, headers=frail, timeout=60) as stream:
        assert stream.status_code == 200
        gateway.kill()
        with pytest.raises(httpx.HTTPError):
            stream.read()

    def is_served_again() -> bool:
        try:
            return post(closed, frail, max_tokens=1).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(is_served_again, 60, "another gateway, and the place is free")
    bill = wait_for(lambda: [r for r in rows(closed, "frail") if r["terminal"] == "client_lost"], 45, "the row")
    assert [row["completion_tokens"] for row in bill] == ["0"], "what was delivered is not known"


def run_json(service: Service, tenant: str) -> str:
    return run_verb_here("usage", "--tenant", tenant, "--format", "json", "--redis-url", redis_url(service)).stdout
