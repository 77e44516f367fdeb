"""Replays arrivals on an engine by the clock, an open loop, and groups their TTFT.

Bins are ranges of known tokens: those that earlier turns had computed.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.engine.engine_run import TimelineSink
from benchmarks.service.trace_replay.trace import Arrival
from benchmarks.workload import Timeline, percentiles
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import RESULT_WAIT_S

EDGES = (0, 1, 128, 256, 512)
"""First numbers of known tokens of the bins; the last bin has no end."""


def replay(engine: Engine, sink: TimelineSink, arrivals: Sequence[Arrival], name: str) -> list[Timeline]:
    """Runs every request to its end. Each counts as submitted when it was due; it is taken in as EngineLoop does."""
    start = time.perf_counter()
    timelines = [Timeline(start + arrival.due_s) for arrival in arrivals]
    ids = [arrival.request.request_id for arrival in arrivals]
    sink.timelines.update(zip(ids, timelines, strict=True))
    ended_before, place = len(sink.ended_ids), 0
    with tqdm(total=len(arrivals), desc=name, unit="request", leave=False, mininterval=1.0) as bar:
        while bar.n < len(arrivals):
            while place < len(arrivals) and timelines[place].submitted_s <= time.perf_counter():
                engine.add_request(arrivals[place].request)
                place += 1
            if engine.has_work():
                engine.turn(RESULT_WAIT_S)
            else:
                time.sleep(max(0.0, timelines[place].submitted_s - time.perf_counter()))
            bar.update(len(sink.ended_ids) - ended_before - bar.n)
    return timelines


@dataclass(frozen=True)
class TTFTBin:
    """Turns whose known tokens lie in the range `known`; milliseconds by variant."""

    known: str
    turns: int
    p50_ms: dict[str, float]
    p90_ms: dict[str, float]


def ttft_bins(known_tokens: Sequence[int], ttft_ms: Mapping[str, Sequence[float]]) -> list[TTFTBin]:
    """The bins that have turns. known_tokens, and ttft_ms by variant: in the order of the turns."""
    bins = []
    for begin, end in zip(EDGES, [*EDGES[1:], None], strict=True):
        mine = [place for place, known in enumerate(known_tokens) if begin <= known and (end is None or known < end)]
        if not mine:
            continue
        values = {variant: [times[place] for place in mine] for variant, times in ttft_ms.items()}
        bins.append(
            TTFTBin(
                known=_range(begin, end),
                turns=len(mine),
                p50_ms={variant: statistics.median(times) for variant, times in values.items()},
                p90_ms={variant: percentiles(times)["p90"] for variant, times in values.items()},
            )
        )
    return bins


def slower_bins(bins: Sequence[TTFTBin], variant: str, base: str) -> list[str]:
    """The bins in which a variant's median is above the base's; none if one of the two was not measured."""
    return [
        one.known for one in bins if {variant, base} <= one.p50_ms.keys() and one.p50_ms[variant] > one.p50_ms[base]
    ]


def _range(begin: int, end: int | None) -> str:
    if end is None:
        return f"{begin}+"
    return str(begin) if end == begin + 1 else f"{begin} to {end - 1}"
