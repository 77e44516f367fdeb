"""The rows of the chaos matrix cover what they promise, and its table keeps them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

from tests.support.failover import table
from tests.support.failover.pairs import all_pairs, pairs_of
from tests.support.failover.scene import Outcome

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


def test_a_table_keeps_its_rows_and_replaces_a_run_that_is_repeated(tmp_path: Path) -> None:
    page = tmp_path / "table.md"
    first = Outcome("n = 4", "rank 0", "KV copy", 4, 4, 2, 1.5, 12.0)
    other = Outcome("greedy", "drain", "decode", 5, 5, 3, 0.5, 9.5)
    for outcome in (first, other, replace(first, resumed=1)):
        table.add(outcome, {("drain", "decode"): "no reason"}, 72, page)
    assert list(table.read(page).values()) == [other, replace(first, resumed=1)]
    assert "- drain, decode: no reason\n" in page.read_text()
    table.remove(("n = 4", "rank 0", "KV copy"), {}, 72, page)
    assert list(table.read(page).values()) == [other]


def test_a_request_that_failed_shows() -> None:
    row = table.render({("a", "b", "c"): Outcome("a", "b", "c", 4, 3, 1, 0.0, 0.0)}, {}, 72).splitlines()[-4]
    assert row == "| a | b | c | 4 | 3 | 1 | 1 | 0.0 | 0.0 |"
