"""The four laws that hold after every fault: ledger, KV, token, alive. One helper for all tests of failover."""

import asyncio
import time
from collections.abc import Iterable, Sequence

import psutil

from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.workers.engine.base.stats import EngineStats
from tests.support.failover.calls import Call
from tests.support.records import group_reports, redis_process, redis_url
from tests.support.service import Service, is_alive, wait_for
from tests.support.usage import read_usage

QUIET_S = 60.0
"""Enough for a machine that does other things; what leaks stays for ever."""
KNOWN = {"model": "demo", "prompt": "The sun", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def bills(service: Service) -> list[BillingRecord]:
    """All rows of the ledger."""

    async def read() -> list[BillingRecord]:
        client = BackgroundClient(redis_url(redis_process(service)))
        try:
            return await read_usage(client, None, 0.0, time.time() + 60)
        finally:
            await client.close()

    return asyncio.run(read())


def check_ledger(service: Service, calls: Sequence[Call], terminals: frozenset[str]) -> None:
    """Exactly one row for each call, in one of the terminal states, its tokens those that were delivered, and those of
    the usage if that was sent."""
    ids = {call.id for call in calls}
    assert len(ids) == len(calls) and "" not in ids

    def rows() -> list[BillingRecord] | None:
        found = [row for row in bills(service) if row.id in ids]
        return found if len(found) >= len(ids) else None

    found = wait_for(rows, QUIET_S, "each call has a row")
    assert len(found) == len(ids), "one row for each"
    of = {row.id: row for row in found}
    for call in calls:
        row = of[call.id]
        assert row.terminal in terminals, row
        assert row.completion_tokens == call.num_tokens, (row, call.num_tokens)
        if call.usage is not None:
            usage = call.usage["prompt_tokens"], call.usage["completion_tokens"]
            assert (row.prompt_tokens, row.completion_tokens) == usage, row
            assert row.cached_tokens == call.usage["prompt_tokens_details"]["cached_tokens"], row


def leaks(stats: EngineStats) -> dict[str, int]:
    """What a group without requests should not have, by name."""
    held = {
        "running": stats.running,
        "waiting": stats.waiting,
        "steps in flight": stats.in_flight_steps,
        "used blocks": stats.used_blocks,
    }
    if stats.offload is not None:
        held["tickets of KV"] = stats.offload.open_tickets
    if stats.adapters is not None:
        held |= {"adapters in use": stats.adapters.in_use, "waiting for adapters": stats.adapters.waiting}
    return {name: count for name, count in held.items() if count}


def check_kv(service: Service, groups: int = 2) -> float:
    """Every group is at rest: no block is used on any tier, no adapter, no queue, no ticket; no gateway has a request.
    Returns the seconds until then."""
    began_s = time.monotonic()
    seen: list[object] = []

    def is_quiet(reports: Iterable[GroupReport]) -> bool:
        seen[:] = [leaks(stats) for report in reports if (stats := decode_stats(report)) is not None]
        return len(seen) == groups and not any(seen)

    wait_for(lambda: is_quiet(group_reports(service)), QUIET_S, f"nothing is held: {seen}", 0.02)
    wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 0, QUIET_S, "no gateway has a request")
    return time.monotonic() - began_s


def check_tokens(told: Call, undisturbed: Call, *, is_exact: bool) -> None:
    """The answer is the undisturbed one. Where each run differs: each choice is whole, without gap or duplicate."""
    assert told.is_ok, (told.status, told.error, told.ended)
    for said, wanted in zip(told.choices.values(), undisturbed.choices.values(), strict=True):
        if not is_exact:
            assert len(said.token_ids) == len(wanted.token_ids) and said.finish_reason == wanted.finish_reason
    if is_exact:
        assert told.choices == undisturbed.choices  # log probabilities too, to the last bit
        if told.usage is not None and undisturbed.usage is not None:
            counted = ("prompt_tokens", "completion_tokens")
            assert [told.usage[name] for name in counted] == [undisturbed.usage[name] for name in counted]


def check_alive(service: Service, survivors: Iterable[psutil.Process], known: str) -> None:
    """The processes that were not hit are the same, and a known prompt has its known answer."""
    dead = [process for process in survivors if not is_alive(process)]
    assert not dead, f"{dead} died beside: {service.output}"
    answers = [service.post("/v1/completions", KNOWN) for _ in range(2)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [known] * 2
