"""The figures of a load, under the names that vLLM's bench gives them, and computed as it does.

Times of a request count from when it was sent. TPOT, the time per output token, leaves out the first one; ITL is the
time between two events with tokens, of which drafts may bring several at once.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, isinf
from typing import Any

import numpy as np

from tandem.cluster.cli.bench.load_client import Outcome
from tandem.cluster.cli.bench.load_run import LoadResult

TITLES: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""The short and the long name of each figure with percentiles."""


class LoadFigures:
    """The figures of one run. `summary` has vLLM's fields without those of single requests, which `details` has."""

    def __init__(
        self,
        result: LoadResult,
        *,
        shown: Sequence[str],
        percentiles: Sequence[float],
        goals: Mapping[str, float],
        queues: bool,
        rate: float,
        count: Callable[[str], int],
        pools: bool = False,
    ) -> None:
        """shown: figures with percentiles. goals: milliseconds by figure. queues: requests waited in the client, at
        `rate` a second. count: tokens of a text, for services that do not say. pools: no tokens came back."""
        self.result = result
        self.good = [outcome for outcome in result.outcomes if outcome.success]
        self._lengths = [_length(outcome, count) for outcome in self.good]
        self._goals, self._pools = goals, pools
        self.summary = self._totals()
        self.shown = [name for name in shown if self._values(name, queues, rate) is not None]
        for name in self.shown:
            self.summary |= spread(name, self._values(name, queues, rate) or [], percentiles)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.result.outcomes if not outcome.success]

    def _totals(self) -> dict[str, Any]:
        seconds = max(self.result.duration_s, 1e-9)
        inputs, outputs = sum(outcome.prompt_len for outcome in self.good), sum(self._lengths)
        totals: dict[str, Any] = {
            "duration": self.result.duration_s,
            "completed": len(self.good),
            "failed": len(self.failed),
            "total_input_tokens": inputs,
        }
        if not self._pools:
            totals["total_output_tokens"] = outputs
        totals["request_throughput"] = len(self.good) / seconds
        if not self._pools:
            totals["request_goodput"] = self._num_within_goals() / seconds if self._goals else None
            totals["output_throughput"] = outputs / seconds
        totals["total_token_throughput"] = (inputs + outputs) / seconds
        if not self._pools:
            totals["max_output_tokens_per_s"] = float(max(tokens_by_second(self.good), default=0.0))
            totals["max_concurrent_requests"] = max(requests_by_second(self.good), default=0)
        if self.result.unfinished:
            totals["unfinished"] = self.result.unfinished
        return totals

    def _num_within_goals(self) -> int:
        each = {"ttft": self._ttfts(), "tpot": self._tpots(all_of_them=True), "e2el": self._latencies()}
        limits = [(each[name], limit / 1e3) for name, limit in self._goals.items()]
        return sum(all(values[at] <= limit for values, limit in limits) for at in range(len(self.good)))

    def _ttfts(self) -> list[float]:
        return [outcome.ttft_s for outcome in self.good]

    def _latencies(self) -> list[float]:
        return [outcome.latency_s for outcome in self.good]

    def _tpots(self, *, all_of_them: bool = False) -> list[float]:
        """Seconds; answers of one token have none, or 0 among all of them."""
        pairs = zip(self.good, self._lengths, strict=True)
        return [
            (outcome.latency_s - outcome.ttft_s) / (length - 1) if length > 1 else 0.0
            for outcome, length in pairs
            if all_of_them or length > 1
        ]

    def _values(self, name: str, queues: bool, rate: float) -> list[float] | None:
        """Seconds of a figure; None where there is none of this run."""
        if name == "e2el":
            return self._latencies()
        if name.endswith("queue_time"):
            return [outcome.queue_s for outcome in self.good] if queues else None
        if name.endswith("client_queue"):
            queued = queues and not isinf(rate)
            return [outcome.latency_s + outcome.queue_s for outcome in self.good] if queued else None
        if self._pools:
            return None
        gaps = [gap for outcome in self.good for gap in outcome.itl_s]
        return {"ttft": self._ttfts(), "tpot": self._tpots(), "itl": gaps}[name]

    def details(self) -> dict[str, Any]:
        """The fields of single requests, a list each, in the order in which they were sent; seconds."""
        every = self.result.outcomes
        lengths = iter(self._lengths)
        return {
            "input_lens": [outcome.prompt_len for outcome in every],
            "output_lens": [next(lengths) if outcome.success else 0 for outcome in every],
            "ttfts": [outcome.ttft_s for outcome in every],
            "itls": [outcome.itl_s for outcome in every],
            "latencies": [outcome.latency_s for outcome in every],
            "start_times": [outcome.start_s for outcome in every],
            "queue_times": [outcome.queue_s for outcome in every],
            "generated_texts": [outcome.text for outcome in every],
            "errors": [outcome.error or "" for outcome in every],
        }


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles of seconds, as milliseconds; 0 of nothing."""
    taken = np.asarray(values if len(values) else [0.0]) * 1e3
    found = {f"mean_{name}_ms": taken.mean(), f"median_{name}_ms": np.median(taken), f"std_{name}_ms": taken.std()}
    found |= {f"p{percentile:g}_{name}_ms": np.percentile(taken, percentile) for percentile in percentiles}
    return {field: float(value) for field, value in found.items()}


def tokens_by_second(outcomes: Sequence[Outcome]) -> list[float]:
    """Events with tokens that came in each second of a run."""
    if not outcomes:
        return []
    began_s = min(outcome.start_s for outcome in outcomes)
    counts = np.zeros(_num_seconds(outcomes, began_s))
    for outcome in outcomes:
        first_s = outcome.start_s + outcome.ttft_s - began_s
        times = first_s + np.concatenate(([0.0], np.cumsum(outcome.itl_s)))
        counts += np.bincount(np.clip(times.astype(int), 0, len(counts) - 1), minlength=len(counts))
    found: list[float] = counts.tolist()
    return found


def requests_by_second(outcomes: Sequence[Outcome]) -> list[int]:
    """Requests that ran in each second of a run."""
    if not outcomes:
        return []
    began_s = min(outcome.start_s for outcome in outcomes)
    counts = np.zeros(_num_seconds(outcomes, began_s), dtype=int)
    for outcome in outcomes:
        first = int(outcome.start_s - began_s)
        counts[first : int(outcome.start_s + outcome.latency_s - began_s) + 1] += 1
    found: list[int] = counts.tolist()
    return found


def _num_seconds(outcomes: Sequence[Outcome], began_s: float) -> int:
    return ceil(max(outcome.start_s + outcome.latency_s for outcome in outcomes) - began_s) + 1


def _length(outcome: Outcome, count: Callable[[str], int]) -> int:
    """Output tokens of an answer: as the service says, else by its text."""
    return outcome.output_tokens or (count(outcome.text) if outcome.pieces else 0)
