"""FittedTimes: how long a step takes, by what it computes and by how many other groups compute on its node.

    seconds = alone . work + others * beside . work,   work = (1, decodes, prefill tokens, context tokens)

A group that has its node to itself takes `alone`; each other group that computes there at the same time adds `beside`,
as groups on CPUs share cores and memory. On GPUs of their own `beside` is 0. step_fit.py finds the numbers.
"""

from pathlib import Path
from typing import Final

import msgspec

from tandem.cluster.simulator.steps.step_work import PlanWork
from tandem.configs.errors import SettingsError

FLAG: Final = "--step-times"
LEAST_S: Final = 1e-6
"""No step is shorter: time has to go on."""


class WorkCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step itself, and of each decode, prefill token and context token (PlanWork) in it."""

    step_s: float = 0.0
    decode_s: float = 0.0
    prefill_token_s: float = 0.0
    context_token_s: float = 0.0

    def seconds(self, work: PlanWork) -> float:
        """Returns the seconds of a step."""
        return (
            self.step_s
            + self.decode_s * work.decodes
            + self.prefill_token_s * work.prefill_tokens
            + self.context_token_s * work.context_tokens
        )


class FittedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of steps of one kind of group. num_steps: those that it was fitted to; error: the mean distance of
    their times from it, as a share of their mean time. Both are 0 where somebody has written the numbers."""

    alone: WorkCosts
    beside: WorkCosts = WorkCosts()
    num_steps: int = 0
    error: float = 0.0

    def seconds(self, work: PlanWork, others: float = 0.0) -> float:
        """Returns the seconds of a step. others: groups on its node that compute at the same time."""
        seconds = self.alone.seconds(work)
        return max(LEAST_S, seconds + others * self.beside.seconds(work) if others else seconds)


def write_step_times(times: FittedTimes, file: Path) -> None:
    """Writes what read_step_times() reads. SettingsError where it cannot."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}", "--save-step-times") from error


def read_step_times(file: Path) -> FittedTimes:
    """Reads the numbers from a file. SettingsError that names it where it has none."""
    try:
        times = msgspec.json.decode(file.read_bytes(), type=FittedTimes)
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}", FLAG) from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{file} has no times of steps as --save-step-times writes them: {error}", FLAG) from error
    for costs in (times.alone, times.beside):
        for name, value in msgspec.structs.asdict(costs).items():
            if not 0.0 <= value < 3600.0:
                raise SettingsError(f"{file}: {name} {value:g} must be from 0 to 3600 seconds", FLAG)
    return times
