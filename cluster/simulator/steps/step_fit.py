"""Fits FittedTimes to step logs by least squares, without negative times.

The time of a step is from the moment at which the ranks could begin with it, when its plan had come and the step before
had returned, to the moment at which its result was applied: what a request waits for. Logs of several groups of one
machine are read together, as they share its clock: how far their steps overlap says how many groups were busy.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tandem.cluster.simulator.steps.fitted_times import FittedTimes, WorkCosts
from tandem.cluster.simulator.steps.step_work import PlanWork, WorkCounter
from tandem.configs.errors import SettingsError
from tandem.workers.engine.observers.step_log import LoggedTimes, StepLog

if TYPE_CHECKING:
    from numpy import ndarray

FLAG = "--step-log"
COLD_STEPS = 20
"""The first steps of a group do not count: caches are empty, and kernels are compiled."""
LEAST_STEPS = 50
"""Fewer steps than these say nothing."""


class TimedStep(NamedTuple):
    """One step of a log: its work, and when the ranks began and ended it, in seconds of the machine's clock."""

    work: PlanWork
    began_s: float
    ended_s: float


def timed_steps(log: Path) -> list[TimedStep]:
    """Returns the steps of a group's log that have times, without the first ones. SettingsError names a file that is
    no step log, or cannot be read."""
    counter, works, steps = WorkCounter(), dict[int, PlanWork](), list[TimedStep]()
    before_s, before_id = float("-inf"), -1
    try:
        for line in StepLog.lines(log.read_bytes()):
            if isinstance(line, LoggedTimes):
                began_s = max(line.submitted_s, before_s)
                before_s = line.returned_s
                if (work := works.pop(line.step_id, None)) is None:
                    raise SettingsError(
                        f"{log} is not the step log of one group: step {line.step_id} has no plan", FLAG
                    )
                steps.append(TimedStep(work, began_s, line.returned_s))
                continue
            if line.step_id <= before_id:
                order = f"step {line.step_id} is planned after step {before_id}"
                raise SettingsError(f"{log} is not the step log of one group: {order}", FLAG)
            before_id = line.step_id
            works[line.step_id] = counter.count(line)
    except OSError as error:
        raise SettingsError(f"{log} cannot be read: {error.strerror}", FLAG) from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{log} is not the step log of one group: {error}", FLAG) from error
    return steps[COLD_STEPS:]


def others_busy(steps: Sequence[TimedStep], others: Iterable[Sequence[TimedStep]]) -> list[float]:
    """Returns for each step of a group how many other groups computed beside it, on average over its time."""
    found = [0.0] * len(steps)
    for other in others:
        place = 0
        for at, step in enumerate(steps):
            while place < len(other) and other[place].ended_s <= step.began_s:
                place += 1
            shared_s, beside = 0.0, place
            while beside < len(other) and other[beside].began_s < step.ended_s:
                shared_s += min(step.ended_s, other[beside].ended_s) - max(step.began_s, other[beside].began_s)
                beside += 1
            found[at] += shared_s / max(1e-9, step.ended_s - step.began_s)
    return found


def fit_logs(logs: Sequence[Path]) -> FittedTimes:
    """Fits the logs of groups that served at the same time on one machine, of one group each. SettingsError where they
    have too few steps with times."""
    groups = [timed_steps(log) for log in logs]
    samples = [
        (step.work, others, step.ended_s - step.began_s)
        for place, steps in enumerate(groups)
        for step, others in zip(steps, others_busy(steps, groups[:place] + groups[place + 1 :]), strict=True)
    ]
    if len(samples) < LEAST_STEPS:
        names = ", ".join(map(str, logs))
        least = f"at least {LEAST_STEPS} are needed beyond the first {COLD_STEPS} of each group"
        raise SettingsError(f"{names}: {len(samples)} steps with times; {least}", FLAG)
    return fit(samples)


def fit(samples: Sequence[tuple[PlanWork, float, float]]) -> FittedTimes:
    """Returns the times that are closest to samples of (work, other groups that computed, seconds)."""
    import numpy as np

    works = np.array([(1.0, *work) for work, _, _ in samples])
    others = np.array([other for _, other, _ in samples])
    seconds = np.array([taken for _, _, taken in samples])
    columns = np.hstack([works, works * others[:, None]])
    found = _least_squares(columns, seconds)
    error = float(np.abs(columns @ found - seconds).mean() / seconds.mean())
    alone, beside = (WorkCosts(**dict(zip(WorkCosts.__struct_fields__, part, strict=True))) for part in _halves(found))
    return FittedTimes(alone=alone, beside=beside, num_steps=len(samples), error=error)


def _halves(found: "ndarray") -> tuple[list[float], list[float]]:
    numbers: list[float] = found.tolist()
    return numbers[:4], numbers[4:]


def _least_squares(columns: "ndarray", seconds: "ndarray") -> "ndarray":
    """Returns the factors of at least 0: those that come out below it are left out one by one, the lowest first, as
    they say only that another column has already counted them."""
    import numpy as np

    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    kept = [place for place in range(columns.shape[1]) if np.abs(columns[:, place]).max() > 0.0]
    factors = np.zeros(columns.shape[1])
    while kept:
        part, *_ = np.linalg.lstsq(columns[:, kept] / scale[kept], seconds, rcond=None)
        if part.min() >= 0.0:
            factors[kept] = part / scale[kept]
            break
        del kept[int(part.argmin())]
    return factors
