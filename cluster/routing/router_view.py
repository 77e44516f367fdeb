"""RouterView: what Serve's router of this process sees of the groups, for the gateway beside it.

Serve sends the router's module (serve_router.py) to gateways by value: the class that runs there, its attributes and
its globals are copies of a build's, apart from what the gateway imports. Only what that module imports from elsewhere
is this process's own, so both meet here.
"""

from tandem.cluster.routing.unreached_groups import UnreachedGroups


class RouterView:
    """running: the groups that Serve lists for this process, None before it has listed any; those that it takes down
    are no longer among them. unreached: groups that calls of this process do not reach. sent_to: by the id of each
    request that the gateway waits for, the group to which Serve has sent it, None before; who waits adds and removes
    it."""

    def __init__(self) -> None:
        self.running: frozenset[str] | None = None
        self.unreached = UnreachedGroups()
        self.sent_to: dict[str, str | None] = {}


_VIEW = RouterView()


def router_view() -> RouterView:
    """Returns the one of this process."""
    return _VIEW
