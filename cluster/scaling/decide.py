"""decide: how many groups a service should have, and why, from what its groups report. Pure: no clock, no Ray, no
torch; times are the caller's.

Used by Serve's policy class (scaling_policy.py), and by gateways, which show it in `/load` and `tandem status`
(scaling_watch.py). Bounds are in the goals; delays and factors between two numbers of groups are Serve's.

- Nothing to do: none. Serve keeps the fewest, and takes the last one away after its own delay.
- More: where the prompts that wait before the group with the shortest queue take longer than the goal for first tokens;
  where KV is full; where first tokens are late although no group is new. At most twice the groups that run.
- Fewer: as many as would be calm, by rows, KV, queues and prompts. Otherwise as many as there are, or as were asked for
  and would be calm: one that takes long to load is not given up because the queue for which it was asked is gone.

Work for idle rows, as batches' lines are, has no part in this: it keeps the last group, and no other.

It asks for a number that follows from the groups that run, never for one more than was asked for: what is on its way is
not asked for twice, and what never comes keeps no group from going.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from tandem.configs.autoscaling import ScalingGoals

LATE_BOUNDS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Times for each of which groups report the share of first tokens that came later. They are bounds of the engine's
histogram (workers/engine/base/stats.py)."""
FIGURES = (
    "waiting",
    "queued_tokens",
    "running",
    "mean_running",
    "rows",
    "kv_used",
    "prompt_rate",
    "prefill_rate",
    "steps",
    "age_s",
    "first_tokens",
    *(f"late_{bound:g}" for bound in LATE_BOUNDS_S),
    "idle_work",
)
"""Names of what a group reports (scaling_figures.py), in the order of its record."""
WINDOW_S = 30.0
"""Time for which first tokens and computed prompts count."""
COLD_STEPS = 20
"""A group that has had fewer steps has no say about times: caches are empty, and kernels are compiled."""
LATE, LATE_SAMPLES = 0.1, 10
"""Share of late first tokens beyond which there should be more groups, and the fewest to judge by."""
CALM = 0.7
"""Share of what groups can do up to which fewer of them will do."""
MOST_GROWTH = 2
IDLE_S = 3.0
"""Time without work after which none is needed: requests may be on their way to a group that has just begun."""


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one group, without work for idle rows, of which idle_work sequences run or wait. waiting, running:
    sequences; mean_running: of WINDOW_S; rows: the most that run at a time. kv_used: share of its KV blocks.
    prompt_rate: prompt tokens that it computes a second; prefill_rate: those that it can, as was seen while some
    waited, and in its best second of late; 0 as long as none have waited. late_share: of first_tokens, which came in
    WINDOW_S, those later than the goal. age_s: since it serves."""

    waiting: float = 0.0
    queued_tokens: float = 0.0
    running: float = 0.0
    mean_running: float = 0.0
    rows: float = 1.0
    kv_used: float = 0.0
    prompt_rate: float = 0.0
    prefill_rate: float = 0.0
    steps: float = 0.0
    age_s: float = math.inf
    first_tokens: float = 0.0
    late_share: float = 0.0
    idle_work: float = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.idle_work)

    @property
    def is_cold(self) -> bool:
        return self.steps < COLD_STEPS

    @property
    def used(self) -> float:
        """The share of its rows, of late, or of its KV that is taken, the larger one."""
        return max(self.kv_used, self.mean_running / max(1.0, self.rows))

    @property
    def prompts(self) -> float:
        """The share of its time that prompts take, at most: no more than as many as run at a time."""
        return min(self.prompt_rate / self.prefill_rate, self.mean_running) if self.prefill_rate else 0.0

    @property
    def queue_s(self) -> float:
        """Seconds that the prompts in its queue take; 0 as long as it is not known how fast they are computed."""
        return self.queued_tokens / self.prefill_rate if self.prefill_rate else 0.0


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that one decision leaves for the next. steps: of all groups. idle_since_s: None while there is work."""

    steps: float = 0.0
    idle_since_s: float | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A number of groups that there should be, and why, in words for the operator."""

    groups: int
    why: str
    state: ScalingState


Wish = tuple[int, str]
"""A number of groups, and why."""


def decide(
    loads: Sequence[GroupLoad], held: int, now: int, goals: ScalingGoals, state: ScalingState, at_s: float
) -> Decision:
    """Returns how many groups there should be. loads: of the groups that run. held: requests that no group has taken.
    now: the groups that were asked for, those on their way among them. at_s: the time, on any clock."""
    steps = sum(load.steps for load in loads)
    is_busy = held > 0 or any(load.has_work for load in loads) or (bool(loads) and steps != state.steps)
    idle_since_s = None if is_busy else at_s if state.idle_since_s is None else state.idle_since_s
    idle_s = None if idle_since_s is None else max(0.0, at_s - idle_since_s)
    if idle_s is not None:
        groups, why = 0 if idle_s >= IDLE_S else len(loads), f"idle {idle_s:.0f} s"
    elif not loads:
        groups, why = max(1, now), f"{_count(held, 'request')} held, and no group runs"
    else:
        groups, why = _wanted(loads, now, goals)
    if len(loads) < groups <= now:
        why += f"; {_count(now - len(loads), 'group')} on the way"
    if groups > goals.high:
        why += f"; {goals.high} is the most"
    elif groups < goals.low:
        why += f"; {goals.low} is the least"
    bounded = max(goals.low, min(groups, goals.high))
    return Decision(groups=bounded, why=why, state=ScalingState(steps=steps, idle_since_s=idle_since_s))


def load_of(figures: Mapping[str, float], ttft_s: float) -> GroupLoad:
    """Reads what a group has reported. figures: by names in FIGURES; those that are missing count as nothing."""
    late = [figures.get(f"late_{bound:g}", 0.0) for bound in LATE_BOUNDS_S]
    known = {name: figures[name] for name in GroupLoad.__struct_fields__ if name in figures}
    return GroupLoad(**known, late_share=late_share(late, ttft_s))


def late_share(late: Sequence[float], ttft_s: float) -> float:
    """Returns the share of first tokens that came later than ttft_s. late: shares beyond each of LATE_BOUNDS_S;
    between two of them it is taken to fall evenly."""
    below_s, above = 0.0, 1.0
    for bound_s, share in zip(LATE_BOUNDS_S, late, strict=True):
        if ttft_s <= bound_s:
            part = (ttft_s - below_s) / (bound_s - below_s)
            return above + (share - above) * part
        below_s, above = bound_s, share
    return above


def _wanted(loads: Sequence[GroupLoad], now: int, goals: ScalingGoals) -> Wish:
    """The number of groups for the present work, of groups of which some run. now: the groups that were asked for."""
    running = len(loads)
    wishes = [wish for wish in (_by_queue(loads, goals), _by_kv(loads, goals), _by_late(loads)) if wish is not None]
    if wishes:
        groups, why = max(wishes)
        return min(groups, MOST_GROWTH * running), why
    fewest, why = _fewest(loads, goals)
    if fewest < running:
        return fewest, f"{_count(fewest, 'group')} would do: {why}"
    return min(fewest, max(running, now), MOST_GROWTH * running), why


def _by_queue(loads: Sequence[GroupLoad], goals: ScalingGoals) -> Wish | None:
    """More groups, where a prompt that comes now has to wait for too long wherever it goes. A cold group without a
    queue takes it; one with a queue tells nothing."""
    known = [load for load in loads if not (load.is_cold and load.waiting)]
    if not known or min(load.queue_s for load in known) <= goals.ttft_s:
        return None
    tokens, rate = sum(load.queued_tokens for load in known), sum(load.prefill_rate for load in known)
    seconds = tokens / rate
    groups = math.ceil(len(known) * min(seconds / goals.ttft_s, MOST_GROWTH * len(loads)))
    return max(groups, len(loads) + 1), f"queue {_tokens(tokens)} tokens = {seconds:.1f} s > {goals.ttft_s:g} s"


def _by_kv(loads: Sequence[GroupLoad], goals: ScalingGoals) -> Wish | None:
    used = sum(load.kv_used for load in loads)
    mean = used / len(loads)
    if mean <= goals.kv_high:
        return None
    return max(len(loads) + 1, math.ceil(used / goals.kv_high)), f"KV {mean:.0%} > {goals.kv_high:.0%}"


def _by_late(loads: Sequence[GroupLoad]) -> Wish | None:
    """One more group, where first tokens are late. Not while a group is new, as the late ones may be of the time before
    it; nor where groups have one request at a time, which more of them would not make faster."""
    late, count = _late(loads)
    if late <= LATE or count < LATE_SAMPLES or min(load.age_s for load in loads) < WINDOW_S:
        return None
    if sum(load.running + load.waiting for load in loads) < 2 * len(loads):
        return None
    return len(loads) + 1, f"{late:.0%} of first tokens late"


def _late(loads: Sequence[GroupLoad]) -> tuple[float, float]:
    """The share of late first tokens in groups that are not cold, and how many there were."""
    warm = [load for load in loads if not load.is_cold]
    count = sum(load.first_tokens for load in warm)
    return sum(load.late_share * load.first_tokens for load in warm) / max(1.0, count), count


def _fewest(loads: Sequence[GroupLoad], goals: ScalingGoals) -> Wish:
    """The fewest groups that would be calm, and what they do now."""
    running, used = len(loads), sum(load.used for load in loads)
    prompts = sum(load.prompts for load in loads)
    queue_s = sum(load.queue_s for load in loads) / running
    late, _ = _late(loads)
    fewest = max(
        1,
        math.ceil(used / (CALM * goals.kv_high)),
        math.ceil(prompts / CALM),
        math.ceil(running * queue_s / (CALM * goals.ttft_s)),
        running if late > CALM * LATE or any(load.is_cold and load.waiting for load in loads) else 1,
    )
    return fewest, f"rows or KV {used / running:.0%}, prompts {prompts / running:.0%}, queue {queue_s:.1f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tokens(count: float) -> str:
    return f"{count:.0f}" if count < 1000 else f"{count / 1000:.0f}k"
