"""Times to the first token by how much of a turn's prompt earlier turns had. Called by benchmarks/multiturn.py."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.turns import Turn
from benchmarks.workload import percentiles

EDGES = (0, 1, 128, 256, 512)
"""Where bins of known tokens begin; the last has no end."""


@dataclass(frozen=True)
class TTFTBin:
    """Turns whose known tokens lie in one range, written as `known`; milliseconds by arm."""

    known: str
    turns: int
    p50_ms: dict[str, float]
    p90_ms: dict[str, float]


def ttft_bins(turns: Sequence[Turn], ttft_ms: Mapping[str, Sequence[float]]) -> list[TTFTBin]:
    """The bins that have turns. ttft_ms: by arm, in the order of the turns."""
    bins = []
    for begin, end in zip(EDGES, [*EDGES[1:], None], strict=True):
        mine = [
            place
            for place, turn in enumerate(turns)
            if begin <= turn.seen_tokens and (end is None or turn.seen_tokens < end)
        ]
        if not mine:
            continue
        values = {arm: [times[place] for place in mine] for arm, times in ttft_ms.items()}
        bins.append(
            TTFTBin(
                known=_range(begin, end),
                turns=len(mine),
                p50_ms={arm: statistics.median(times) for arm, times in values.items()},
                p90_ms={arm: percentiles(times)["p90"] for arm, times in values.items()},
            )
        )
    return bins


def slower_bins(bins: Sequence[TTFTBin], arm: str, base: str) -> list[str]:
    """Where an arm's median is above the base's; nothing when one of them was not measured."""
    return [one.known for one in bins if {arm, base} <= one.p50_ms.keys() and one.p50_ms[arm] > one.p50_ms[base]]


def _range(begin: int, end: int | None) -> str:
    if end is None:
        return f"{begin}+"
    return str(begin) if end == begin + 1 else f"{begin} to {end - 1}"
