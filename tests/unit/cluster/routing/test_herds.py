"""Two gateways that see each other's requests seconds late share 16 groups evenly; simulated, on the real routers."""

import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.cluster.routing.outstanding import tokens_by_gateway
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.router.serve_router import GroupRouter

GROUPS, RATE = 16, 4000.0
"""Groups, and the tokens that each serves in a second, shared by its requests in the order of their arrival."""
REPORT_S, LATE_S = 2.0, 0.5
"""Between two reports of a group, and how long one is under way."""


class Simulation:
    """Requests come by chance, to a gateway by chance, each of 50 to 2,000 tokens, at `load` of what the groups serve.
    room: requests that a group takes at a time; one that it refuses goes on to the next with a hint to avoid it."""

    def __init__(self, pick: Callable[[Sequence[int]], int], load: float, seconds: float, room: int = 10**6) -> None:
        self.now_s = 0.0
        self.rng = random.Random(3)
        self.room = room
        self.refused = self.sent = self.given_up = 0
        self.names = [f"g{i:02}" for i in range(GROUPS)]
        self.live: dict[str, dict[str, tuple[str, int]]] = {name: {} for name in self.names}
        self.free_at_s = dict.fromkeys(self.names, 0.0)
        self.reports: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.routers = {gateway: self._router(pick) for gateway in ("one", "two")}
        self.ratios: list[float] = []
        self.load, self.seconds = load, seconds
        self.lists = {gateway: self._replicas() for gateway in self.routers}

    def run(self) -> None:
        """Plays it. ratios: at each arrival, the most tokens that a group has, over the mean of the groups and a
        request's size."""
        ends: list[tuple[float, str, str, str]] = []
        next_report_s, number = 0.0, 0
        while self.now_s < self.seconds:
            self.now_s += self.rng.expovariate(self.load * GROUPS * RATE / 500)
            while ends and ends[0][0] <= self.now_s:
                _, group, call, gateway = heapq.heappop(ends)
                self.live[group].pop(call)
                self.routers[gateway].on_request_completed(SimpleNamespace(unique_id=group), call)
            if self.now_s >= next_report_s + LATE_S:  # what comes now was true LATE_S ago, about
                next_report_s += REPORT_S
                self.lists = {gateway: self._replicas() for gateway in self.routers}
                self._take_reports()
            number += 1
            gateway, call = self.rng.choice(("one", "two")), str(number)
            tokens = int(50 + min(1950.0, self.rng.expovariate(1 / 450)))
            taken = self._send(gateway, call, tokens)
            self.given_up += taken is None
            if taken is not None:
                group, call = taken
                self.live[group][call] = (gateway, tokens)
                self.free_at_s[group] = max(self.free_at_s[group], self.now_s) + tokens / RATE
                heapq.heappush(ends, (self.free_at_s[group], group, call, gateway))
            sums = [sum(tokens for _, tokens in live.values()) for live in self.live.values()]
            self.ratios.append(max(sums) / (statistics.mean(sums) + 500))

    def _send(self, gateway: str, call: str, tokens: int) -> tuple[str, str] | None:
        """Up to four tries, as a gateway makes; the group that took it, and the name of that try."""
        avoid: tuple[str, ...] = ()
        for attempt in range(4):
            self.sent += 1
            name = f"{call}-{attempt}"
            hint = RouteHint(request_id=call, cost_tokens=tokens, gateway=gateway, avoid=avoid)
            pending = SimpleNamespace(
                kwargs={"hint": hint},
                metadata=SimpleNamespace(internal_request_id=name),
                routing_context=SimpleNamespace(should_backoff=False),
                future=Mock(),
            )
            choosing = self.routers[gateway].choose_replicas(self.lists[gateway], pending)
            with pytest.raises(StopIteration) as chosen:  # it waits for nothing
                choosing.send(None)
            group = chosen.value.value[0][0].replica_id.unique_id
            if len(self.live[group]) < self.room:
                return group, name
            self.refused += 1
            self.routers[gateway].on_request_completed(SimpleNamespace(unique_id=group), name)
            avoid = (*avoid, group)
        return None

    def _take_reports(self) -> None:
        for name, live in self.live.items():
            self.reports[name] = {"outstanding_tokens": tokens_by_gateway(live.values()), "stalled_s": 0.0}

    def _replicas(self) -> list[Any]:
        return [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=self.reports[name])
            for name in self.names
        ]

    @staticmethod
    def _router(pick: Callable[[Sequence[int]], int]) -> GroupRouter:
        router = GroupRouter.__new__(GroupRouter)
        router.initialize_state()
        router._pick = pick
        return router

    @property
    def p99(self) -> float:
        return sorted(self.ratios)[int(0.99 * len(self.ratios))]


def first(near: Sequence[int]) -> int:
    """What two gateways would agree on."""
    return near[0]


Simulate = Callable[..., Simulation]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    def simulate(pick: Callable[[Sequence[int]], int], load: float, **more: int) -> Simulation:
        simulation = Simulation(pick, load, seconds=20.0, **more)
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: simulation.now_s)
            simulation.run()
        return simulation

    return simulate


@pytest.mark.parametrize("load", [0.1, 0.3, 0.6])
def test_two_gateways_do_not_send_to_the_same_group(simulated: Simulate, load: float) -> None:
    agreed, chance = simulated(first, load), simulated(random.Random(5).choice, load)
    for name, run in (("agreed", agreed), ("chance", chance)):
        print(f"{name}: most tokens of a group over the mean {statistics.mean(run.ratios):.2f}, p99 {run.p99:.2f}")
    assert statistics.mean(chance.ratios) < 2.2 and chance.p99 < 4.0
    assert statistics.mean(chance.ratios) < statistics.mean(agreed.ratios) and chance.p99 < agreed.p99


def test_what_a_full_group_refuses_another_takes(simulated: Simulate) -> None:
    run = simulated(random.Random(5).choice, 0.95, room=8)
    print(f"{run.refused} of {run.sent} tries were refused")
    assert 0 < run.refused < 0.06 * run.sent, "full groups are avoided, although reports are late"
    assert run.given_up == 0, "of those that were refused every one found a group"
