"""What the launcher says. Its deeds are tests/integration/test_life_cycle.py's."""

import pytest

from cluster.launcher import stopping_line


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
