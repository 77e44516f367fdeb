"""Writes each StepPlan as one JSON line, in order, so that a run can be replayed and read."""

from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import StepPlan


class StepLog(StepObserver):
    """Appends to a file, one unbuffered write a step. read() gives the plans back."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the engine lives)

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Implements StepObserver."""
        self._file.write(msgspec.json.encode(plan) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @staticmethod
    def read(path: str) -> list[StepPlan]:
        """Returns the plans of a file."""
        return [msgspec.json.decode(line, type=StepPlan) for line in Path(path).read_bytes().splitlines()]
