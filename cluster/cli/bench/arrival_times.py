"""Times at which the requests of a load are due, in seconds from its begin.

The same seed makes the times of vLLM's bench, whose gaps are drawn from a gamma distribution too.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from tandem.cluster.cli.bench.bench_flags import TrafficFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample

if TYPE_CHECKING:
    from numpy.random import RandomState


def due_times(flags: TrafficFlags, samples: Sequence[Sample], seed: int) -> list[float]:
    """Returns a time for each sample: the trace's own where they have some, else by the rate. At a fixed rate all are
    sent within count / rate seconds."""
    if samples and samples[0].due_s is not None:
        return [sample.due_s or 0.0 for sample in samples]
    import numpy as np

    draw = np.random.RandomState(seed)
    times, at_s = [], 0.0
    for place in range(len(samples)):
        at_s += _gap(rate_at(flags, place, len(samples)), flags.burstiness, draw)
        times.append(at_s)
    if flags.ramp_up_strategy is None and at_s > 0:
        whole_s = len(samples) / flags.request_rate
        return [time_s * whole_s / at_s for time_s in times]
    return times


def pace_words(due_s: Sequence[float], most: int | None) -> str:
    """Says how requests come that are due at these times: what a reader of their times to first tokens has to know."""
    last_s = max(due_s, default=0.0)
    bound = "" if most is None else f", at most {most} at a time"
    if last_s > 0:
        return f"within {last_s:.3g} s{bound}"
    return (
        f"at once{bound or ': those that wait for others have late first tokens (--request-rate, --max-concurrency)'}"
    )


def rate_at(flags: TrafficFlags, place: int, count: int) -> float:
    """Requests a second when request `place` of `count` is sent."""
    start, end = flags.ramp_up_start_rps, flags.ramp_up_end_rps
    if flags.ramp_up_strategy is None or start is None or end is None:
        return flags.request_rate
    progress = place / max(count - 1, 1)
    if flags.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


def _gap(rate: float, burstiness: float, draw: "RandomState") -> float:
    if rate == inf:
        return 0.0
    if burstiness == inf:
        return 1.0 / rate
    return float(draw.gamma(shape=burstiness, scale=1.0 / (rate * burstiness)))
