"""Names of the routing policies, as in --routing-policy."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tandem.cluster.routing.policies.adapter_affinity import AdapterAffinity
from tandem.cluster.routing.policies.joint import Joint
from tandem.cluster.routing.policies.least_tokens import LeastTokens
from tandem.cluster.routing.policies.prefix_affinity import PrefixAffinity
from tandem.cluster.routing.policies.round_robin import RoundRobin
from tandem.cluster.routing.policies.routing_policy import RoutingPolicy
from tandem.cluster.routing.policies.session_affinity import SessionAffinity
from tandem.cluster.routing.policies.two_choices import TwoChoices

POLICIES: Final[Mapping[str, Callable[[random.Random], RoutingPolicy]]] = MappingProxyType(
    {
        "joint": lambda rng: Joint(),
        "least-tokens": lambda rng: LeastTokens(),
        "adapter": lambda rng: AdapterAffinity(),
        "prefix": lambda rng: PrefixAffinity(),
        "session": lambda rng: SessionAffinity(),
        "p2c": TwoChoices,
        "round-robin": lambda rng: RoundRobin(),
    }
)
DEFAULT_POLICY: Final = "joint"


def policy_by_name(name: str, rng: random.Random | None = None) -> RoutingPolicy:
    """Makes the policy of that name. rng: chance of those that draw; None: another one each time. ValueError names the
    policies that there are."""
    if name not in POLICIES:
        raise ValueError(f"{name!r} is not a routing policy; there are {', '.join(POLICIES)}")
    return POLICIES[name](rng if rng is not None else random.Random())
