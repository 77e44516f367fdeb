"""Progress reports of a rank that reads its weights: the first, the last, and one each half second between them."""

from tandem.workers.messages.handshake import RankLoading
from tandem.workers.rank.rank_watch import LoadReports


def test_the_first_the_last_and_two_a_second() -> None:
    sent: list[RankLoading] = []
    now_s = 0.0
    reports = LoadReports(3, sent.append, lambda: now_s)
    for loaded in range(1001):
        now_s = loaded * 0.002
        reports.take(loaded, 1000)
    assert [message.loaded_bytes for message in sent] == [0, 250, 500, 750, 1000]
    assert {(message.rank, message.total_bytes) for message in sent} == {(3, 1000)}


def test_the_last_report_is_always_sent() -> None:
    sent: list[RankLoading] = []
    reports = LoadReports(0, sent.append, lambda: 7.0)
    for loaded in (0, 5, 10):
        reports.take(loaded, 10)
    assert sent == [RankLoading(0, 0, 10), RankLoading(0, 10, 10)]
