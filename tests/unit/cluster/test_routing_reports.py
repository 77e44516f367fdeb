"""When a group's report to the routers is a new one."""

from typing import Any

from cluster.routing.reports import Reports


def report(outstanding_tokens: int = 0, **others: Any) -> dict[str, Any]:
    return {"outstanding_tokens": outstanding_tokens, "kv_used": 0.0, "on_device": [], **others}


def test_a_group_without_work_or_news_repeats_its_report() -> None:
    reports = Reports()
    first = reports.numbered(report())
    assert first == {"report_number": 1, **report()}
    assert reports.numbered(report()) == first


def test_every_change_is_a_new_report() -> None:
    reports = Reports()
    said = [report(), report(kv_used=0.5), report(on_device=["a"]), report(on_device=["b"]), report()]
    assert [reports.numbered(r)["report_number"] for r in said] == [1, 2, 3, 4, 5]


def test_equal_totals_are_new_reports_because_they_may_be_of_other_requests() -> None:
    reports = Reports()
    said = [report(100), report(100), report(0), report(0)]
    assert [reports.numbered(r)["report_number"] for r in said] == [1, 2, 3, 3]
