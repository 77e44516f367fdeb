"""`autoscaling_config`: which policy chooses, its goals, zero, and what is refused."""

import importlib
import re
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from tandem.configs.autoscaling import GROUP_SCALING, ScalingGoals, check_policy, checked_autoscaling, goals_of
from tandem.configs.errors import SettingsError
from tests.support.autoscaling_page import scaled_configs

OURS = {"policy_function": GROUP_SCALING, "policy_kwargs": {"ttft_s": 0.5}}


def test_our_policy_chooses_unless_a_target_or_another_one_is_named() -> None:
    ours = checked_autoscaling({"min_replicas": 0, "max_replicas": 4})
    assert goals_of(ours) == ScalingGoals(low=0, high=4)
    assert goals_of(checked_autoscaling({"max_replicas": 4, "policy": OURS})) == ScalingGoals(ttft_s=0.5, high=4)
    counted = checked_autoscaling({"max_replicas": 4, "target_ongoing_requests": 8})
    assert "policy" not in counted and goals_of(counted) is None and goals_of(None) is None
    users = checked_autoscaling({"policy": {"policy_function": "mine:choose", "policy_kwargs": {"a": "b"}}})
    assert users["policy"]["policy_kwargs"] == {"a": "b"} and goals_of(users) is None
    assert checked_autoscaling(ours) == ours


def test_what_the_page_shows_is_taken() -> None:
    first, second = (goals_of(checked_autoscaling(config["autoscaling_config"])) for config in scaled_configs())
    assert first == ScalingGoals(low=0, high=3) and second == ScalingGoals(ttft_s=1.0, kv_high=0.8, high=4)


def test_serve_takes_what_is_checked_and_finds_our_policy() -> None:
    given = checked_autoscaling(
        {
            "min_replicas": 0,
            "max_replicas": 4,
            "downscale_to_zero_delay_s": 60,
            "aggregation_function": "max",
            "policy": OURS,
        }
    )
    config = AutoscalingConfig(**given)
    module, _, name = GROUP_SCALING.partition(":")
    assert config.policy.get_policy().__name__ == name == getattr(importlib.import_module(module), name).__name__
    assert config.policy.policy_kwargs == {"ttft_s": 0.5} and config.downscale_to_zero_delay_s == 60
    assert not config.policy.is_default_policy_function()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_replicas": "2"}, "max_replicas: '2' must be a number of at least 0"),
        ({"min_replicas": True}, "min_replicas: True must be a number"),
        ({"max_replicas": 0}, "are no range"),
        ({"downscale_to_zero_delay_s": 5}, "downscale_to_zero_delay_s: needs min_replicas: 0"),
        ({"aggregation_function": "median"}, "'median' is not one of mean, max, min"),
        ({"policy": "mine:choose"}, "policy: must be a mapping with policy_function"),
        ({"policy": {"policy_kwargs": {"ttft_s": 1}}}, "policy: must be a mapping with policy_function"),
        ({"policy": {**OURS, "goals": {}}}, "policy: goals is not a setting; known are policy_function"),
        ({"policy": {**OURS, "policy_kwargs": 3}}, "policy_kwargs: 3 must be a mapping"),
        ({"policy": {**OURS, "policy_kwargs": {"ttft": 3}}}, "ttft is not a goal; known are ttft_s, kv_high"),
        ({"policy": {**OURS, "policy_kwargs": {"ttft_s": "2"}}}, "ttft_s: '2' must be a number above 0"),
        ({"policy": {**OURS, "policy_kwargs": {"kv_high": 85}}}, "kv_high: 85 is a share, at most 1"),
        ({"policy": OURS, "target_ongoing_requests": 2}, "target_ongoing_requests: is for Serve's own policy"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)) as refused:
        checked_autoscaling(config)
    assert refused.value.flag == "autoscaling_config"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:choose", "no_such_module:choose cannot be imported (No module named 'no_such_module')"),
        ("choose", "choose cannot be imported"),
        ("math:choose", "math has no function or class choose"),
        ("math.pi", "math has no function or class pi"),
    ],
)
def test_a_policy_that_is_not_there_is_refused_before_anything_starts(name: str, words: str) -> None:
    config = checked_autoscaling({"policy": {"policy_function": name}})
    with pytest.raises(SettingsError, match=re.escape(words)):
        check_policy(config)


def test_policies_that_are_there_pass() -> None:
    for name in ("math:floor", "math.floor", GROUP_SCALING):
        check_policy(checked_autoscaling({"policy": {"policy_function": name}}))
    check_policy(None)
    check_policy(checked_autoscaling({"target_ongoing_requests": 2}))
