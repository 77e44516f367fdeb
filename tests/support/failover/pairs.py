"""Covering arrays of strength two: few rows in which every pair of values of two axes occurs."""

from collections.abc import Callable, Sequence
from itertools import combinations, product

Row = tuple[str, ...]


def all_pairs(*axes: Sequence[str], is_possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows with a value of each axis that together have each pair of values which some possible row has. Greedy: the
    next row is the first of those with the most pairs that are still missing. O(rows x product of the axes)."""
    candidates = [row for row in product(*axes) if is_possible(row)]
    missing = {pair for row in candidates for pair in pairs_of(row)}
    chosen: list[Row] = []
    while missing:
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def pairs_of(row: Row) -> set[tuple[tuple[int, str], ...]]:
    """The pairs that a row has, each value with its axis."""
    return set(combinations(enumerate(row), 2))
