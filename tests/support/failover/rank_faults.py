"""RankFaults: orders to the ranks of a service under test, which sitecustomize.py in faults/ carries out."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from uuid import uuid4

from tests.support.service import wait_for

Fault = Literal["kill", "out of memory", "nan"]
HELD_S = 60.0


class RankFaults:
    """Orders in a folder of their own. environment: what a service needs so that its processes read them.
    most_by_value: bytes of a request above which gateways send it through Ray's object store; None: their own."""

    def __init__(self, folder: Path, most_by_value: int | None = None) -> None:
        self._folder = folder
        code = Path(__file__).parent / "faults"
        others = os.environ.get("PYTHONPATH")
        path = str(code) if not others else f"{code}{os.pathsep}{others}"
        self.environment = {"TANDEM_TEST_FAULTS": str(folder), "PYTHONPATH": path}
        if most_by_value is not None:
            self.environment["TANDEM_TEST_MOST_BY_VALUE"] = str(most_by_value)

    def hold_step(self, position: int) -> None:
        """Holds each rank that is about to compute this position of a row, counted from the start of its prompt."""
        self._hold({"point": "step", "position": position})

    def hold_any_step(self) -> None:
        """Holds each rank before its next step."""
        self._hold({"point": "step"})

    def hold_adapter(self) -> None:
        """Holds the fetch of an adapter on each rank."""
        self._hold({"point": "adapter"})

    def hold_copy(self, kind: Literal["load", "store"], position: int = -1) -> None:
        """Holds a copy of KV on each rank: load is from the host to the device. Where a copy is
        held, so is the step that computes this position, in case that the copy is found to be late."""
        self._hold({"point": "copy", "kind": kind, "position": position})

    def hold_text(self) -> None:
        """Holds the threads of gateways that read long prompts."""
        self._hold({"point": "text"})

    def release(self) -> None:
        """Lets go what is held. Idempotent."""
        self._order("hold.json").unlink(missing_ok=True)

    def held(self) -> set[int]:
        """The processes that are held now, as far as they live: those that have been killed have left their marks."""
        marked = {int(mark.suffix[1:]) for mark in self._folder.glob("held.*")}
        return {pid for pid in marked if Path(f"/proc/{pid}").exists()}

    def wait_held(self, what: str = "a rank is at the point") -> int:
        """Returns a process that is held, waiting for it."""
        return min(wait_for(self.held, HELD_S, what, 0.005))

    def run_out_of_memory(self, pid: int) -> None:
        """A rank that is held ends for want of memory once it is let go."""
        self._order(f"fatal.{pid}").touch()

    @contextmanager
    def on_token(self, token_id: int, fault: Fault) -> Iterator[None]:
        """While the block runs, each step that reads the token dies, runs out of memory, or has NaN in its row."""
        self._write("tokens.json", {str(token_id): fault})
        try:
            yield
        finally:
            self._order("tokens.json").unlink()

    def _hold(self, order: dict[str, object]) -> None:
        for mark in self._folder.glob("held.*"):
            mark.unlink(missing_ok=True)
        self._write("hold.json", {"id": uuid4().hex, **order})

    def _write(self, name: str, order: object) -> None:
        """Whole, or not at all."""
        self._order("new").write_text(json.dumps(order))
        self._order("new").rename(self._order(name))

    def _order(self, name: str) -> Path:
        return self._folder / name
