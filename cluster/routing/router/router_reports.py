"""RouterReports: what the groups report to the router, in the columns that a choice looks at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.serve.request_router import RunningReplica

from tandem.cluster.routing.group_loads import STALLS_AFTER_S, UNMEASURED_COPY_SHARE, TokensG
from tandem.cluster.routing.outstanding import elsewhere


class RouterReports:
    """The reports of the groups of one list of Serve's: columns that stay as they are until the next list. Raises what
    a report of another form raises."""

    def __init__(self, replicas: Sequence[RunningReplica] = (), gateway: str = "") -> None:
        self.replicas = replicas
        self.gateway = gateway
        self.groups = [replica.replica_id.unique_id for replica in replicas]
        self.stats: list[Mapping[str, Any]] = [replica.routing_stats or {} for replica in replicas]
        self.index = {group: place for place, group in enumerate(self.groups)}
        others = []
        self.here: dict[str, int] = {}  # those that this one has sent, of groups that have reported
        stalling = []  # places of groups that make no progress
        for place, (group, stats) in enumerate(zip(self.groups, self.stats, strict=True)):
            tokens: Mapping[str, int] = stats["outstanding_tokens"] if stats else {}
            others.append(elsewhere(stats.get("left_tokens", tokens), gateway))
            if stats:
                self.here[group] = tokens.get(gateway, 0)
                if stats.get("stalled_s", 0.0) >= STALLS_AFTER_S:
                    stalling.append(place)
        self.stalling = frozenset(stalling)
        self.elsewhere: TokensG = np.array(others, np.int64)  # those that other gateways have sent
        self.elsewhere_total = sum(others)
        self.copy_share = [stats.get("copy_share", UNMEASURED_COPY_SHARE) for stats in self.stats]
