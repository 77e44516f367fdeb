"""Epoch: what two looks at a collection say of the time between them."""

import pytest

from tandem.cluster.state.epoch import Change, Epoch


@pytest.mark.parametrize(
    ("known", "there", "change"),
    [
        (None, Epoch(None), Change.NEWER),
        (None, Epoch("a", 3), Change.NEWER),
        (Epoch(None), Epoch(None), Change.SAME),
        (Epoch(None), Epoch("a", 1), Change.NEWER),
        (Epoch("a", 3), Epoch("a", 3), Change.SAME),
        (Epoch("a", 3), Epoch("a", 4), Change.NEWER),
        (Epoch("a", 3), Epoch("a", 2), Change.OLDER),
        (Epoch("a", 3), Epoch("a"), Change.OLDER),
        (Epoch("a", 3), Epoch(None), Change.LOST),
        (Epoch("a", 3), Epoch(None, 9), Change.LOST),
        (Epoch("a", 3), Epoch("b", 9), Change.LOST),
        (Epoch("a"), Epoch("b"), Change.LOST),
    ],
)
def test_what_has_happened_since(known: Epoch | None, there: Epoch, change: Change) -> None:
    assert there.since(known) is change
    assert there.is_behind(known) == (change in (Change.LOST, Change.OLDER))


def test_answers_of_redis() -> None:
    assert Epoch.of(b"a", b"7") == Epoch("a", 7)
    assert Epoch.of(None, None) == Epoch(None, 0)
    assert Epoch.of(b"a") == Epoch("a")
