"""SimulatedGateway: sends each request to the group that its router chooses, and after a refusal or a loss on to
another, as the product's Failover decides.

    arrive --> choose --> group ... deltas ... ended --> over
                 ^------ Failover, RequestPart ----'
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec

from tandem.cluster.gateway.generation.failover import Failover
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.routing.output_forecast import STEP_TOKENS
from tandem.cluster.routing.route_charges import RouteCharges
from tandem.cluster.routing.route_hint import hint_of, session_key
from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.cluster.simulator.loads import SimulatedRequest, tokens
from tandem.cluster.simulator.outcomes import LiveTimes, Outcomes
from tandem.cluster.simulator.simulated_group import SimulatedGroup
from tandem.cluster.simulator.simulated_links import link_of
from tandem.cluster.simulator.simulated_ranks import answer_token
from tandem.cluster.simulator.simulated_router import SimulatedRouter
from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.refusals import lost
from tandem.workers.messages.request import (
    AdapterRef,
    Ended,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
)

DISPATCH_S: Final = 0.002
"""Time from a gateway's choice to the group: one call of Ray Serve's."""
REDISPATCH_S: Final = 0.05
"""Pause before a moved request is sent again (generation.py)."""
HOLD_S: Final = 120.0
"""Longest wait of a request while there is no group."""
NO_GROUP: Final = "service_unavailable"


class LiveGroups(Protocol):
    """The groups that serve, by name."""

    def get(self, name: str) -> SimulatedGroup | None:
        """Returns a group that takes requests; None if it is gone."""
        ...

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        """Returns whether one serves that is not among those."""
        ...


class LiveRequest:
    """One request on its way. part, failover: None until something has gone wrong with it."""

    __slots__ = ("call_id", "failover", "gateway", "group", "is_begun", "load", "part", "request", "times")

    def __init__(
        self, load: SimulatedRequest, request: GenerationRequest, gateway: "SimulatedGateway", now_s: float
    ) -> None:
        self.load, self.request, self.gateway = load, request, gateway
        self.times = LiveTimes(now_s)
        self.group = self.call_id = ""
        self.is_begun = False  # a group has computed some of its prompt
        self.part: RequestPart | None = None
        self.failover: Failover | None = None


class SimulatedGateway:
    """Gateway `name`. live: the requests of all gateways, by id, as groups name them. on_over: told of each end."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        groups: LiveGroups,
        router: SimulatedRouter,
        outcomes: Outcomes,
        live: dict[str, LiveRequest],
        on_over: Callable[[], None],
    ) -> None:
        self.name, self.router = name, router
        self._clock, self._groups, self._outcomes, self._live = clock, groups, outcomes, live
        self._on_over = on_over
        self._reply_to = link_of(name)
        self._charges = RouteCharges(router.correct)
        self.prefixes = ToldPrefixes()
        self.prefixes.on_error = outcomes.predicted
        self._held: deque[tuple[float, LiveRequest]] = deque()

    @property
    def num_held(self) -> int:
        """Requests that wait while there is no group."""
        return len(self._held)

    def arrive(self, load: SimulatedRequest) -> None:
        """Takes a request from its client."""
        name = load.adapter
        request = GenerationRequest(
            request_id=f"request-{load.seed}",
            prompt_token_ids=tokens(load.pieces),
            sampling=SamplingParams(max_tokens=load.max_tokens, seed=load.seed),
            adapter=AdapterRef(name=name, digest=name, source=name) if name is not None else None,
            tenant=load.tenant,
            reply_to=self._reply_to,
        )
        live = self._live[request.request_id] = LiveRequest(load, request, self, self._clock.now_s)
        self._dispatch(live)

    def groups_changed(self) -> None:
        """Forgets groups that are gone. Sends what was held, once there is a group again; refuses what has waited for
        too long."""
        self.prefixes.keep_only(lambda name: self._groups.get(name) is not None)
        while self._held and self._groups.has_group():
            self._dispatch(self._held.popleft()[1])
        while self._held and self._held[0][0] + HOLD_S <= self._clock.now_s:
            self._over(self._held.popleft()[1], NO_GROUP)

    # ---- one attempt ----

    def _dispatch(self, live: LiveRequest) -> None:
        if not self._groups.has_group():
            self._held.append((self._clock.now_s, live))
            self._clock.after(HOLD_S, self.groups_changed)
            return
        avoid = () if live.failover is None else live.failover.avoid
        session = session_key(live.request.tenant, live.load.session)
        cost = self._charges.begin(live.request)
        prefix = self.prefixes.overlaps(live.request)
        self.prefixes.note(live.request.request_id, prefix)
        hint = msgspec.structs.replace(hint_of(live.request, avoid, session, prefix.overlaps), cost_tokens=cost)
        if live.part is not None:
            live.part.begin_attempt()
        live.call_id = f"{live.request.request_id}:{live.request.attempt}:{len(avoid)}"
        live.group = self.router.choose(live.call_id, hint)
        self.prefixes.sent(live.request.request_id, live.group, self._clock.now_s)
        self._clock.after(DISPATCH_S, lambda: self._arrive_at_group(live, hint.cost_tokens))

    def _arrive_at_group(self, live: LiveRequest, cost_tokens: int) -> None:
        group = self._groups.get(live.group)
        if group is None:  # its call does not arrive: Serve chooses another
            self._ended(live, lost(live.request, "the group is gone", "bystander"))
        else:
            group.add(live.request, self.name, cost_tokens, lambda ended: self._ended(live, ended))

    def told(self, group: str, life: int, message: KvFacts | KvEvents) -> None:
        """Takes a group's words about its KV."""
        if self.prefixes.take(group, life, message, self._clock.now_s):
            self._ask(group)

    def found(self, request_id: str, group: str, cached_tokens: int) -> None:
        """Compares what a group has found of a prompt with what was predicted."""
        if self.prefixes.found(request_id, group, cached_tokens, self._clock.now_s):
            self._ask(group)

    def _ask(self, name: str) -> None:
        if (group := self._groups.get(name)) is not None:
            group.links.ask(self.name)

    def take(self, live: LiveRequest, delta: TokenDelta, now_s: float) -> None:
        """Takes one delta of a group."""
        if live.part is not None:
            live.part.take([delta])
        if delta.token_ids:
            times = live.times
            self._outcomes.token(times, len(delta.token_ids), now_s)
            if times.num_tokens == 1 or not times.num_tokens % STEP_TOKENS:
                self._charges.look(delta.request_id, times.num_tokens)

    def _ended(self, live: LiveRequest, ended: Ended) -> None:
        self.router.ended(live.call_id, live.group)
        if ended.refused is None:
            (why,) = ended.finish_reasons
            self._charges.end(ended.request_id, live.times.num_tokens, was_cut=why == "length")
            self._over(live, why)
            return
        self._charges.end(ended.request_id)
        if live.part is None or live.failover is None:
            live.part, live.failover = _part_of(live), Failover(PROBATION_TOKENS)
        part = live.part
        try:
            is_new = live.failover.after(part, ended, self._groups.has_group)
        except RequestRefused as error:
            self._over(live, error.code)
            return
        if not is_new:
            self._dispatch(live)
            return
        self._outcomes.moved += 1
        part.next_request(None, is_suspect=live.failover.is_suspect)
        live.request = part.request
        self._clock.after(REDISPATCH_S, lambda: self._dispatch(live))

    def _over(self, live: LiveRequest, why: str) -> None:
        del self._live[live.request.request_id]
        self.prefixes.forget(live.request.request_id)
        self._outcomes.ended(live.times, why)
        self._on_over()


def _part_of(live: LiveRequest) -> RequestPart:
    """Makes the part of a request with what has been delivered of it: until something goes wrong nobody needs it."""
    part = RequestPart(request=live.request, choices=(), first_choice=0)
    part.begin_attempt()
    part.delivered = [[answer_token(live.load.seed)] * live.times.num_tokens]
    part.has_row = part.is_begun = live.is_begun
    return part
