"""Covering arrays of strength two: few rows in which every pair of values of two axes occurs, instead of every row."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]


def all_pairs(*axes: Sequence[Any], is_possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows with a value of each axis that together have each pair of values which some possible row has. Greedy: the
    next row is the first of those with the most pairs that are still missing. O(rows x product of the axes)."""
    places = [row for row in product(*(range(len(axis)) for axis in axes)) if is_possible(_row(axes, row))]
    missing = {pair for row in places for pair in _pairs(row)}
    chosen: list[Row] = []
    while missing:
        best = max(places, key=lambda row: len(missing & _pairs(row)))
        chosen.append(_row(axes, best))
        missing -= _pairs(best)
    return chosen


def _row(axes: Sequence[Sequence[Any]], places: tuple[int, ...]) -> Row:
    return tuple(axis[place] for axis, place in zip(axes, places, strict=True))


def _pairs(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Every two places of a row, each with its axis."""
    return set(combinations(enumerate(places), 2))
