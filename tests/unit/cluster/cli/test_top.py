"""`tandem top`: rates between two readings, its lines, the screen, wrong flags. A running one: test_terminal.py."""

import dataclasses
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.cli.client.service_reading import ServiceReading
from tandem.cluster.cli.live.top_figures import figures
from tandem.cluster.cli.live.top_screen import ENTER, LEAVE, draw, lines_of, whole_screen
from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.gateway_records import GatewayRecord
from tandem.cluster.fleet.group_events import GroupEvent, GroupTally
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.configs.errors import TandemError
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.stats import TenantStats
from tests.support.fake_engine import FakeEngine
from tests.support.verbs import invoked

DIGEST = "0123456789abcdef" * 4


def record(group: str, life: int = 1, **more: Any) -> GroupRecord:
    return GroupRecord(
        group=group, life=life, model="m", state="serving", host="n", pid=7, running=2, waiting=1, **more
    )


def report(group: str, **counts: Any) -> GroupReport:
    stats = msgspec.msgpack.encode(dataclasses.replace(FakeEngine(None).stats(), **counts))
    adapters = AdapterReport(on_device=[DIGEST[:16]], running=["poet"])
    return GroupReport(group=group, model="m", stats=stats, rank_pids=[1, 2], adapters=adapters)


def reading(groups: list[GroupRecord], reports: list[GroupReport], **more: Any) -> ServiceReading:
    found = {one.group: one for one in reports}
    kept: dict[str, Any] = {"gateways": [], "redis_state": "", "adapters": [], "running": {}}
    return ServiceReading(groups, found, **kept | more)


EARLIER: dict[str, Any] = {
    "prompt_tokens": 100,
    "generation_tokens": 50,
    "steps": 10,
    "schedule_s": 0.1,
    "wait_s": 0.1,
    "tenants": {"a": TenantStats(prompt_tokens=100, generation_tokens=50)},
    "drafts": DraftStats(1, 4, 2, (2,)),
}
LATER: dict[str, Any] = {
    "prompt_tokens": 300,
    "generation_tokens": 90,
    "steps": 30,
    "schedule_s": 0.2,
    "wait_s": 0.2,
    "prefix_cache_queries": 100,
    "prefix_cache_hits": 25,
    "tenants": {"a": TenantStats(prompt_tokens=300, generation_tokens=90, waiting=3)},
    "drafts": DraftStats(3, 14, 7, (7,)),
}


def test_rates_are_of_the_time_between_two_readings_and_of_one_life() -> None:
    before = reading([record("g1"), record("g2")], [report("g1", **EARLIER), report("g2", **LATER)])
    gateway = GatewayRecord(
        gateway="w", host="n", pid=3, ready=True, in_flight=4, metrics=b"", tenant_metrics=b"", held=5, is_leaving=True
    )
    poet = AdapterEntry(name="poet", digest=DIGEST, source="/x", pinned=True)
    now = reading(
        [record("g1"), record("g2", life=2)],
        [report("g1", **LATER), report("g2", **EARLIER)],
        gateways=[gateway],
        adapters=[poet],
        running={"a": 2, "b": None},
    )
    found = figures(before, now, 2.0)
    first, second = found["groups"]
    assert (first["prompt_tokens_per_s"], first["generation_tokens_per_s"]) == (100, 20)
    assert first["step_ms"] == pytest.approx(10) and first["prefix_hits"] == 0.25 and first["drafts_accepted"] == 0.5
    assert second["generation_tokens_per_s"] is None, "a group that started again has no rate yet"
    assert (found["running"], found["waiting"], found["held"], found["generation_tokens_per_s"]) == (4, 2, 5, 20)
    assert [(t["tenant"], t["running"], t["waiting"]) for t in found["tenants"]] == [("a", 2, 3), ("b", None, 0)]
    assert found["adapters"][0] | {"digest": ""} == {
        "name": "poet", "digest": "", "tenant": None, "pinned": True, "on_device": 2, "on_host": 0, "running": 2,
    }  # fmt: skip
    lines = lines_of(found, "m on http://h")
    assert lines[:2] == ["m on http://h", "running 4  waiting 2  held 5  prompt tok/s 100  tok/s 20.0"]
    assert any(
        line.split() == ["g1", "serving", "2", "1", "0%", "100", "20.0", "10.0", "25%", "50%", "2"] for line in lines
    ), lines
    assert any(line.split() == ["w", "4", "5", "3", "leaving"] for line in lines), lines
    assert any(line.split() == ["poet", "2", "0", "2", "pinned"] for line in lines), lines


def test_what_is_not_known_is_a_dash_and_trouble_is_said() -> None:
    loading = record("g1", loaded_bytes=1, total_bytes=4)
    stuck = record("g2", stalled_s=12.0)
    now = reading([msgspec.structs.replace(loading, state="loading"), stuck], [], redis_state="does not answer in time")
    lines = lines_of(figures(None, now, 0.0), "m")
    assert "Redis does not answer in time: these are old" in lines[0] and "tok/s -" in lines[1]
    assert any("loading 25%" in line for line in lines) and any("no step for 12 s" in line for line in lines)
    assert "no group is known" in lines_of(figures(None, reading([], []), 0.0), "m")


def test_the_last_group_that_was_lost_is_said_and_whether_it_is_back() -> None:
    killed = GroupEvent("lost", "g1", "rank 0 was killed by SIGKILL")
    for tally, line in (
        (None, None),
        (GroupTally(starts=2), None),
        (GroupTally(3, 0, 1, killed, 12.0),
         "groups lost 1 since the start; the last 12 s ago: group g1 is lost: rank 0 was killed by SIGKILL"),
        (GroupTally(3, 0, 2, GroupEvent("missing", "g2"), 300.0),
         "groups lost 2 since the start; the last 5 min ago: group g2 is missing: it was killed or hangs, and is back"),
    ):  # fmt: skip
        found = figures(None, reading([record("g2")], [], tally=tally), 0.0)
        assert found["losses"] == line and found["group_losses"] == (None if tally is None else tally.losses)
        assert (line in lines_of(found, "m")) == (line is not None)


def test_the_screen_is_as_large_as_the_terminal_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    monkeypatch.setenv("LINES", "3")
    with suppress(KeyboardInterrupt), whole_screen():
        draw(["a long line", "b", "c"])
        raise KeyboardInterrupt
    said = capsys.readouterr().out
    assert said.startswith(ENTER) and said.endswith(LEAVE)
    assert "a lon\x1b[K\nb\x1b[K\n" in said and "c" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--interval", "0"), "--interval: 0 must be at least 0.2 seconds"),
        (("--url", "http://a", "--app", "b"), "by --url or by --app, not by both"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], words: str) -> None:
    done = invoked(["top", *flags])
    assert isinstance(done.exception, TandemError) and words in str(done.exception)
