"""Quota over answers that the test gives: what is asked when, how refusals read, how heartbeats go on."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.tenants import quota as quota_module
from tandem.cluster.tenants.account import QuotaReport, QuotaVerdict
from tandem.cluster.tenants.quota import (
    HEARTBEAT_S,
    LEAST_PERIOD_S,
    LEAST_RETRY_S,
    LEAST_SPREAD_S,
    MAX_RETRY_S,
    Quota,
)
from tandem.cluster.tenants.tenant import NO_LIMITS, Limits
from tandem.cluster.tenants.tenant_admission import OverLimit
from tests.unit.tenants.tenant_rig import Named, tenant

rest = asyncio.sleep
YES = {"ok": True, "reason": "", "wait_ms": 0.0, "gateways": 1, "base": 0.0, "used_elsewhere": 0.0}


@dataclass
class Answers:
    """Stands in for Redis. `answer`: fields of the verdict, or what is raised."""

    answer: Callable[[QuotaReport], dict[str, Any] | bytes | Exception] = lambda _: {}
    reports: list[QuotaReport] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[Any], *, may_probe: bool = True
    ) -> bytes:
        del text, keys
        report = msgspec.json.decode(arguments[0], type=QuotaReport)
        self.reports.append(report)
        self.probes.append(may_probe)
        await rest(0)
        answer = self.answer(report)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, bytes):
            return answer
        return msgspec.json.encode(QuotaVerdict(**{**YES, **answer}))


class Rig:
    """One gateway, one tenant, acme."""

    def __init__(self, random: float = 0.0, kv_tokens: int = 0, **limits: Any) -> None:
        self.now_s, self.random = 0.0, random
        self.redis, self.directory = Answers(), Named()
        self.directory.tenants["acme"] = tenant(**limits)
        self.quota = Quota(
            self.redis,
            self.directory,
            "g",
            clock=lambda: self.now_s,
            random=lambda: self.random,
            kv_tokens=lambda: kv_tokens,
        )

    async def refused(self, prompt: int = 1, output: int = 0, **more: Any) -> OverLimit:
        with pytest.raises(OverLimit) as caught:
            await self.quota.admit("acme", prompt, output, **more)
        return caught.value


def no(reason: str, wait_ms: float = 0.0) -> Callable[[QuotaReport], dict[str, Any]]:
    return lambda report: {"ok": not report.admit, "reason": reason if report.admit else "", "wait_ms": wait_ms}


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await rest(0.001)
    raise AssertionError("it never came to that")


def test_limits_are_those_of_a_tenant_that_there_is() -> None:
    rig = Rig(concurrency=3)
    assert rig.quota.limits("acme") == Limits(concurrency=3) and rig.quota.limits("nobody") == NO_LIMITS


async def test_a_request_asks_once_and_probes_for_nobody() -> None:
    rig = Rig(concurrency=3)
    await rig.quota.admit("acme", 2, 3)
    assert rig.redis.probes == [False] and rig.redis.reports[0].need == 5, "no request waits for a Redis that is away"
    rig.quota.tell_again()
    await rig.quota.send_heartbeat()
    assert rig.redis.probes == [False, True] and not rig.redis.reports[1].admit


@pytest.mark.parametrize(
    ("wait_ms", "random", "retry_after_s"),
    [
        (0, 0.0, LEAST_RETRY_S),
        (0, 0.5, LEAST_RETRY_S + LEAST_SPREAD_S / 2),
        (20_000, 1.0, 20 + LEAST_SPREAD_S),
        (50_000, 1.0, 55),
        (600_000, 0.0, MAX_RETRY_S - 60),
        (58_000, 1.0, MAX_RETRY_S),
    ],
)
async def test_those_who_are_refused_come_back_spread_out_and_within_the_longest(
    wait_ms: float, random: float, retry_after_s: float
) -> None:
    rig = Rig(random, requests_per_minute=3)
    rig.redis.answer = no("requests", wait_ms)
    assert (await rig.refused()).retry_after_s == pytest.approx(retry_after_s)


async def test_a_refusal_names_what_had_to_be_there() -> None:
    rig = Rig(tokens_per_minute=1000, concurrency=4)
    rig.redis.answer = no("tokens")
    assert "this asks for 900" in str(await rig.refused(300, 600))
    assert "this asks for 364" in str(await rig.refused(300, 600, is_open_ended=True))
    assert "this asks for 5300" in str(await rig.refused(300, 5000))
    rig.redis.answer = no("kv_share")
    assert "this asks for 900" in str(await rig.refused(300, 600, is_open_ended=True))
    rig.redis.answer = no("concurrency")
    assert "4 are allowed" in str(await rig.refused())


@pytest.mark.parametrize(("kv_tokens", "told"), [(0, None), (1, 0), (1000, 250)])
async def test_a_share_of_a_cache_of_unknown_size_is_no_limit(kv_tokens: int, told: int | None) -> None:
    rig = Rig(kv_tokens=kv_tokens, kv_share=0.25)
    await rig.quota.admit("acme", 1, 1)
    assert rig.redis.reports[0].kv_tokens == told


async def test_a_refused_request_never_holds_a_place() -> None:
    rig = Rig(concurrency=3)
    rig.redis.answer = no("concurrency")
    await rig.refused()
    assert rig.redis.reports[-1].running == 0
    await rig.quota.send_heartbeat()
    assert all(report.running == 0 for report in rig.redis.reports)
    count = len(rig.redis.reports)
    await rig.quota.send_heartbeat()
    assert len(rig.redis.reports) == count, "no news"


async def test_a_redis_that_goes_is_said_once_and_what_was_taken_told_later(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(requests_per_minute=10)
    rig.redis.answer = lambda _: RedisUnavailable("gone")
    for _ in range(3):
        await rig.quota.admit("acme", 1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "quota of acme: Redis is away (gone); going on with a share of it"
    ]
    await rig.quota.send_heartbeat()
    assert len(rig.redis.reports) == 4
    rig.redis.answer = lambda _: {}
    await rig.quota.send_heartbeat()
    assert rig.redis.reports[-1].delta_requests == -3 and len(rig.redis.reports) == 5
    await rig.quota.send_heartbeat()
    assert len(rig.redis.reports) == 5


async def test_a_beat_renews_what_runs_when_its_second_is_over() -> None:
    rig = Rig(concurrency=3)
    await rig.quota.admit("acme", 1, 0)
    await rig.quota.send_heartbeat()
    assert len(rig.redis.reports) == 2, "at once"
    for now_s, reports in (
        (HEARTBEAT_S - LEAST_PERIOD_S - 0.01, 2),
        (HEARTBEAT_S - LEAST_PERIOD_S, 3),
        (HEARTBEAT_S, 3),
    ):
        rig.now_s = now_s
        await rig.quota.send_heartbeat()
        assert len(rig.redis.reports) == reports


async def test_an_account_that_is_gone_holds_up_no_other() -> None:
    rig = Rig(concurrency=3)
    names = [f"t{number}" for number in range(20)]
    for name in names:
        rig.directory.tenants[name] = tenant(name, concurrency=3)
        rig.quota.settle(await rig.quota.admit(name, 1, 0), 1)
    for name in names[:19]:
        rig.directory.tenants[name] = tenant(name)
    rig.redis.reports.clear()
    await rig.quota.send_heartbeat()
    assert len(rig.redis.reports) == 1


class Beats:
    """run() with beats that are counted, and sleeps that are over at once."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.slept, self.error = 0, [], None
        send = rig.quota.send_heartbeat

        async def counted() -> None:
            self.count += 1
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            await send()

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            await rest(0)

        monkeypatch.setattr(rig.quota, "send_heartbeat", counted)
        monkeypatch.setattr(quota_module.asyncio, "sleep", sleep)
        self.running = asyncio.create_task(rig.quota.run())

    async def settled(self) -> int:
        """The count when nothing is due any more."""
        for _ in range(100):
            await rest(0)
        return self.count


@pytest.mark.parametrize("news", ["first account", "settled", "refused", "cancelled", "tell again"])
async def test_news_are_told_at_once_and_nothing_else(news: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module, "HEARTBEAT_S", 3600.0)
    rig = Rig(concurrency=3)
    reservation = None if news == "first account" else await rig.quota.admit("acme", 1, 0)
    beats = Beats(rig, monkeypatch)
    before = await beats.settled()
    assert set(beats.slept) == {LEAST_PERIOD_S}
    if news == "settled":
        assert reservation is not None
        rig.quota.settle(reservation, 1)
    elif news == "refused":
        rig.redis.answer = no("concurrency")
        await rig.refused()
    elif news == "cancelled":
        asking = asyncio.create_task(rig.quota.admit("acme", 1, 0))
        await rest(0)
        assert sum(report.admit for report in rig.redis.reports) == 2
        asking.cancel()  # Redis may have granted it by now
        await asyncio.wait({asking})
        assert asking.cancelled()
    elif news == "tell again":
        rig.quota.tell_again()
    else:
        await rig.quota.admit("acme", 1, 0)
    assert await beats.settled() == before + (news != "refused"), "who was refused held nothing"
    beats.running.cancel()


async def test_beats_go_on_by_themselves_and_after_a_defect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota_module, "HEARTBEAT_S", LEAST_PERIOD_S + 0.002)
    rig = Rig(concurrency=3)
    await rig.quota.admit("acme", 1, 0)
    beats = Beats(rig, monkeypatch)
    beats.error = ValueError("a defect")
    with caplog.at_level(logging.ERROR):
        await until(lambda: beats.count >= 4)
    assert [record.getMessage() for record in caplog.records] == ["quotas were not reported to Redis"]
    beats.running.cancel()


async def test_what_was_taken_without_redis_is_told_by_the_next_beat_not_by_the_next_renewal() -> None:
    rig = Rig(requests_per_minute=10)
    await rig.quota.send_heartbeat()
    rig.redis.answer = lambda _: RedisUnavailable("gone")
    await rig.quota.admit("acme", 1, 0)
    rig.redis.answer = lambda _: {}
    await rig.quota.send_heartbeat()
    assert [report.admit for report in rig.redis.reports] == [True, False]


def test_who_is_shown_what_is_left_has_an_account() -> None:
    rig = Rig(requests_per_minute=10)
    assert rig.quota.spent() == {} and len(rig.quota.headers("acme")) == 3
    assert rig.quota.spent() == {"acme": (1, 0)}


async def test_a_beat_comes_a_second_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    timeout = asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        waits.append(delay)
        return timeout(delay)

    monkeypatch.setattr(quota_module.asyncio, "timeout", noted)
    rig = Rig(concurrency=3)
    beats = Beats(rig, monkeypatch)
    await beats.settled()
    await rig.quota.admit("acme", 1, 0)
    await beats.settled()
    assert (waits[0], waits[-1]) == (None, HEARTBEAT_S - LEAST_PERIOD_S), "nobody has an account, then somebody"
    beats.running.cancel()


async def test_an_answer_that_cannot_be_read_holds_nothing() -> None:
    rig = Rig(concurrency=1)
    rig.redis.answer = lambda _: b"odd"
    with pytest.raises(msgspec.DecodeError):
        await rig.quota.admit("acme", 1, 1)
    rig.redis.answer = lambda _: {}
    await rig.quota.send_heartbeat()
    assert rig.redis.reports[-1].running == 0 and not rig.redis.reports[-1].awaited
