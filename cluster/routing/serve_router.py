"""Ray Serve's request router for groups: our policy in Serve's hooks. One instance per gateway process.

Serve calls choose_replicas for every request and tries the ranks of its answer in order. An exception in there would
leave the caller hanging for ever, so each hook is guarded and falls back to "no preference". All that it needs of a
request is in its RouteHint: the prompt is not looked at.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tandem.cluster.routing.group_view import GroupView
from tandem.cluster.routing.outstanding import Outstanding, elsewhere
from tandem.cluster.routing.policy import AdapterAffinity, best_first
from tandem.cluster.routing.residency import Residency, Tier, home_of
from tandem.cluster.routing.route_hint import RouteHint

log = logging.getLogger("ray.serve.tandem")


class GroupRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the group with the policy's best score. running: the groups that Serve lists for this
    process, None before it has listed any; those that it takes down are no longer among them."""

    running: ClassVar[frozenset[str] | None] = None

    def initialize_state(self, **kwargs: Any) -> None:
        assert not kwargs, f"unknown router arguments {sorted(kwargs)}"
        self._policy = AdapterAffinity()
        self._outstanding = Outstanding()
        self._residency = Residency()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise a full fleet is a hot loop
        try:
            request: RouteHint = pending_request.kwargs["hint"]
            views = [self._view(replica, request) for replica in candidate_replicas]
            if request.adapter is not None:
                views = self._with_home(views, request.adapter)
            order = best_first(self._policy, views, request)
            self._begin(pending_request, views[order[0]].group, request)
            return [[candidate_replicas[i]] for i in order]
        except Exception:
            log.exception("routing failed; any group may take this request")
            return [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve calls this late: for one whole answer only once it is there. So the choice itself counts already, and
        this corrects it when the first rank did not take the request."""
        try:
            if self._outstanding.holds(pending_request.metadata.internal_request_id):
                self._begin(pending_request, replica_id.unique_id, pending_request.kwargs["hint"])
        except Exception:
            log.exception("a routed request was not counted")

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._outstanding.end(internal_request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        alive = frozenset(replica.replica_id.unique_id for replica in replicas)
        GroupRouter.running = alive
        self._outstanding.keep_only(alive)
        self._residency.keep_only(alive)

    def _begin(self, pending_request: PendingRequest, group: str, request: RouteHint) -> None:
        call_id = pending_request.metadata.internal_request_id
        now_s = time.monotonic()
        self._outstanding.begin(call_id, group, request.cost_tokens, now_s)
        if request.adapter is not None:
            self._residency.sent(group, request.adapter, now_s)

    def _view(self, replica: RunningReplica, request: RouteHint) -> GroupView:
        group = replica.replica_id.unique_id
        stats = replica.routing_stats
        if stats:
            self._outstanding.reconcile(group, stats["outstanding_tokens"].get(request.gateway, 0), time.monotonic())
        return GroupView(
            group=group,
            outstanding_here=self._outstanding.here(group),
            outstanding_elsewhere=elsewhere(stats["outstanding_tokens"], request.gateway) if stats else 0,
            kv_used=float(stats["kv_used"]) if stats else 0.0,
            stalled_s=float(stats.get("stalled_s", 0.0)) if stats else 0.0,
            avoid=group in request.avoid,
            adapter=self._tier(group, request.adapter, stats or {}),
        )

    def _tier(self, group: str, key: str | None, stats: Mapping[str, Any]) -> Tier:
        if key is None:
            return Tier.NONE
        return self._residency.tier(group, key, time.monotonic(), stats.get("on_device", ()), stats.get("on_host", ()))

    def _with_home(self, views: list[GroupView], key: str) -> list[GroupView]:
        """The same, knowing which would be the one to load the adapter."""
        home = home_of(key, (view.group for view in views))
        return [
            msgspec.structs.replace(view, adapter=Tier.HOME)
            if view.adapter is Tier.NONE and view.group == home
            else view
            for view in views
        ]
