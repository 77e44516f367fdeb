"""Checks `autoscaling_config`: Ray Serve's keys, and the goals of the policy that is ours.

The bounds, factors and delays are Serve's. Which policy chooses the number of groups: the one that is named; else
Serve's own where `target_ongoing_requests` is; else ours (cluster/scaling/scaling_policy.py), with its defaults.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.configs.errors import SettingsError

KEY = "autoscaling_config"
GROUP_SCALING = "tandem.cluster.scaling.scaling_policy:GroupScaling"
"""The policy of ours, as Serve names it."""
NUMBERS = (
    "min_replicas",
    "max_replicas",
    "initial_replicas",
    "target_ongoing_requests",
    "look_back_period_s",
    "upscale_delay_s",
    "downscale_delay_s",
    "downscale_to_zero_delay_s",
    "metrics_interval_s",
    "upscaling_factor",
    "downscaling_factor",
)
AUTOSCALING_KEYS = (*NUMBERS, "aggregation_function", "policy")
AGGREGATIONS = ("mean", "max", "min")
POLICY_KEYS = ("policy_function", "policy_kwargs")


class ScalingGoals(msgspec.Struct, frozen=True, kw_only=True):
    """Goals for which the number of groups is chosen. ttft_s: seconds in which nine of ten first tokens should come.
    kv_high: share of KV in use beyond which there should be more groups. low, high: the fewest and the most groups."""

    ttft_s: float = 2.0
    kv_high: float = 0.85
    low: int = 1
    high: int = 1


def checked_autoscaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checked `autoscaling_config` of known keys as Serve takes it: with its policy. SettingsError."""
    for key in NUMBERS:
        value = config.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise SettingsError(f"{key}: {value!r} must be a number of at least 0", KEY)
    aggregation = config.get("aggregation_function", "mean")
    if aggregation not in AGGREGATIONS:
        raise SettingsError(f"aggregation_function: {aggregation!r} is not one of {', '.join(AGGREGATIONS)}", KEY)
    _check_range(config)
    policy = _policy(config)
    return dict(config) if policy is None else {**config, "policy": policy}


def check_policy(config: Mapping[str, Any] | None) -> None:
    """Checks that the policy of a checked config can be imported on this machine, from where Serve takes it along.
    SettingsError. Another error in a module of the user's is the user's, and is raised as it is."""
    name: str = (config or {}).get("policy", {}).get("policy_function", GROUP_SCALING)
    if name == GROUP_SCALING:
        return
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: no module at all
        message = f"policy_function: {name} cannot be imported ({error}); a module of yours belongs on PYTHONPATH"
        raise SettingsError(message, KEY) from error
    if not callable(found):
        raise SettingsError(f"policy_function: {module} has no function or class {attribute}", KEY)


def goals_of(config: Mapping[str, Any] | None) -> ScalingGoals | None:
    """The goals in a checked config whose policy is ours; None for another policy, and without autoscaling."""
    policy = (config or {}).get("policy", {})
    if config is None or policy.get("policy_function") != GROUP_SCALING:
        return None
    low, high = (int(config.get(key, 1)) for key in ("min_replicas", "max_replicas"))
    return msgspec.structs.replace(checked_goals(policy.get("policy_kwargs", {})), low=low, high=high)


def checked_goals(kwargs: Mapping[str, Any]) -> ScalingGoals:
    """Reads the policy_kwargs of the policy that is ours. SettingsError names the one at fault."""
    for key, value in kwargs.items():
        if key not in ("ttft_s", "kv_high"):
            raise SettingsError(f"policy_kwargs: {key} is not a goal; known are ttft_s, kv_high", KEY)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise SettingsError(f"{key}: {value!r} must be a number above 0", KEY)
    goals = ScalingGoals(**kwargs)
    if goals.kv_high > 1:
        raise SettingsError(f"kv_high: {goals.kv_high!r} is a share, at most 1", KEY)
    return goals


def _check_range(config: Mapping[str, Any]) -> None:
    low, high = config.get("min_replicas", 1), config.get("max_replicas", 1)
    first = config.get("initial_replicas", low)
    if not (isinstance(low, int) and isinstance(high, int) and high >= 1 and low <= high):
        raise SettingsError(f"min_replicas {low} and max_replicas {high} are no range", KEY)
    if not (isinstance(first, int) and low <= first <= high):
        message = f"initial_replicas {first} is not between min_replicas {low} and max_replicas {high}"
        raise SettingsError(message, KEY)
    if low > 0 and "downscale_to_zero_delay_s" in config:
        raise SettingsError("downscale_to_zero_delay_s: needs min_replicas: 0", KEY)


def _policy(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The policy to give to Serve; None: its own."""
    if "policy" not in config:
        return None if "target_ongoing_requests" in config else {"policy_function": GROUP_SCALING}
    policy = config["policy"]
    if not isinstance(policy, Mapping) or not isinstance(policy.get("policy_function"), str):
        raise SettingsError(
            "policy: must be a mapping with policy_function, such as {policy_function: MODULE:NAME}", KEY
        )
    if unknown := policy.keys() - {*POLICY_KEYS}:
        raise SettingsError(f"policy: {min(unknown)} is not a setting; known are {', '.join(POLICY_KEYS)}", KEY)
    kwargs = policy.get("policy_kwargs", {})
    if not isinstance(kwargs, Mapping):
        raise SettingsError(f"policy_kwargs: {kwargs!r} must be a mapping", KEY)
    if policy["policy_function"] == GROUP_SCALING:
        checked_goals(kwargs)
        if "target_ongoing_requests" in config:
            raise SettingsError("target_ongoing_requests: is for Serve's own policy, and another is named", KEY)
    return dict(policy)
