"""Fleet: the groups of a simulation: those that load, serve, leave, and are lost."""

import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from tandem.cluster.simulator.setup import Setup
from tandem.cluster.simulator.simulated_group import SimulatedGroup
from tandem.cluster.simulator.simulated_links import TakesTold
from tandem.cluster.simulator.simulated_ranks import Node, SimulatedRanks, most_free
from tandem.cluster.simulator.simulated_router import GroupTells
from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.workers.messages.request import GenerationRequest, TokenDelta

LOOK_S: Final = 1.0
"""Pause until a loss that found no group to lose looks again."""
NOTICE_S: Final = 0.03
"""Time from the death of a rank to the answers of its coordinator (docs/architecture.md, Failures)."""


class Fleet:
    """Groups by name, in the order in which they began to serve. on_change: called when one comes or goes.
    gateways: what takes the groups' words about KV, by name."""

    def __init__(
        self,
        setup: Setup,
        clock: VirtualClock,
        answer_len: Callable[[int], int],
        on_deltas: Callable[[list[TokenDelta]], None],
        on_begun: Callable[[str, GenerationRequest, int], None],
        on_change: Callable[[], None],
        gateways: Mapping[str, TakesTold],
    ) -> None:
        self._setup, self._clock, self._answer_len = setup, clock, answer_len
        self._on_deltas, self._on_begun, self._on_change = on_deltas, on_begun, on_change
        self._gateways = gateways
        self._serving: dict[str, SimulatedGroup] = {}
        self._leaving: dict[str, SimulatedGroup] = {}
        self._nodes: list[Node] = []
        self._count = 0
        self._loading = 0
        self._gone_s = self._gone_busy_s = 0.0

    # ---- queries ----

    @property
    def wanted(self) -> int:
        """Groups that serve or load."""
        return len(self._serving) + self._loading

    @property
    def group_s(self) -> float:
        """Seconds of all groups, from when each began to load."""
        here = [*self._serving.values(), *self._leaving.values()]
        return self._gone_s + sum(self._age_s(group) for group in here)

    @property
    def busy_s(self) -> float:
        """Seconds in which groups computed."""
        here = [*self._serving.values(), *self._leaving.values()]
        return self._gone_busy_s + sum(group.busy_s for group in here)

    def names(self) -> list[str]:
        return list(self._serving)

    def groups(self) -> list[SimulatedGroup]:
        """Returns those that serve."""
        return list(self._serving.values())

    def get(self, name: str) -> SimulatedGroup | None:
        """Implements LiveGroups: one that is leaving still takes what was on its way."""
        return self._serving.get(name) or self._leaving.get(name)

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        """Implements LiveGroups."""
        return len(self._serving) > sum(name in self._serving for name in set(avoid))

    def reports(self) -> Mapping[str, GroupTells]:
        """Reports of all groups that serve."""
        return {name: group.report() for name, group in self._serving.items()}

    # ---- comings and goings ----

    def start(self, count: int) -> None:
        """Has so many groups serve at once, as they do when a load begins."""
        for _ in range(count):
            self._add(0.0)
        self._on_change()

    def load(self, count: int) -> None:
        """Starts so many groups, which serve once they have loaded."""
        for _ in range(count):
            self._loading += 1
            self._clock.after(self._setup.load_s, self._loaded)

    def take_down(self, count: int) -> None:
        """Takes the newest groups down: they take no new requests, and go when they have none."""
        for name in list(self._serving)[len(self._serving) - count :]:
            self._leaving[name] = self._serving.pop(name)
        self._on_change()
        self._look_after_leaving()

    def lose_one(self, draw: random.Random) -> None:
        """Loses one of the groups that serve, drawn by chance; another one is started. Where none serves it looks again
        later."""
        if not self._serving:
            self._clock.after(LOOK_S, partial(self.lose_one, draw))
            return
        name = draw.choice(list(self._serving))
        group = self._serving.pop(name)
        ends = group.die("a rank has died")
        self._gone(group)
        self._on_change()
        for on_ended, ended in ends:
            self._clock.after(NOTICE_S, partial(on_ended, ended))
        self.load(1)

    # ---- inside ----

    def _loaded(self) -> None:
        self._loading -= 1
        self._add(self._setup.load_s)
        self._on_change()

    def _add(self, load_s: float) -> None:
        setup, name = self._setup, f"group-{self._count}"
        self._count += 1
        node = most_free(self._nodes) if self._nodes else None
        if node is None or len(node.ranks) >= setup.groups_per_node:
            node = Node()
            self._nodes.append(node)
        kind = setup.kind
        ranks = SimulatedRanks(
            self._clock, setup.times, node, kind.executor_ready(), self._answer_len, kind.adapter_s, kind.adapter_pages
        )
        group = SimulatedGroup(name, kind, self._clock, ranks, load_s, self._on_deltas, self._on_begun, self._gateways)
        self._serving[name] = group

    def _look_after_leaving(self) -> None:
        for name, group in list(self._leaving.items()):
            if not group.num_requests:
                group.leave()
                del self._leaving[name]
                self._gone(group)
        if self._leaving:
            self._clock.after(1.0, self._look_after_leaving)

    def _gone(self, group: SimulatedGroup) -> None:
        self._gone_s += self._age_s(group)
        self._gone_busy_s += group.busy_s

    def _age_s(self, group: SimulatedGroup) -> float:
        until_s = self._clock.now_s if group.ended_s is None else group.ended_s
        return until_s - group.began_s + group.load_s
