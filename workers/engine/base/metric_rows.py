"""A row of /metrics, and Histogram, the value of one that has buckets. A row stands on the field that has its value.

    prompt_tokens: Annotated[int, Metric("counter", "prompt_tokens_total", "Prompt tokens processed.")] = 0

The field is counted by the engine's thread, sent in EngineStats and shown by cluster/fleet/engine_metrics.py: none of
them needs to know it by name.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, get_type_hints


class Metric(NamedTuple):
    """A family of Prometheus: its kind, its name behind the prefix, and its help. label: for a field with many values,
    the name of the label that tells them apart: by the keys of a mapping, or the positions in a sequence."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    label: str | None = None


@cache
def metrics_of(source: type) -> tuple[tuple[str, Metric], ...]:
    """Returns (field, row) of the class's own fields that have one, in their order; not those of its bases."""
    hints = get_type_hints(source, include_extras=True)
    found = ((name, row) for name in source.__annotations__ for row in getattr(hints[name], "__metadata__", ()))
    return tuple((name, row) for name, row in found if isinstance(row, Metric))


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    bounds: tuple[float, ...]
    # counts[i]: values in (bounds[i-1], bounds[i]], the last one those above all bounds. Not cumulative.
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def snapshot(self) -> "Histogram":
        """Returns a copy, in which nothing is counted any more."""
        return Histogram(self.bounds, self.counts.copy(), self.total)
