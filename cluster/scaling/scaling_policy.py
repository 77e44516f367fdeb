"""GroupScaling: Ray Serve's autoscaling policy for groups of ours, over the pure decide() (decide.py).

Serve's controller makes one for each deployment of a version, and calls it ten times a second with what replicas and
handles have reported; groups report once a second (group/coordinator.py, record_autoscaling_stats). Serve bounds its
answer, applies factors and delays, and starts a first group by itself as soon as a request waits for one.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.cluster.scaling.decide import FIGURES, Decision, GroupLoad, ScalingState, decide, load_of
from tandem.configs.autoscaling import ScalingGoals, checked_goals

log = logging.getLogger("ray.serve.tandem")
PERIOD_S = 1.0
"""Between two decisions while nothing has changed: groups report as often."""
STALE_S = 15.0
"""Age of figures beyond which they say nothing of their group."""


class GroupScaling:
    """policy_kwargs: goals, `ttft_s` and `kv_high`; SettingsError for others. Called with Serve's AutoscalingContext;
    returns the groups to have, and a state: `why`, `groups`, and what decide() wants to have back."""

    def __init__(self, **goals: Any) -> None:
        self._goals = checked_goals(goals)
        self._last: tuple[int, int, float] | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        before = dict(context.policy_state or {})
        target, at_s = int(context.target_num_replicas), float(context.current_time)
        running = len(context.running_replicas)
        if "groups" in before and self._last is not None:
            was_running, was_target, was_s = self._last
            if (was_running, was_target) == (running, target) and 0.0 <= at_s - was_s < PERIOD_S:
                return before["groups"], before
        self._last = running, target, at_s
        loads = self._loads(context, at_s)
        held = math.ceil(float(context.total_queued_requests or 0.0))
        made = decide(loads, held, target, self._bounded(context), _state(before), at_s)
        silent = running - len(loads)
        groups = max(made.groups, min(target, running)) if silent else made.groups
        why = f"{made.why}; {silent} of {running} groups tell nothing" if silent else made.why
        if groups != before.get("groups"):
            log.info("%s should have %d groups: %s", context.deployment_name, groups, why)
        return groups, {"groups": groups, "why": why} | _kept(made)

    def _bounded(self, context: Any) -> ScalingGoals:
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return msgspec.structs.replace(self._goals, low=int(low), high=int(high))

    def _loads(self, context: Any, at_s: float) -> list[GroupLoad]:
        """The loads of groups that run and have reported of late. The last figures are taken as they are: groups take
        their means themselves, and a mean of means would be late."""
        reported: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
        loads = []
        for replica in context.running_replicas:
            series = {name: points for name in FIGURES if (points := reported.get(name, {}).get(replica))}
            if series and at_s - max(points[-1].timestamp for points in series.values()) <= STALE_S:
                figures = {name: float(points[-1].value) for name, points in series.items()}
                loads.append(load_of(figures, self._goals.ttft_s))
        return loads


def _state(before: Mapping[str, Any]) -> ScalingState:
    """Reads what the last decision has left."""
    return ScalingState(steps=before.get("steps", 0.0), idle_since_s=before.get("idle_since_s"))


def _kept(made: Decision) -> dict[str, Any]:
    return {"steps": made.state.steps, "idle_since_s": made.state.idle_since_s}
