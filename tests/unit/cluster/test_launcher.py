"""What the launcher says. Its deeds are tests/integration/test_life_cycle.py's."""

import pytest

from cluster.launcher import cut_off_line, stopping_line


@pytest.mark.parametrize(
    ("in_hand", "words"),
    [
        (0, "stopping: no request is in hand"),
        (1, "stopping: 1 request in hand has up to 30 s to finish (--shutdown-timeout); signal again to end at once"),
        (7, "stopping: 7 requests in hand have up to 30 s to finish (--shutdown-timeout); signal again to end at once"),
        (
            None,
            "stopping: requests in hand have up to 30 s to finish (--shutdown-timeout); signal again to end at once",
        ),
    ],
)
def test_who_drains_says_what_is_in_hand_and_for_how_long(in_hand: int | None, words: str) -> None:
    assert stopping_line(in_hand, 30.0) == words


@pytest.mark.parametrize(
    ("count", "limit_s", "words"),
    [
        (1, 30.0, "1 request was cut off after 30 s (--shutdown-timeout)"),
        (7, 0.5, "7 requests were cut off after 0.5 s (--shutdown-timeout)"),
        (2, None, "2 requests were cut off by the second signal"),
    ],
)
def test_who_cuts_off_says_how_many_and_why(count: int, limit_s: float | None, words: str) -> None:
    assert cut_off_line(count, limit_s) == words
