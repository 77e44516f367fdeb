"""Scaler: changes the number of groups as Serve's controller does with our policy: decide() once a second, on figures
that groups report, and a delay before a change in either direction."""

from collections.abc import Callable
from typing import Final

import msgspec

from tandem.cluster.scaling.decide import ScalingState, decide, load_of
from tandem.cluster.simulator.fleet import Fleet
from tandem.cluster.simulator.setup import Scaling
from tandem.cluster.simulator.virtual_clock import VirtualClock

PERIOD_S: Final = 1.0


class ScaledTo(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the number of groups, when it was made, and why."""

    at_s: float
    groups: int
    why: str


class Scaler:
    """Scales a fleet. held: requests that wait for a group."""

    def __init__(self, scaling: Scaling, fleet: Fleet, clock: VirtualClock, held: Callable[[], int]) -> None:
        self._goals, self._fleet, self._clock, self._held = scaling.goals, fleet, clock, held
        self._delays_s = {1: scaling.up_s, -1: scaling.down_s}
        self._zero_s = scaling.down_s if scaling.zero_s is None else scaling.zero_s
        self._state = ScalingState()
        self._since: tuple[int, float] = 0, 0.0  # the direction that is wanted, and since when
        self.decisions: list[ScaledTo] = []

    def start(self) -> None:
        """Looks once a second from now on."""
        self._clock.after(PERIOD_S, self._look)

    def _look(self) -> None:
        fleet, now_s, goals = self._fleet, self._clock.now_s, self._goals
        loads = [load_of(group.scaling_figures(), goals.ttft_s) for group in fleet.groups()]
        made = decide(loads, self._held(), fleet.wanted, goals, self._state, now_s)
        self._state = made.state
        way = (made.groups > fleet.wanted) - (made.groups < fleet.wanted)
        if way != self._since[0]:
            self._since = way, now_s
        wanted_s = now_s - self._since[1]
        if way and wanted_s >= self._delay_of(way):
            self._change(made.groups if made.groups or wanted_s >= self._zero_s else 1, made.why)
        self._clock.after(PERIOD_S, self._look)

    def _delay_of(self, way: int) -> float:
        """Serve starts a first group at once when a request waits for it."""
        return 0.0 if way > 0 and not self._fleet.wanted else self._delays_s[way]

    def _change(self, groups: int, why: str) -> None:
        if groups == self._fleet.wanted:
            return  # the last group, which is wanted for some time yet
        self._since = 0, self._clock.now_s
        self.decisions.append(ScaledTo(at_s=self._clock.now_s, groups=groups, why=why))
        if groups > self._fleet.wanted:
            self._fleet.load(groups - self._fleet.wanted)
        else:
            self._fleet.take_down(min(self._fleet.wanted - groups, len(self._fleet.groups())))
