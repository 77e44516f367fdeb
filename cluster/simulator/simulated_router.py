"""SimulatedRouter: one gateway's choice of groups: the product's policy, Outstanding, Residency and Homes, and reports
of groups that are seconds old, as Serve passes them on."""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tandem.cluster.routing.group_loads import UNMEASURED_COPY_SHARE, GroupLoads, TokensG
from tandem.cluster.routing.outstanding import Outstanding, elsewhere
from tandem.cluster.routing.policies.policy_names import policy_by_name
from tandem.cluster.routing.policies.routing_policy import choose
from tandem.cluster.routing.residency import Homes, Residency, Tier
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.simulator.virtual_clock import VirtualClock

REPORT_S: Final = 2.0
"""Between two reports of a group (cluster/app.py)."""


class GroupTells(NamedTuple):
    """Report of one group (record_routing_stats of its coordinator). owed, left: tokens by gateway, as they were
    charged and as they are still to come. on_device, on_host: keys of adapters. copy_share: None before it is
    measured."""

    owed: Mapping[str, int]
    left: Mapping[str, int]
    on_device: Sequence[str]
    on_host: Sequence[str]
    copy_share: float | None


class SimulatedRouter:
    """The router of gateway `name`. policy: its name. draw: all chance."""

    def __init__(self, name: str, policy: str, clock: VirtualClock, draw: random.Random) -> None:
        self._name, self._clock = name, clock
        self._policy, self._pick = policy_by_name(policy, draw), draw.choice
        self._outstanding = Outstanding()
        self._residency = Residency()
        self._homes = Homes()
        self._groups: list[str] = []
        self._index: dict[str, int] = {}
        self._elsewhere: TokensG = np.zeros(0, np.int64)
        self._elsewhere_total = 0
        self._copy_share: list[float] = []

    def set_groups(self, groups: Sequence[str]) -> None:
        """Takes the groups that there are from now on, in their order."""
        known = dict(zip(self._groups, self._elsewhere.tolist(), strict=True))
        self._groups = list(groups)
        self._index = {group: place for place, group in enumerate(groups)}
        self._elsewhere = np.array([known.get(group, 0) for group in groups], np.int64)
        self._elsewhere_total = int(self._elsewhere.sum())
        self._copy_share = [UNMEASURED_COPY_SHARE] * len(groups)
        self._homes.set_groups(groups)
        self._outstanding.set_groups(groups)
        self._outstanding.keep_only(groups)
        self._residency.keep_only(groups)

    def take(self, reports: Mapping[str, GroupTells]) -> None:
        """Takes the reports of all groups."""
        others = [elsewhere(reports[group].left, self._name) if group in reports else 0 for group in self._groups]
        self._elsewhere, self._elsewhere_total = np.array(others, np.int64), sum(others)
        for group, told in reports.items():
            if group in self._index:
                self._residency.report(group, told.on_device, told.on_host)
                if told.copy_share is not None:
                    self._copy_share[self._index[group]] = told.copy_share
        here = {group: told.owed.get(self._name, 0) for group, told in reports.items()}
        self._outstanding.reconcile(here, self._clock.now_s)

    def choose(self, call_id: str, hint: RouteHint) -> str:
        """Returns the group for a call, and counts it there."""
        now_s = self._clock.now_s
        group = self._groups[choose(self._policy, self._loads(hint), hint, self._pick)[0]]
        self._policy.sent(group)
        self._outstanding.begin(
            call_id,
            group,
            hint.tenant,
            hint.cost_at(group),
            now_s,
            reported=hint.cost_tokens,
            request_id=hint.request_id,
        )
        if hint.adapter is not None:
            self._residency.sent(group, hint.adapter, now_s)
        return group

    def correct(self, request_id: str, tokens: int) -> None:
        """Notes what is still to come of a request."""
        self._outstanding.correct(request_id, tokens)

    def ended(self, call_id: str, group: str) -> None:
        """Counts the end of a call."""
        self._outstanding.end(call_id, group)

    def _loads(self, hint: RouteHint) -> GroupLoads:
        others = self._elsewhere_total
        return GroupLoads(
            groups=self._groups,
            outstanding=self._outstanding.here_by_group() + self._elsewhere,
            own=self._outstanding.of_tenant(hint.tenant),
            last=frozenset(self._index[group] for group in hint.avoid if group in self._index),
            tiers={} if hint.adapter is None else self._tiers(hint.adapter),
            copy_share=self._copy_share,
            late_share=others / max(1, self._outstanding.total + others),
            tenants=self._outstanding.tenants_with(hint.tenant),
            home=self._index[self._homes.home(hint.session)] if hint.session else None,
            index=self._index,
        )

    def _tiers(self, key: str) -> dict[Tier, Collection[int]]:
        holders = self._residency.holders(key, self._clock.now_s)
        tiers: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: [], Tier.HOME: []}
        for group, tier in holders.items():
            if group in self._index:
                tiers[tier].append(self._index[group])
        if (home := self._homes.home(key)) not in holders:
            tiers[Tier.HOME].append(self._index[home])
        return dict(tiers)
