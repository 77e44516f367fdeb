"""Setup: everything that a simulation depends on."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tandem.cluster.simulator.loads import SimulatedRequest
from tandem.cluster.simulator.outcomes import Goals
from tandem.cluster.simulator.simulated_group import GroupKind
from tandem.cluster.simulator.steps.fitted_times import FittedTimes
from tandem.configs.autoscaling import KEY, ScalingGoals, goals_of
from tandem.configs.errors import SettingsError

UNSIMULATED: Final = ("upscaling_factor", "downscaling_factor")
"""Keys of autoscaling_config that would change the number of groups, and have no part here."""

DELAYS: Final = {"up_s": "upscale_delay_s", "down_s": "downscale_delay_s", "zero_s": "downscale_to_zero_delay_s"}


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """An autoscaling_config whose policy is ours. first: groups at the start. up_s, down_s: how long decide() must want
    more, or fewer, before that is done; zero_s: none at all. Ray Serve's defaults."""

    goals: ScalingGoals
    first: int = 1
    up_s: float = 30.0
    down_s: float = 600.0
    zero_s: float | None = None  # as down_s


def scaling_of(config: Mapping[str, Any]) -> Scaling:
    """Reads a checked autoscaling_config. SettingsError where another policy decides, and for keys that are not
    simulated."""
    goals = goals_of(config)
    if goals is None:
        raise SettingsError("policy: only the policy of this service is simulated (no target_ongoing_requests)", KEY)
    for key in UNSIMULATED:
        if key in config:
            raise SettingsError(f"{key}: {config[key]!r} is not simulated", KEY)
    given = {name: float(config[key]) for name, key in DELAYS.items() if key in config}
    return Scaling(goals=goals, first=int(config.get("initial_replicas") or goals.low), **given)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on. groups: at the start. scaling: None: there are always as many. deaths:
    groups that are lost at moments that the seed draws; another one then loads for load_s seconds. groups_per_node: how
    many share cores and memory. policy: of the routers."""

    kind: GroupKind
    times: FittedTimes
    load: Sequence[SimulatedRequest]
    groups: int
    policy: str
    seed: int = 0
    gateways: int = 1
    groups_per_node: int = 1
    load_s: float = 30.0
    deaths: int = 0
    scaling: Scaling | None = None
    goals: Goals = Goals()
