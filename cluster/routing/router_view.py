"""RouterView: what Serve's router of this process sees of the groups, for the gateway beside it.

Serve sends the router's module (serve_router.py) to gateways by value: the class that runs there, its attributes and
its globals are copies of a build's, apart from what the gateway imports. Only what that module imports from elsewhere
is this process's own, so both meet here.
"""

from collections.abc import Callable

from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteNote, RouteTable
from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.cluster.routing.unreached_groups import UnreachedGroups


class RouterView:
    """running: the groups that Serve lists for this process, None before it has listed any; those that it takes down
    are no longer among them. unreached: groups that calls of this process do not reach. sent_to: by the id of each
    request that the gateway waits for, the group to which Serve has sent it, None before; who waits adds and removes
    it. notes: of requests that ask why they go where they go, added and removed likewise. correct: takes a request's id
    and its tokens that are still to come, on any thread. explain: the costs of all groups for a request, which
    goes nowhere; None while there is no router, and its table is None while there is no group. prefixes: what groups
    have told of their KV."""

    def __init__(self) -> None:
        self.running: frozenset[str] | None = None
        self.unreached = UnreachedGroups()
        self.sent_to: dict[str, str | None] = {}
        self.notes: dict[str, RouteNote] = {}
        self.correct: Callable[[str, int], None] = lambda request_id, tokens: None
        self.explain: Callable[[RouteHint], RouteTable | None] | None = None
        self.prefixes = ToldPrefixes()


_VIEW = RouterView()


def router_view() -> RouterView:
    """Returns the one of this process."""
    return _VIEW
