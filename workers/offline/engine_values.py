"""The engine's counts for LLM.get_metrics(), by the names that a service's /metrics has."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

import msgspec

from tandem.workers.engine.base.metric_rows import Histogram, Metric, metrics_of
from tandem.workers.engine.base.stats import EngineCounts, EngineStats

PREFIX = "tandem"


class EngineValue(msgspec.Struct, frozen=True, kw_only=True):
    """One value of the engine. name: as in /metrics. labels: what tells it from others of that name.

    value: of a gauge or counter; of a histogram the sum of what it has counted, with `count`, how much that is, and
    `buckets`, the counts up to each bound.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    value: float
    labels: dict[str, str] = {}
    count: int = 0
    buckets: dict[str, int] = {}


def engine_values(stats: EngineStats) -> list[EngineValue]:
    """Returns all values that the engine has; of drafts, adapters and tiers only what is in use."""
    sources: list[tuple[type, object]] = [(EngineStats, stats), (EngineCounts, stats)]
    parts = (stats.requests, stats.offload, stats.adapters, stats.drafts, stats.experts)
    sources += [(type(part), part) for part in parts if part]
    return [
        value
        for kind, source in sources
        for field, row in metrics_of(kind)
        for value in _values(row, getattr(source, field))
    ]


def _values(row: Metric, found: Any) -> Iterator[EngineValue]:
    name = f"{PREFIX}:{row.name}"
    if isinstance(found, Histogram):
        bounds = [*(f"{bound:.15g}" for bound in found.bounds), "+Inf"]
        buckets = dict(zip(bounds, accumulate(found.counts), strict=True))
        yield EngineValue(name=name, kind=row.kind, value=found.total, count=found.count, buckets=buckets)
    elif row.label is None:
        yield EngineValue(name=name, kind=row.kind, value=found)
    else:
        parts: Iterable[tuple[Any, float]] = found.items() if isinstance(found, Mapping) else enumerate(found)
        for key, part in parts:
            yield EngineValue(name=name, kind=row.kind, value=part, labels={row.label: str(key)})
