"""The rows of the chaos matrix cover what they promise."""

from itertools import product

from tests.support.failover.pairs import all_pairs, pairs_of

AXES = ("abc", "xy", "123")


def test_every_pair_occurs_in_fewer_rows_than_there_are() -> None:
    rows = all_pairs(*AXES)
    wanted = {pair for row in product(*AXES) for pair in pairs_of(row)}
    assert {pair for row in rows for pair in pairs_of(row)} == wanted
    assert len(rows) < 18


def test_impossible_rows_do_not_occur_and_cost_no_other_pair() -> None:
    def is_possible(row: tuple[str, ...]) -> bool:
        return row[:2] != ("a", "x")

    rows = all_pairs(*AXES, is_possible=is_possible)
    covered = {pair for row in rows for pair in pairs_of(row)}
    assert all(map(is_possible, rows))
    assert covered == {pair for row in product(*AXES) for pair in pairs_of(row)} - {((0, "a"), (1, "x"))}
