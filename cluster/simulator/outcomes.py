"""Outcomes: what clients and operators see of a simulated run, and the figures of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tandem.workers.messages.kv_events import INDEX_TOKENS

GAPS_A_SECOND: Final = 10_000
"""Gaps between tokens are counted by tenths of a millisecond."""


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a good answer, in seconds: its first token, and the mean time of each further one."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2


class LiveTimes:
    """The times of one request that has not ended. last_s: of its newest token, None before the first."""

    __slots__ = ("first_s", "last_s", "num_tokens", "sent_s")

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.num_tokens = 0


class Outcomes:
    """Counts one run. extra_s: what passes between client and group beside what is simulated, there and back."""

    def __init__(self, goals: Goals, extra_s: float) -> None:
        self._goals, self._extra_s = goals, extra_s
        self.ttft_s: list[float] = []
        self.tpot_s: list[float] = []
        self.e2e_s: list[float] = []
        self.gaps: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()
        self.num_predicted = self.num_right = 0
        self.num_good = self.prompt_tokens = self.cached_tokens = self.output_tokens = self.moved = 0

    def token(self, live: LiveTimes, count: int, now_s: float) -> None:
        """Notes new tokens of a request."""
        if live.last_s is None:
            live.first_s = now_s
            self.ttft_s.append(now_s - live.sent_s + self._extra_s)
        else:
            self.gaps[int((now_s - live.last_s) * GAPS_A_SECOND)] += 1
        live.last_s = now_s
        live.num_tokens += count

    def begun(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Notes a request that has got its first row."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def predicted(self, error_tokens: int) -> None:
        """Notes what was predicted of a prompt's KV in its group, less what was found there."""
        self.num_predicted += 1
        self.num_right += abs(error_tokens) <= INDEX_TOKENS

    def ended(self, live: LiveTimes, why: str) -> None:
        """Notes an end. why: "stop" or "length", or the code of a refusal."""
        self.ends[why] += 1
        self.output_tokens += live.num_tokens
        if why not in ("stop", "length") or live.first_s is None or live.last_s is None:
            return
        tpot_s = (live.last_s - live.first_s) / (live.num_tokens - 1) if live.num_tokens > 1 else 0.0
        if live.num_tokens > 1:
            self.tpot_s.append(tpot_s)
        self.e2e_s.append(live.last_s - live.sent_s + self._extra_s)
        is_soon = live.first_s - live.sent_s + self._extra_s <= self._goals.ttft_s
        self.num_good += is_soon and tpot_s <= self._goals.tpot_s

    def figures(self, duration_s: float) -> dict[str, float]:
        """Returns all figures of the run: times in seconds, rates a second."""
        found = {
            "requests": float(sum(self.ends.values())),
            "served": float(self.ends["stop"] + self.ends["length"]),
            "moved": float(self.moved),
            "duration_s": duration_s,
            "goodput": self.num_good / duration_s,
            "output_tokens_per_s": self.output_tokens / duration_s,
            "right_predictions": self.num_right / max(1, self.num_predicted),
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
        }
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s)):
            ordered = sorted(values)
            found |= {f"{name}_p{share}_s": percentile(ordered, share) for share in (50, 90, 99)}
        found |= {f"itl_p{share}_s": counted_percentile(self.gaps, share) for share in (50, 90, 99)}
        return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns a percentile of sorted values, between two of them in proportion as numpy does; 0 of none."""
    if not ordered:
        return 0.0
    place = share / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def counted_percentile(counts: Mapping[int, int], share: float) -> float:
    """Returns a percentile of counted gaps, in seconds, at the middle of its tenth of a millisecond; 0 of none."""
    left = share / 100 * sum(counts.values())
    for gap in sorted(counts):
        left -= counts[gap]
        if left <= 0:
            return (gap + 0.5) / GAPS_A_SECOND
    return 0.0
