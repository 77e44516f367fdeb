"""Writes each StepPlan as one JSON line, in order, so that a run can be replayed and read."""

from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.workers.messages.step import StepPlan


class StepLog:
    """Appends to a file, one unbuffered write a step. read() gives the plans back."""

    def __init__(self, path: str) -> None:
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the engine lives)

    def write(self, plan: StepPlan) -> None:
        self._file.write(msgspec.json.encode(plan) + b"\n")

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: str) -> list[StepPlan]:
        return [msgspec.json.decode(line, type=StepPlan) for line in Path(path).read_bytes().splitlines()]
