"""ScalingWatch: what a gateway makes of the groups' figures: the number of groups that decide() wants, and why; for its
log, for `/load`, and by way of Redis for `tandem status`.

It is decided by Serve's controller (scaling_policy.py), from the same figures by the same function; a gateway shows the
reasons, which Serve keeps to itself.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.scaling.decide import FIGURES, Decision, ScalingState, decide, load_of
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Commands
from tandem.configs.autoscaling import ScalingGoals, goals_of

log = logging.getLogger("tandem.gateway")
PERIOD_S = 1.0
WRITE_S = 3.0
"""Between two reports without a change; one lives for keys.SCALING_TTL_MS."""
OTHER_POLICY = "another policy decides: the autoscaling_config below `deployments:` names none, or not the one of args"


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Words of the gateways about the number of groups. held: requests that wait without a group."""

    groups: int
    why: str
    held: int = 0


class ScalingWatch:
    """Looks at the groups of one gateway. goals: of the policy in the args. held: of all gateways. One thread."""

    def __init__(
        self, goals: ScalingGoals, held: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._goals = goals
        self._held = held
        self._clock = clock
        self._made: Decision | None = None
        self._seen: object = None
        self._at_s = self._written_s = float("-inf")
        self._written: ScalingReport | None = None
        self._is_ours = True

    def use(self, config: Mapping[str, Any]) -> None:
        """Takes the goals of an autoscaling_config that is in force now; says so where its policy is not ours."""
        if (goals := goals_of(config)) is None and self._is_ours:
            log.warning("%s", OTHER_POLICY)
        self._is_ours, self._goals = goals is not None, goals or self._goals
        self._seen = None  # decided anew at the next look

    def look(self, records: Iterable[GroupRecord]) -> ScalingReport:
        """Returns what the groups of these records need, decided anew once a second, and when a group or the first held
        request comes or goes."""
        now_s, held = self._clock(), self._held()
        here = [record for record in records if record.state != "draining"]
        if not self._is_ours:
            return ScalingReport(groups=len(here), why=OTHER_POLICY, held=held)
        seen = [(record.group, record.state) for record in here], held > 0
        if self._made is None or seen != self._seen or now_s - self._at_s >= PERIOD_S:
            self._at_s, self._seen = now_s, seen
            loads = [
                load_of(dict(zip(FIGURES, record.figures, strict=False)), self._goals.ttft_s)
                for record in here
                if record.state == "serving"
            ]
            state = ScalingState() if self._made is None else self._made.state
            before, self._made = self._made, decide(loads, held, len(here), self._goals, state, now_s)
            if before is None or before.groups != self._made.groups:
                log.info("groups wanted: %d, %s", self._made.groups, self._made.why)
        return ScalingReport(groups=self._made.groups, why=self._made.why, held=held)

    def due(self, records: Iterable[GroupRecord]) -> ScalingReport | None:
        """Returns a report to write; None where the last one still says it."""
        report, now_s = self.look(records), self._clock()
        if report == self._written and now_s - self._written_s < WRITE_S:
            return None
        self._written, self._written_s = report, now_s
        return report


async def write_scaling(redis: Commands, service: str, report: ScalingReport) -> None:
    """Writes a gateway's report. RedisUnavailable."""
    await redis.command("SET", keys.scaling(service), msgspec.msgpack.encode(report), "PX", keys.SCALING_TTL_MS)


async def read_scaling(redis: Commands, service: str) -> ScalingReport | None:
    """The report of the gateways; None where nothing chooses the number of groups by it. RedisUnavailable."""
    value = await redis.command("GET", keys.scaling(service))
    return msgspec.msgpack.decode(value, type=ScalingReport) if isinstance(value, bytes) else None
