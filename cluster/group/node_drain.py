"""Waits for the drain of a node that has ranks of a group but not its coordinator.

A node is drained before it goes: a notice of the cloud for a spot machine, `ray drain-node`, an autoscaler. Serve moves
replicas from it, and knows of a group only its coordinator's node. A rank that ended with its node would be a loss; so
the coordinator ends the group before, as planned, and Serve places it anew, which Ray does not do on such a node.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from tandem.cluster.ray_private.ray_facts import draining_nodes

log = logging.getLogger("tandem.group")
PERIOD_S = 5.0


async def next_drained(
    nodes: Collection[str], draining: Callable[[], Collection[str]] = draining_nodes, period_s: float = PERIOD_S
) -> str:
    """Returns the id of the first of `nodes` that is to be drained. draining: of all nodes; blocks."""
    while True:
        try:
            found = sorted({*nodes} & {*await asyncio.to_thread(draining)})
        except Exception as error:  # Ray's head is away: nothing is known to be drained
            log.debug("nodes that are drained are not known: %s", error)
        else:
            if found:
                return found[0]
        await asyncio.sleep(period_s)
