"""The first difference between what was recorded and what a replay gives, in words."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

MOST_CHARS = 160


class Difference(NamedTuple):
    """field: the way to it, such as work[3].num_tokens. row: of the ranks' tables, where it is a row's."""

    field: str
    recorded: str
    replayed: str
    row: int | None = None


def first_difference(recorded: Any, replayed: Any, path: str = "", row: int | None = None) -> Difference | None:
    """Returns the first difference of two values, by their fields and elements; None if they are equal."""
    if recorded == replayed:
        return None
    if isinstance(recorded, msgspec.Struct) and type(recorded) is type(replayed):
        row = getattr(recorded, "row", row)
        for name in recorded.__struct_fields__:
            below = getattr(recorded, name), getattr(replayed, name)
            if found := first_difference(*below, f"{path}.{name}" if path else name, row):
                return found
    if _is_list(recorded) and _is_list(replayed):
        return _of_lists(recorded, replayed, path, row)
    return Difference(path, _shown(recorded), _shown(replayed), row)


def _of_lists(recorded: Sequence[Any], replayed: Sequence[Any], path: str, row: int | None) -> Difference | None:
    before, now = _rows(recorded), _rows(replayed)
    if before is not None and now is not None and before != now:
        other = next((b for a, b in zip_longest(before, now) if a != b), None)
        return Difference(f"{path}: rows", _shown(before), _shown(now), other)
    if len(recorded) != len(replayed) or not any(isinstance(one, msgspec.Struct) for one in recorded):
        return Difference(path, _shown(recorded), _shown(replayed), row)
    pairs = enumerate(zip(recorded, replayed, strict=True))
    return next((found for i, pair in pairs if (found := first_difference(*pair, f"{path}[{i}]", row))), None)


def _rows(values: Sequence[Any]) -> list[int] | None:
    """Returns the rows that a list is about, None if it is of something else."""
    rows: list[int | None] = [getattr(value, "row", None) for value in values]
    return None if None in rows else [row for row in rows if row is not None]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}.. ({len(text)} characters)"


def words_of(step: str, found: Difference, name_of: Callable[[int], str]) -> str:
    """Returns the difference in words. name_of: says whose row it is."""
    whose = "" if found.row is None else f" (row {found.row}: {name_of(found.row)})"
    return f"{step}, {found.field}{whose}\n  recorded: {found.recorded}\n  replayed: {found.replayed}"
