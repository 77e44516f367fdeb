"""The mixed workload of the comparisons, random prompts, and throughput and latency of a run.

Torch-free; lengths are in tokens.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One request: token ids in, a fixed number of tokens out; EOS is ignored."""

    prompt: list[int]
    output_len: int


def mixed_workload(vocab_size: int, *, count: int = 32, seed: int = 0, scale: float = 1.0) -> list[Job]:
    """`count` jobs with prompts of 16 to 512 and outputs of 16 to 256 tokens, uniform; `scale` shrinks both."""
    draw = random.Random(seed)
    jobs = []
    for _ in range(count):
        prompt_len = max(2, int(draw.randint(16, 512) * scale))
        output_len = max(2, int(draw.randint(16, 256) * scale))
        jobs.append(Job([draw.randrange(2, vocab_size) for _ in range(prompt_len)], output_len))
    return jobs


def random_prompt(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    """`count` token ids that share no prefix with an earlier prompt, but for chance."""
    return [draw.randrange(3, vocab_size) for _ in range(count)]


@dataclass
class Timeline:
    """The time when a job was submitted and those when its tokens arrived, in seconds of perf_counter."""

    submitted_s: float
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.token_times_s[0] - self.submitted_s)


@dataclass(frozen=True)
class Summary:
    """Throughput over the whole span; percentiles of TTFT over jobs and of ITL over gaps, in milliseconds."""

    span_s: float
    output_tokens: int
    tokens_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    mean_latency_s: float


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of the values, each one of them."""
    ordered = sorted(values) or [float("nan")]
    return {f"p{q}": ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] for q in (50, 90, 99)}


def summarize(timelines: list[Timeline]) -> Summary:
    """The summary of all jobs of one run. Tokens that arrive together count as gaps of zero."""
    start = min(t.submitted_s for t in timelines)
    end = max(t.token_times_s[-1] for t in timelines)
    tokens = sum(len(t.token_times_s) for t in timelines)
    gaps = [b - a for t in timelines for a, b in zip(t.token_times_s, t.token_times_s[1:], strict=False)]
    return Summary(
        span_s=end - start,
        output_tokens=tokens,
        tokens_per_s=tokens / (end - start),
        ttft_ms=percentiles([timeline.ttft_ms for timeline in timelines]),
        itl_ms=percentiles([1e3 * gap for gap in gaps]),
        mean_latency_s=statistics.mean(t.token_times_s[-1] - t.submitted_s for t in timelines),
    )


def describe(name: str, summary: Summary) -> str:
    """One line with every figure of the summary."""
    ttft = " ".join(f"{k} {v:.0f}" for k, v in summary.ttft_ms.items())
    itl = " ".join(f"{k} {v:.1f}" for k, v in summary.itl_ms.items())
    return (
        f"{name:28s} {summary.tokens_per_s:8.1f} tok/s  {summary.span_s:7.2f} s  TTFT ms {ttft}  ITL ms {itl}"
        f"  mean latency {summary.mean_latency_s:.2f} s"
    )


def short(value: float) -> str:
    """Three digits or more, so that tables stay narrow."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
