"""A row of /metrics, which stands on the field that has its value.

    prompt_tokens: Annotated[int, Metric("counter", "prompt_tokens_total", "Prompt tokens processed.")] = 0

The field is counted by the engine's thread, sent in EngineStats and shown by cluster/fleet/engine_metrics.py: none of
them needs to know it by name.
"""

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
