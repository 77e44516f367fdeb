"""Ray Serve's request router for groups: our policy in Serve's hooks. One instance per gateway process.

Serve calls choose_replicas for every request and tries the ranks of its answer in order. An exception in there would
leave the caller hanging for ever, so each hook is guarded and falls back to "no preference". All that it needs of a
request is in its RouteHint: the prompt is not looked at. One choice is O(groups) additions and comparisons of numbers;
what the groups report is read when Serve has a new list of them. Next: cluster/group/coordinator.py.
"""

import asyncio
import logging
import random
import time
from collections import deque
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tandem.cluster.routing.group_loads import GroupLoads
from tandem.cluster.routing.outstanding import Outstanding
from tandem.cluster.routing.policies.policy_names import DEFAULT_POLICY, policy_by_name
from tandem.cluster.routing.policies.routing_policy import Pick, choose
from tandem.cluster.routing.residency import Homes, Residency, Tier
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteTable, route_table
from tandem.cluster.routing.router.router_reports import RouterReports
from tandem.cluster.routing.router_view import router_view

log = logging.getLogger("ray.serve.tandem")
RECONCILE_S = 2.0
"""Pause between two comparisons of the counts with reports that have not changed."""


class GroupRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to a group that the policy finds cheap. What it sees of groups is in the RouterView of its
    process: attributes of this class are not those that a gateway would import."""

    def initialize_state(self, policy: str = DEFAULT_POLICY, **unknown: Any) -> None:
        """Takes `request_router_kwargs`. policy: its name. ValueError for a name or a key that there is not."""
        if unknown:
            raise ValueError(f"request_router_kwargs has {', '.join(sorted(unknown))}; it takes `policy` only")
        self._policy_name, self._policy = policy, policy_by_name(policy)
        self._pick: Pick = random.choice
        self._outstanding = Outstanding()
        self._residency = Residency()
        self._homes = Homes()
        self._reports = RouterReports()
        self._reconcile_at_s = 0.0
        self._followed: set[str] = set()
        self._corrections: deque[tuple[str, int]] = deque()
        router_view().correct = lambda request_id, tokens: self._corrections.append((request_id, tokens))
        router_view().explain = self.explain

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise a full fleet is a hot loop
        try:
            request: RouteHint = pending_request.kwargs["hint"]
            if pause_s := router_view().unreached.pause_s(
                replica.replica_id.unique_id for replica in candidate_replicas
            ):
                await asyncio.sleep(pause_s)  # Serve tries again at once, for ever, and takes a core for it
            now_s = time.monotonic()
            self._read_reports(candidate_replicas, request.gateway, now_s)
            self._correct()
            loads = self._loads(request, now_s)
            costs = self._policy.costs(loads, request)
            if (note := router_view().notes.get(request.request_id)) is not None:
                note.table = route_table(self._policy_name, costs, loads, request)
            few = choose(self._policy, loads, request, self._pick, costs)
            self._begin(pending_request, self._reports.groups[few[0]], request)
            self._follow(pending_request, request.request_id)
            ranks = [[candidate_replicas[i]] for i in few]
            return ranks if len(few) == len(candidate_replicas) else [*ranks, candidate_replicas]
        except Exception:
            log.exception("routing failed; any group may take this request")
            return [candidate_replicas]

    def explain(self, request: RouteHint) -> RouteTable | None:
        """Returns what the groups would cost that request now, which goes nowhere; None if there is no group."""
        if not self._replicas_list:
            return None
        now_s = time.monotonic()
        self._read_reports(self._replicas_list, request.gateway, now_s)
        loads = self._loads(request, now_s)
        return route_table(self._policy_name, self._policy.costs(loads, request), loads, request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve calls this late: for one whole answer only once it is there. So the choice itself counts already, and
        this corrects it when the first rank did not take the request."""
        try:
            router_view().unreached.reached(replica_id.unique_id)
            counted = self._outstanding.group_of(pending_request.metadata.internal_request_id)
            if counted not in (None, replica_id.unique_id):
                self._begin(pending_request, replica_id.unique_id, pending_request.kwargs["hint"])
        except Exception:
            log.exception("a routed request was not counted")

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve calls this when a call did not arrive, before it tries again."""
        super().on_replica_actor_unavailable(replica_id)
        if router_view().unreached.failed(replica_id.unique_id):
            log.warning("a call did not reach group %s; it is tried again", replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._outstanding.end(internal_request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this with every change of the groups or of their reports, and then uses another list of them."""
        super().update_replicas(replicas)
        alive = frozenset(replica.replica_id.unique_id for replica in replicas)
        router_view().running = alive
        self._correct()
        self._outstanding.keep_only(alive)
        self._residency.keep_only(alive)
        router_view().unreached.keep_only(alive)
        try:
            if self._reports.replicas:  # not in the next choice: with hundreds of groups it takes longer than that
                self._read_reports(self._replicas_list, self._reports.gateway, time.monotonic())
        except Exception:
            log.exception("the reports of the groups cannot be read")

    def _follow(self, pending_request: PendingRequest, request_id: str) -> None:
        """Notes the group that Serve chooses for this try, as it sends the request there: until an answer comes it says
        nothing more, and from a machine that is gone none comes for minutes."""
        call_id = pending_request.metadata.internal_request_id
        if call_id in self._followed:
            return

        def chosen(choice: asyncio.Future[RunningReplica]) -> None:
            self._followed.discard(call_id)
            sent_to = router_view().sent_to
            if request_id in sent_to and not choice.cancelled():
                sent_to[request_id] = group = choice.result().replica_id.unique_id
                if (note := router_view().notes.get(request_id)) is not None:
                    note.group = group

        self._followed.add(call_id)
        pending_request.future.add_done_callback(chosen)

    def _begin(self, pending_request: PendingRequest, group: str, request: RouteHint) -> None:
        call_id = pending_request.metadata.internal_request_id
        now_s = time.monotonic()
        self._policy.sent(group)
        cost, all_of_it = request.cost_at(group), request.cost_tokens
        self._outstanding.begin(
            call_id, group, request.tenant, cost, now_s, reported=all_of_it, request_id=request.request_id
        )
        router_view().prefixes.sent(request.request_id, group, now_s)
        if request.adapter is not None:
            self._residency.sent(group, request.adapter, now_s)

    def _correct(self) -> None:
        """Takes what the gateway has said of requests that go on: it may be on another thread than Serve's router."""
        while self._corrections:
            self._outstanding.correct(*self._corrections.popleft())

    def _loads(self, request: RouteHint, now_s: float) -> GroupLoads:
        reports = self._reports
        last = reports.stalling
        if request.avoid:
            last = last | {reports.index[group] for group in request.avoid if group in reports.index}
        others = reports.elsewhere_total
        return GroupLoads(
            groups=reports.groups,
            outstanding=self._outstanding.here_by_group() + reports.elsewhere,
            own=self._outstanding.of_tenant(request.tenant),
            last=last,
            tiers={} if request.adapter is None else self._tiers(request.adapter, now_s),
            copy_share=reports.copy_share,
            late_share=others / max(1, self._outstanding.total + others),
            tenants=self._outstanding.tenants_with(request.tenant),
            home=reports.index[self._homes.home(request.session)] if request.session else None,
            index=reports.index,
        )

    def _tiers(self, key: str, now_s: float) -> dict[Tier, list[int]]:
        tiers: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: [], Tier.HOME: []}
        index, holders = self._reports.index, self._residency.holders(key, now_s)
        for group, tier in holders.items():
            if group in index:
                tiers[tier].append(index[group])
        if (home := self._homes.home(key)) not in holders:
            tiers[Tier.HOME].append(index[home])
        return tiers

    def _read_reports(self, replicas: list[RunningReplica], gateway: str, now_s: float) -> None:
        """Reads the reports when they may have changed, and compares the counts with them from time to time."""
        reports = self._reports
        is_new = replicas is not reports.replicas or gateway != reports.gateway
        if is_new:
            reports = self._reports = RouterReports(replicas, gateway)
            self._homes.set_groups(reports.groups)
            self._outstanding.set_groups(reports.groups)
            for group, stats in zip(reports.groups, reports.stats, strict=True):
                self._residency.report(group, stats.get("on_device", ()), stats.get("on_host", ()))
        if is_new or now_s >= self._reconcile_at_s:
            self._reconcile_at_s = now_s + RECONCILE_S
            self._outstanding.reconcile(reports.here, now_s)
