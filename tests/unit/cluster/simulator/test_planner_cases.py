"""decide() in the loop that it closes: groups that it asked for take load away later, and their figures are cold at
first. What other planners were seen to do wrong: cold samples that vote, groups on their way asked for again,
oscillation under a steady load."""

import itertools

import pytest
from simulated_setups import load, setup

from tandem.cluster.scaling.decide import COLD_STEPS
from tandem.cluster.simulator.loads import generated_rows, make_load
from tandem.cluster.simulator.scaler import ScaledTo
from tandem.cluster.simulator.setup import Scaling, Setup, scaling_of
from tandem.cluster.simulator.simulation import Simulation
from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts
from tandem.configs.autoscaling import ScalingGoals, checked_autoscaling
from tandem.configs.errors import SettingsError

GOALS = ScalingGoals(ttft_s=1.0, low=1, high=8)


def scaled(of: Setup) -> list[ScaledTo]:
    made = Simulation(of).run()
    assert set(made.ends) == {"stop"}
    return made.scaled


def ways(first: int, changes: list[ScaledTo]) -> list[int]:
    """Up or down, for each change."""
    numbers = [first, *(one.groups for one in changes)]
    return [1 if after > before else -1 for before, after in itertools.pairwise(numbers)]


def test_a_steady_load_is_not_followed_up_and_down() -> None:
    """At most one turn: up to where the queue is gone, then down to what the load needs, and there it stays."""
    scaling = Scaling(goals=GOALS, up_s=5.0, down_s=20.0)
    changes = scaled(setup(groups=1, load=load("uniform", 900, 6.0), scaling=scaling, load_s=10.0))
    found = ways(1, changes)
    assert found == sorted(found, reverse=True) and found.count(1) >= 1 and found.count(-1) <= 1, changes


def test_groups_on_their_way_are_not_asked_for_again() -> None:
    scaling = Scaling(goals=GOALS, up_s=2.0, down_s=20.0)
    changes = scaled(setup(groups=1, load=load("uniform", 600, 6.0), scaling=scaling, load_s=40.0))
    assert len(changes) >= 2
    for before, after in itertools.pairwise(changes):
        assert after.at_s - before.at_s >= 40.0, changes


def test_cold_groups_do_not_vote() -> None:
    """Steps of a second: the queue is long from the first second on, but times say nothing before COLD_STEPS."""
    slow = FittedTimes(alone=WorkCosts(step_s=1.0, prefill_token_s=1e-4))
    scaling = Scaling(goals=GOALS, up_s=0.0, down_s=20.0)
    changes = scaled(setup(groups=1, load=load("uniform", 100, 6.0), scaling=scaling, times=slow, load_s=5.0))
    assert changes and changes[0].at_s >= COLD_STEPS - 1, changes


def test_calm_takes_groups_away_and_none_of_their_requests() -> None:
    rows = generated_rows(400, 6.0, 0)
    rows += [row._replace(at_s=rows[-1].at_s + 4.0 * place) for place, row in enumerate(rows[:30])]
    scaling = Scaling(goals=GOALS, up_s=5.0, down_s=10.0)
    made = Simulation(setup(groups=1, load=make_load("uniform", rows, 0), scaling=scaling, load_s=10.0)).run()
    assert made.ends == {"stop": 430}
    assert made.scaled[-1].groups < max(one.groups for one in made.scaled)
    assert made.figures["group_hours"] < max(one.groups for one in made.scaled) * made.figures["duration_s"] / 3600


def test_delays_are_those_of_the_file() -> None:
    config = checked_autoscaling({"min_replicas": 2, "max_replicas": 9, "upscale_delay_s": 7, "downscale_delay_s": 70})
    found = scaling_of(config)
    assert (found.first, found.goals.low, found.goals.high, found.up_s, found.down_s) == (2, 2, 9, 7.0, 70.0)
    with pytest.raises(SettingsError, match="upscaling_factor: 2 is not simulated"):
        scaling_of(checked_autoscaling({"max_replicas": 2, "upscaling_factor": 2}))
    with pytest.raises(SettingsError, match="only the policy of this service"):
        scaling_of(checked_autoscaling({"max_replicas": 2, "target_ongoing_requests": 2}))
