"""The launcher's lines. Its deeds are tests/integration/test_life_cycle.py's."""

import pytest

from tandem.cluster.service.launcher import cut_off_line, stopping_line


@pytest.mark.parametrize(
    ("in_flight", "words"),
    [
        (0, "stopping: no request is in flight"),
        (1, "stopping: 1 request in flight has up to 9 s to finish (--shutdown-timeout); signal again to end at once"),
        (
            7,
            "stopping: 7 requests in flight have up to 9 s to finish (--shutdown-timeout); signal again to end at once",
        ),
        (
            None,
            "stopping: requests in flight have up to 9 s to finish (--shutdown-timeout); signal again to end at once",
        ),
    ],
)
def test_a_drain_names_the_requests_in_flight_and_their_time(in_flight: int | None, words: str) -> None:
    assert stopping_line(in_flight, 9.0) == words


@pytest.mark.parametrize(
    ("count", "limit_s", "words"),
    [
        (1, 30.0, "1 request was cut off after 30 s (--shutdown-timeout)"),
        (7, 0.5, "7 requests were cut off after 0.5 s (--shutdown-timeout)"),
        (2, None, "2 requests were cut off by the second signal"),
    ],
)
def test_a_cut_names_how_many_requests_and_why(count: int, limit_s: float | None, words: str) -> None:
    assert cut_off_line(count, limit_s) == words
