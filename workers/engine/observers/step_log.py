"""Writes each StepPlan as one JSON line, in order, and its times as another once it has returned, so that a run can be
read, and the times of steps be fitted (cluster/simulator/steps/step_fit.py)."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import StepPlan, StepResult


class LoggedTimes(msgspec.Struct, frozen=True, array_like=True, tag="times"):
    """Times of one step, in seconds. submitted_s, returned_s: when its plan went to the ranks and its result was
    applied, on the machine's monotonic clock, which all groups there share. device_s: as in StepResult."""

    step_id: int
    submitted_s: float
    returned_s: float
    device_s: float


Line = StepPlan | LoggedTimes


class StepLog(StepObserver):
    """Appends to a file, one unbuffered write a line. read() gives the plans back, lines() the times too."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the engine lives)
        self.clock = clock
        self._submitted: deque[tuple[int, float]] = deque()

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Implements StepObserver."""
        self._submitted.append((step.step_id, self.clock()))
        self._file.write(msgspec.json.encode(plan) + b"\n")

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Implements StepObserver."""
        step_id, submitted_s = self._submitted.popleft()
        while step_id < step.step_id:  # it failed, and no word of it came
            step_id, submitted_s = self._submitted.popleft()
        times = LoggedTimes(step_id, submitted_s, self.clock(), result.device_s)
        self._file.write(msgspec.json.encode(times) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @staticmethod
    def read(path: str) -> list[StepPlan]:
        """Returns the plans of a file, also of one that has no times."""
        return [line for line in StepLog.lines(Path(path).read_bytes()) if isinstance(line, StepPlan)]

    @staticmethod
    def lines(log: bytes) -> Iterator[Line]:
        """Yields the lines of a file in their order. A last line without its end is not read: the group may be writing
        it. msgspec.DecodeError for a line of something else."""
        whole, _, _ = log.rpartition(b"\n")
        decode = msgspec.json.Decoder(Line).decode
        return map(decode, whole.splitlines())
