"""decide() alone, Serve's policy class over it, and a gateway's look at it. No Ray runs."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.scaling import scaling_policy
from tandem.cluster.scaling.decide import (
    COLD_STEPS,
    FIGURES,
    IDLE_S,
    LATE_BOUNDS_S,
    MOST_GROWTH,
    WINDOW_S,
    Decision,
    GroupLoad,
    ScalingState,
    decide,
    late_share,
    load_of,
)
from tandem.cluster.scaling.scaling_policy import STALE_S, GroupScaling
from tandem.cluster.scaling.scaling_watch import OTHER_POLICY, WRITE_S, ScalingWatch
from tandem.configs.autoscaling import GROUP_SCALING, ScalingGoals
from tandem.configs.errors import SettingsError

GOALS = ScalingGoals(low=1, high=8)
CALM = GroupLoad(running=1, mean_running=1, rows=8, kv_used=0.1, steps=1000)
FULL = GroupLoad(running=8, mean_running=8, rows=8, waiting=5, queued_tokens=10_000, prefill_rate=1000, steps=1000)


def made(loads: list[GroupLoad], held: int = 0, now: int | None = None, goals: ScalingGoals = GOALS) -> Decision:
    return decide(loads, held, len(loads) if now is None else now, goals, ScalingState(), 0.0)


def test_a_queue_that_takes_longer_than_the_goal_asks_for_more() -> None:
    decision = made([FULL, FULL])
    assert (decision.groups, decision.why) == (4, "queue 20k tokens = 10.0 s > 2 s")
    assert made([FULL, CALM]).groups == 2, "what comes now goes to the other one: more groups would not help the queue"
    assert made([FULL, FULL], goals=ScalingGoals(high=3)).why.endswith("; 3 is the most")
    small = GroupLoad(running=8, rows=8, waiting=1, queued_tokens=1500, prefill_rate=1000, steps=1000)
    assert made([small, small]).groups == 2, "within the goal"


def test_full_kv_asks_for_as_many_as_hold_it() -> None:
    full = GroupLoad(running=4, rows=64, kv_used=0.95, steps=1000)
    decision = made([full] * 8, goals=ScalingGoals(high=20))
    assert (decision.groups, decision.why) == (9, "KV 95% > 85%")
    assert made([full, GroupLoad(rows=64)]).groups == 2, "there is room in the mean"


def test_late_first_tokens_ask_for_one_more_group() -> None:
    late = GroupLoad(running=5, rows=64, steps=1000, first_tokens=50, late_share=0.2)
    decision = made([late, late])
    assert (decision.groups, decision.why) == (3, "20% of first tokens late")
    new = msgspec.structs.replace(late, age_s=WINDOW_S / 2)
    assert made([late, new]).groups == 2, "they may be of the time before the new one"
    alone = msgspec.structs.replace(late, running=1)
    assert made([alone, alone]).groups == 2, "more groups do not make a single request faster"
    assert made([msgspec.structs.replace(late, first_tokens=3)] * 2).groups == 2, "too few to judge by"


def test_fewer_where_fewer_would_be_calm() -> None:
    decision = made([CALM] * 4)
    assert decision.groups == 1 and decision.why.startswith("1 group would do: rows or KV 12%")
    busy = GroupLoad(running=2, mean_running=5, rows=8, steps=1000)
    assert made([busy] * 3).groups == 3, "two of them would have nearly all rows taken"
    prompts = GroupLoad(mean_running=2, rows=64, prompt_rate=600, prefill_rate=1000, steps=1000)
    assert made([prompts] * 4).groups == 4, "four compute 2.4 groups' worth of prompts"
    quick = msgspec.structs.replace(prompts, mean_running=0.1, prefill_rate=20)
    assert made([quick] * 4).groups == 1, "that speed is of a time when all rows were taken: they are hardly used now"
    late = GroupLoad(mean_running=1, rows=8, steps=1000, first_tokens=50, late_share=0.09)
    assert made([late] * 3).groups == 3


def test_idle_is_known_by_steps_and_not_only_by_a_look_at_a_quiet_moment() -> None:
    """Requests that are over between two looks leave steps behind."""
    state, quiet = ScalingState(), GroupLoad(steps=100)
    first = decide([quiet], 0, 1, GOALS, state, 10.0)
    assert first.state.idle_since_s is None
    second = decide([quiet], 0, 1, GOALS, first.state, 11.0)
    third = decide([quiet], 0, 1, GOALS, second.state, 311.0)
    assert (third.groups, third.why) == (1, "idle 300 s; 1 is the least")
    worked = decide([GroupLoad(steps=105)], 0, 1, GOALS, third.state, 312.0)
    assert worked.state.idle_since_s is None and "idle" not in worked.why


def test_none_are_left_when_idle_and_held_requests_ask_for_the_first() -> None:
    goals = ScalingGoals(low=0, high=3)
    between = decide([GroupLoad(steps=9)], 0, 1, goals, ScalingState(steps=9, idle_since_s=0.0), IDLE_S / 2)
    assert between.groups == 1, "a request may be on its way to it"
    idle = decide([GroupLoad(steps=9)], 0, 1, goals, ScalingState(steps=9, idle_since_s=0.0), 60.0)
    assert (idle.groups, idle.why) == (0, "idle 60 s")
    gone = decide([], 0, 0, goals, idle.state, 61.0)
    assert gone.groups == 0, "the last one's end is no work"
    woken = decide([], 3, 0, goals, gone.state, 62.0)
    assert (woken.groups, woken.why) == (1, "3 requests held, and no group runs")
    assert decide([], 1, 2, goals, woken.state, 63.0).why.endswith("; 2 groups on the way")


def test_work_for_idle_rows_keeps_the_last_group_and_no_other() -> None:
    """Lines of batches have all rows and nine tenths of the KV, for minutes."""
    goals, lines = ScalingGoals(low=0, high=8), GroupLoad(rows=64, idle_work=60, steps=100)
    state = ScalingState(steps=300, idle_since_s=0.0)
    decision = decide([lines] * 3, 0, 3, goals, state, 60.0)
    assert decision.groups == 1 and decision.state.idle_since_s is None, "work between two steps"
    busy = msgspec.structs.replace(FULL, idle_work=8)
    assert made([busy, busy]) == made([FULL, FULL]), "what requests need is not less for it"


# ---- what other planners did in production ----


def test_cold_samples_do_not_scale() -> None:
    """ai-dynamo/dynamo#12430: times of a worker that had just started were taken for those of the service."""
    cold = GroupLoad(
        running=3, rows=8, waiting=4, queued_tokens=8000, prefill_rate=10, steps=COLD_STEPS - 1, first_tokens=40,
        late_share=1.0,
    )  # fmt: skip
    assert made([cold]).groups == 1 and made([CALM, cold]).groups == 2
    assert made([msgspec.structs.replace(cold, steps=COLD_STEPS)]).groups == 2, "it has a say from then on"


def test_no_decision_is_beyond_the_limit_although_more_run_than_may() -> None:
    """ai-dynamo/dynamo#12428: while it divided groups anew, the planner asked for more than there were GPUs."""
    assert made([FULL] * 8).groups == 8
    assert made([FULL] * 8, goals=ScalingGoals(high=5)).groups == 5, "the limit was lowered"
    assert made([FULL] * 2, now=12).groups == 4


def test_what_never_comes_keeps_no_group_and_is_not_asked_for_twice() -> None:
    """ai-dynamo/dynamo#14251: with a pod waiting for a GPU the planner never scaled down."""
    asked = made([FULL], now=1).groups
    assert asked == 2
    for now in (2, 3, 5):
        waiting = made([FULL], now=now)
        assert waiting.groups == asked and waiting.why.endswith(f"; {now - 1} group{'s' * (now > 2)} on the way")
    assert made([CALM, CALM], now=3).groups == 1, "the load is gone, and the third has never come"
    idle = decide([], 0, 2, ScalingGoals(low=0, high=3), ScalingState(), 0.0)
    assert idle.groups == 0, "nobody waits for a first group that finds no place"


def test_a_group_that_loads_for_long_is_not_given_up_while_it_is_needed() -> None:
    """Serve would end the one that loads first, once the queue for which it was asked has gone."""
    rows = GroupLoad(running=7, mean_running=6.64, rows=8, steps=1000)
    two = made([rows, rows], now=3)
    assert two.groups == 3 and two.why.endswith("; 1 group on the way"), "a third died, and its replacement loads"
    assert made([rows, rows], now=2).groups == 2, "it is not asked for by that alone"
    assert made([rows], now=2).groups == 2 and made([rows], now=5).groups == 2, "no more than would be calm"
    assert made([CALM, CALM], now=3).groups == 1


amounts = st.floats(0, 1e6, allow_nan=False)
loads_of = st.lists(
    st.builds(
        GroupLoad,
        waiting=st.integers(0, 1000).map(float),
        queued_tokens=amounts,
        running=st.integers(0, 64).map(float),
        mean_running=st.floats(0, 64),
        rows=st.just(64.0),
        kv_used=st.floats(0, 1),
        prompt_rate=amounts,
        prefill_rate=st.one_of(st.just(0.0), st.floats(1, 1e6)),
        steps=st.integers(0, 100).map(float),
        age_s=st.floats(0, 1e4),
        first_tokens=st.integers(0, 500).map(float),
        late_share=st.floats(0, 1),
    ),
    max_size=40,
)
goals_of = st.builds(
    lambda low, more, ttft_s, kv_high: ScalingGoals(low=low, high=max(1, low + more), ttft_s=ttft_s, kv_high=kv_high),
    st.integers(0, 4), st.integers(0, 60), st.floats(0.05, 100), st.floats(0.05, 1),
)  # fmt: skip


@given(loads=loads_of, held=st.integers(0, 10**6), now=st.integers(0, 100), goals=goals_of)
def test_every_decision_is_within_bounds_and_stands(
    loads: list[GroupLoad], held: int, now: int, goals: ScalingGoals
) -> None:
    state = ScalingState(steps=-1.0)
    decision = decide(loads, held, now, goals, state, 5.0)
    assert goals.low <= decision.groups <= goals.high and decision.why
    if loads:
        assert decision.groups <= max(MOST_GROWTH * len(loads), goals.low)
        again = decide(loads, held, decision.groups, goals, state, 6.0)
        assert again.groups == decision.groups, "what was asked for is not asked for twice"
        unasked = decide(loads, held, len(loads), goals, state, 5.0).groups
        assert min(unasked, now) <= decision.groups <= max(unasked, now, goals.low), "a number that came from nowhere"
    if held:
        assert decision.groups >= 1


@given(ttft_s=st.floats(0.001, 200), late=st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_shares_of_late_tokens_fall_with_the_goal(ttft_s: float, late: list[float]) -> None:
    falling = sorted(late, reverse=True)
    share = late_share(falling, ttft_s)
    assert 0.0 <= share <= 1.0 and share >= late_share(falling, 2 * ttft_s) - 1e-9


def test_a_share_at_a_bound_is_the_reported_one() -> None:
    late = [0.9, 0.8, 0.6, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]
    assert [late_share(late, bound) for bound in LATE_BOUNDS_S] == late
    assert late_share(late, 1.75) == pytest.approx(0.4) and late_share(late, 500.0) == 0.0
    assert load_of({"running": 2.0, "late_2.5": 1.0, "late_1": 1.0, "unknown": 3.0}, 2.5).late_share == 1.0


# ---- Serve's policy class ----


def context(
    figures: list[dict[str, float]],
    *,
    now: int,
    at_s: float = 100.0,
    state: dict[str, Any] | None = None,
    queued: float = 0.0,
) -> Any:
    """What Serve gives: raw_metrics by name and replica, each a series of points."""
    raw: dict[str, dict[str, list[Any]]] = {}
    for number, each in enumerate(figures):
        for name, value in each.items():
            raw.setdefault(name, {})[f"r{number}"] = [SimpleNamespace(timestamp=at_s - 1, value=value)]
    return SimpleNamespace(
        deployment_name="tandem-coordinator", running_replicas=[f"r{i}" for i in range(len(figures))], raw_metrics=raw,
        target_num_replicas=now, total_queued_requests=queued, policy_state=state or {}, current_time=at_s,
        capacity_adjusted_min_replicas=0, capacity_adjusted_max_replicas=4,
    )  # fmt: skip


BUSY = {"waiting": 5.0, "queued_tokens": 9000.0, "running": 8.0, "rows": 8.0, "prefill_rate": 1000.0, "steps": 900.0}


def test_the_policy_reads_figures_and_keeps_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    policy = GroupScaling(ttft_s=3)
    with caplog.at_level(logging.INFO, "ray.serve.tandem"):
        groups, state = policy(context([BUSY], now=1))
    assert groups == 2 and state["why"] == "queue 9k tokens = 9.0 s > 3 s" and state["groups"] == 2
    assert "tandem-coordinator should have 2 groups: queue 9k tokens" in caplog.text
    quick = context([{**BUSY, "queued_tokens": 0.0}], now=1, at_s=100.5, state=state)
    assert policy(quick) == (2, state), "decided once a second"
    groups, state = policy(context([{"steps": 950.0}], now=2, at_s=101.1, state=state))
    assert groups == 1, "still busy: the steps are other ones"
    _, state = policy(context([{"steps": 950.0}], now=2, at_s=102.2, state=state))
    groups, state = policy(context([{"steps": 950.0}], now=2, at_s=132.2, state=state))
    assert groups == 0 and state["why"] == "idle 30 s"


def test_groups_that_tell_nothing_are_kept() -> None:
    policy = GroupScaling()
    given = context([{"steps": 900.0}, {}], now=2)
    groups, state = policy(given)
    assert groups == 2 and state["why"].endswith("; 1 of 2 groups tell nothing"), "as after a controller's restart"
    stale = context([{"steps": 900.0}], now=1, at_s=100.0)
    stale.current_time = 100.0 + STALE_S
    groups, state = GroupScaling()(stale)
    assert groups == 1 and state["why"].endswith("1 of 1 groups tell nothing")


def test_the_policy_travels_by_value_and_refuses_other_goals() -> None:
    cloudpickle.register_pickle_by_value(scaling_policy)
    try:
        sent = cloudpickle.dumps(GroupScaling)
    finally:
        cloudpickle.unregister_pickle_by_value(scaling_policy)
    assert b"_bounded" in sent, "its code travels, and names what it imports"
    assert cloudpickle.loads(sent)(ttft_s=3)(context([BUSY], now=1))[0] == 2
    for goals, words in (({"tpot_s": 1}, "tpot_s is not a goal"), ({"ttft_s": 0}, "must be a number above 0")):
        with pytest.raises(SettingsError, match=words):
            GroupScaling(**goals)


# ---- a gateway's look ----


def record(group: str, state: str = "serving", **figures: float) -> GroupRecord:
    values = [{**dict.fromkeys(FIGURES, 0.0), "rows": 8.0, "age_s": 1e3, **figures}[name] for name in FIGURES]
    return GroupRecord(group=group, life=1, model="m", state=state, host="h", pid=1, figures=values)  # type: ignore[arg-type]


def test_a_gateway_shows_what_it_is_decided_by() -> None:
    clock, held = [0.0], [0]
    watch = ScalingWatch(ScalingGoals(low=0, high=4), lambda: held[0], lambda: clock[0])
    records = [record("a", **BUSY), record("b", "loading"), record("c", "draining", **BUSY)]
    report = watch.due(records)
    assert report is not None and report.groups == 2 and report.why.endswith("; 1 group on the way")
    assert watch.due(records) is None, "it is written already"
    clock[0] = WRITE_S
    assert watch.due(records) is not None
    assert watch.look([]).groups == 0
    held[0] = 2
    woken = watch.look([])
    assert (woken.groups, woken.held) == (1, 2), "at once"


def test_a_gateway_follows_the_goals_that_are_in_force(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScalingWatch(ScalingGoals(low=1, high=1), lambda: 0, lambda: 0.0)
    assert watch.look([record("a", **BUSY)]).why.endswith("; 1 is the most")
    policy = {"policy_function": GROUP_SCALING, "policy_kwargs": {"ttft_s": 9.5}}
    watch.use({"min_replicas": 1, "max_replicas": 4, "policy": policy})
    assert watch.look([record("a", **BUSY), record("b")]).groups == 2, "within the new goal"
    with caplog.at_level(logging.WARNING, "tandem.gateway"):
        for _ in range(2):
            watch.use({"min_replicas": 1, "max_replicas": 4, "policy": {"policy_function": "mine:choose"}})
    report = watch.look([record("a", **BUSY)])
    assert (report.groups, report.why) == (1, OTHER_POLICY) and caplog.messages == [OTHER_POLICY]
    watch.use({"min_replicas": 3, "max_replicas": 4, "policy": policy})
    assert watch.look([record("a"), record("b")]).groups == 3
