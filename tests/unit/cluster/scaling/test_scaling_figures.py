"""The figures of a group, from an engine's counts and a clock of the test's."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.cluster.scaling.decide import FIGURES, WINDOW_S, ScalingState, decide, load_of
from tandem.cluster.scaling.scaling_figures import ScalingFigures
from tandem.configs.autoscaling import ScalingGoals
from tandem.workers.engine.base.stats import TTFT_BOUNDS_S, EngineStats, Histogram, IdleWork
from tests.support.fake_engine import FakeEngine


class Group:
    """Counts that a test raises."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.counts: dict[str, Any] = {"prompt_tokens": 0, "waiting": 0, "waiting_tokens": 0, "steps": 0, "running": 0}
        self.figures = ScalingFigures(16, lambda: self.now_s)

    def after(self, seconds: float, **counts: Any) -> dict[str, float]:
        self.now_s += seconds
        self.counts |= counts
        stats: EngineStats = FakeEngine(None).stats()
        for name, value in self.counts.items():
            setattr(stats, name, value)
        stats.time_to_first_token_s = self.ttft.snapshot()
        return self.figures.read(stats)


def test_before_the_engine_says_anything_all_is_nothing() -> None:
    figures = ScalingFigures(16, lambda: 5.0).read(None)
    assert list(figures) == list(FIGURES) and figures["rows"] == 16.0 and not sum(figures.values()) - 16.0


def test_the_speed_of_prompts_is_known_from_times_with_a_queue() -> None:
    group = Group()
    group.after(0)
    assert group.after(1, prompt_tokens=500)["prefill_rate"] == 0.0, "nobody waited: it may be faster"
    group.after(1, waiting=3, waiting_tokens=3000)
    figures = group.after(1, prompt_tokens=1500)
    assert figures["prefill_rate"] == 1000.0 and figures["queued_tokens"] == 3000.0
    group.after(1, prompt_tokens=1500)
    seen = group.after(1)["prefill_rate"]
    assert 250 < seen < 400, "rows are full, prompts stand"
    assert group.after(1, waiting=0, waiting_tokens=0)["prefill_rate"] == 1000.0, "what it can, when nobody waits"
    assert group.after(60)["prefill_rate"] == seen, "it is remembered"


def test_the_speed_in_a_queue_for_rows_is_not_that_of_other_work() -> None:
    """Long answers to short prompts had all rows; an hour later a few long prompts keep no group from going."""
    group, tokens = Group(), 0
    group.after(0)
    for _ in range(120):
        tokens += 53
        full = group.after(1, prompt_tokens=tokens, waiting=9, waiting_tokens=450, running=16)
    assert full["prefill_rate"] == pytest.approx(53)
    for second in range(90):
        tokens += 2000 * (second % 3 == 0)
        figures = group.after(1, prompt_tokens=tokens, waiting=0, waiting_tokens=0, running=1)
    assert figures["prompt_rate"] == pytest.approx(667, abs=70) and figures["prefill_rate"] == 2000.0
    load = load_of(figures, 2.0)
    decision = decide([load] * 3, 0, 3, ScalingGoals(high=3), ScalingState(), 0.0)
    assert decision.groups == 2, decision.why


def test_first_tokens_count_for_half_a_minute() -> None:
    group = Group()
    group.after(0)
    group.ttft.observe(0.1, times=3)
    group.ttft.observe(3.0)
    figures = group.after(1)
    assert (figures["first_tokens"], figures["late_0.25"], figures["late_2.5"], figures["late_5"]) == (4, 0.25, 0.25, 0)
    for _ in range(int(WINDOW_S) + 2):
        figures = group.after(1)
    assert figures["first_tokens"] == figures["late_0.25"] == 0
    assert figures["age_s"] == WINDOW_S + 3


def test_the_rate_of_prompts_is_that_of_the_window() -> None:
    group = Group()
    group.after(0)
    for second in range(1, 11):
        figures = group.after(1, prompt_tokens=100 * second, running=second % 2)
    assert figures["prompt_rate"] == 100.0 and (figures["running"], figures["mean_running"]) == (0.0, 5 / 11)


def test_work_for_idle_rows_is_in_no_figure_but_its_own() -> None:
    """A batch fills a group beside one request: the figures are those of the request alone."""
    alone, beside = Group(), Group()
    lines = IdleWork(running=12, waiting=9, waiting_tokens=900, kv_usage=0.8, prompt_tokens=0)
    for group in (alone, beside):
        group.after(0, kv_usage=0.1)
    for second in range(1, 11):
        for group in (alone, beside):
            group.ttft.observe(0.1)
        beside.ttft.observe(30.0)
        late = Histogram(TTFT_BOUNDS_S)
        late.observe(30.0, times=second)
        idle = replace(lines, prompt_tokens=700 * second, first_tokens=late.counts)
        one = {"prompt_tokens": 50 * second, "waiting": 1, "waiting_tokens": 10, "running": 3, "kv_usage": 0.1}
        more = {"prompt_tokens": 700 * second, "waiting": 9, "waiting_tokens": 900, "running": 12, "kv_usage": 0.8}
        both = {name: value + more[name] for name, value in one.items()}
        wanted, seen = alone.after(1, **one), beside.after(1, **both, idle=idle)
        assert seen.pop("idle_work") == 21.0 and not wanted.pop("idle_work")
        assert seen == pytest.approx(wanted)
    assert wanted["prefill_rate"] == pytest.approx(50.0) and wanted["late_20"] == 0.0
