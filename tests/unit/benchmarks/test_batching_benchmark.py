"""benchmarks/engine/batching.py: the prediction, the settings, and the ratio of runs in the same round."""

from pathlib import Path

import pytest

from benchmarks.engine.batching import POLICIES, Run, losses, plot, predicted_loss, settings_of
from benchmarks.engine.engine_run import cpu_settings
from benchmarks.workload import Timeline, summarize


def run(tokens_per_s: float) -> Run:
    one = summarize([Timeline(0.0, token_times_s=[1 / tokens_per_s])])
    return Run(one, 1.5, 0.0, 1.0)


def test_idle_rows_predict_the_loss() -> None:
    assert predicted_loss([4, 4, 4, 4], 4) == 1.0
    assert predicted_loss([10, 2, 2, 2], 4) == 40 / 16
    assert predicted_loss([10, 2, 2, 2, 4, 4, 4, 4], 4) == pytest.approx((40 / 16 + 1) / 2)
    assert predicted_loss([5], 4) == 4.0, "three rows are empty"


def test_each_policy_is_the_engines_setting() -> None:
    base = cpu_settings(Path("demo"), 1, 128)
    assert [settings_of(policy, base).scheduler.batching_policy for policy in POLICIES] == list(POLICIES)


def test_losses_compare_runs_of_one_round(tmp_path: Path) -> None:
    runs = {"continuous": [run(10), run(30), run(20)], "static": [run(5), run(10), run(5)], "dynamic": [run(10)] * 3}
    lost = losses(runs)
    assert lost == pytest.approx({"continuous": 1.0, "static": 3.0, "dynamic": 2.0})
    plot(runs, lost, 2.0, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
