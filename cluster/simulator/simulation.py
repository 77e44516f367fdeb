"""Simulation: one service under one load: groups, gateways, deaths and scaling on one clock, from the first request to
the end of the last one.

The same setup gives the same Outcome, bit for bit: all chance comes from its seed, and time from its clock.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from tandem.cluster.simulator.fleet import Fleet
from tandem.cluster.simulator.outcomes import Outcomes
from tandem.cluster.simulator.scaler import ScaledTo, Scaler
from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulated_gateway import DISPATCH_S, LiveRequest, SimulatedGateway
from tandem.cluster.simulator.simulated_links import TakesTold
from tandem.cluster.simulator.simulated_router import REPORT_S, SimulatedRouter
from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.workers.messages.request import GenerationRequest, TokenDelta

TICK_S: Final = 0.5
"""Between two looks of a gateway at what it knows of prefixes."""
TOKEN_S: Final = 0.001
"""Time from a group to the client: token channel, detokenizer, HTTP."""
COLLECT_EVERY = 2000
"""Requests that have ended. Each leaves a circle of references, some 70 kB of prompts of a thousand tokens."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation. figures: of Outcomes, and `group_hours`, from when each group began to load to its
    end, and `mean_busy`, the share of that in which they computed. scaled: the numbers of groups wanted, and why."""

    policy: str
    groups: int
    figures: dict[str, float]
    ends: dict[str, int]
    scaled: list[ScaledTo] = []


class Simulation:
    """One run of a setup."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._on_ended: Callable[[int], object] = lambda count: None
        self._clock = VirtualClock()
        self._draw = random.Random(f"{setup.seed}:simulation")
        self.outcomes = Outcomes(setup.goals, TOKEN_S)
        self._live: dict[str, LiveRequest] = {}
        self._left = len(setup.load)
        self._place = 0
        answer_len = {request.seed: request.output_len for request in setup.load}
        told: dict[str, TakesTold] = {}
        self.fleet = Fleet(
            setup, self._clock, answer_len.__getitem__, self._take, self._begun, self._groups_changed, told
        )
        self.gateways = [self._gateway(f"gateway-{place}") for place in range(setup.gateways)]
        told.update({gateway.name: gateway.told for gateway in self.gateways})
        self._scaler = None
        if setup.scaling is not None:
            self._scaler = Scaler(setup.scaling, self.fleet, self._clock, self._num_held)
        self.fleet.start(setup.groups)

    def run(self, on_ended: Callable[[int], object] = lambda count: None) -> SimulatedRun:
        """Runs to the end of the last request. on_ended: called with 1 for each that ends."""
        setup, clock, self._on_ended = self._setup, self._clock, on_ended
        clock.after(REPORT_S, self._report)
        clock.after(TICK_S, self._tick)
        last_s = setup.load[-1].at_s
        for _ in range(setup.deaths):
            clock.at(self._draw.uniform(0.0, last_s), lambda: self.fleet.lose_one(self._draw))
        if self._scaler is not None:
            self._scaler.start()
        self._send_next()
        while self._left and clock.advance():
            pass
        assert not self._left and not self._live, f"{self._left} requests have no end"
        return self._result()

    # ---- requests ----

    def _send_next(self) -> None:
        load, place = self._setup.load, self._place
        if place < len(load):
            self._clock.at(load[place].at_s, self._arrive)

    def _arrive(self) -> None:
        request = self._setup.load[self._place]
        self.gateways[self._place % len(self.gateways)].arrive(request)
        self._place += 1
        self._send_next()

    def _take(self, deltas: list[TokenDelta]) -> None:
        now_s, live = self._clock.now_s, self._live
        for delta in deltas:
            one = live[delta.request_id]
            one.gateway.take(one, delta, now_s)

    def _begun(self, group: str, request: GenerationRequest, cached_tokens: int) -> None:
        live = self._live[request.request_id]
        live.gateway.found(request.request_id, group, cached_tokens)
        if not live.is_begun:
            live.is_begun = True
            self.outcomes.begun(len(request.prompt_token_ids), cached_tokens)

    def _over(self) -> None:
        self._left -= 1
        self._on_ended(1)

    # ---- gateways ----

    def _gateway(self, name: str) -> SimulatedGateway:
        router = SimulatedRouter(name, self._setup.policy, self._clock, random.Random(f"{self._setup.seed}:{name}"))
        return SimulatedGateway(name, self._clock, self.fleet, router, self.outcomes, self._live, self._over)

    def _groups_changed(self) -> None:
        names = self.fleet.names()
        for gateway in self.gateways:
            gateway.router.set_groups(names)
            gateway.groups_changed()

    def _report(self) -> None:
        reports = self.fleet.reports()
        for gateway in self.gateways:
            gateway.router.take(reports)
        self._clock.after(REPORT_S, self._report)

    def _tick(self) -> None:
        for gateway in self.gateways:
            gateway.prefixes.tick(self._clock.now_s)
        self._clock.after(TICK_S, self._tick)

    def _num_held(self) -> int:
        return sum(gateway.num_held for gateway in self.gateways)

    # ---- the end ----

    def _result(self) -> SimulatedRun:
        now_s = max(self._clock.now_s, 1e-9)
        figures = self.outcomes.figures(now_s)
        figures["group_hours"] = self.fleet.group_s / 3600
        figures["mean_busy"] = self.fleet.busy_s / max(1e-9, self.fleet.group_s)
        return SimulatedRun(
            policy=self._setup.policy,
            groups=self._setup.groups,
            figures=figures,
            ends=dict(sorted(self.outcomes.ends.items())),
            scaled=[] if self._scaler is None else self._scaler.decisions,
        )


LATENCY_S: Final = DISPATCH_S + TOKEN_S
"""Time of a first token beside the group's own."""


@contextmanager
def few_collections() -> Iterator[Callable[[int], None]]:
    """Leaves out what there is, such as the groups of a simulation that was made, and collects what ended requests
    leave once in COLLECT_EVERY: to look when Python would takes a third of the time, and never takes all memory.
    Yields what is told how many have ended."""
    ended = 0

    def told(count: int) -> None:
        nonlocal ended
        ended += count
        if ended >= COLLECT_EVERY:
            ended = 0
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield told
    finally:
        gc.enable()
        gc.unfreeze()
