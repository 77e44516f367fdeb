"""Faults in the ranks of a service under test. Python imports this at the start of each process whose PYTHONPATH has
this folder; TANDEM_TEST_FAULTS names the folder of orders that rank_faults.py writes. Without that it does nothing.

hold.json: a rank that comes to the order's point writes held.PID and waits there until the order is gone. Points: the
step that computes a position of some row, or any step; the fetch of an adapter; a copy of KV, with which such a step
waits too if it comes after the copy has begun. tokens.json: what a step does that reads a token id. fatal.PID: memory
runs out in the held step, and for its exchanges with peers too, which ends the rank.
"""

import importlib.abc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("TANDEM_TEST_FAULTS", "")
POLL_S = 0.005


def order(name: str) -> Any:
    """An order that stands now; None without."""
    try:
        return json.loads(Path(FOLDER, name).read_text())
    except FileNotFoundError:
        return None


class Holder:
    """Holds this process, once per order and point."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str]] = set()

    def reach(self, point: str, is_there: Callable[[dict[str, Any]], bool]) -> None:
        """Waits if there is an order that holds what comes to this point, and marks it if that is the order's own."""
        hold = order("hold.json")
        if hold is None or (hold["id"], point) in self._done or not is_there(hold):
            return
        self._done.add((hold["id"], point))
        mark = Path(FOLDER, f"held.{os.getpid()}")
        if hold["point"] == point:
            whole = Path(FOLDER, f"new.{os.getpid()}")
            whole.touch()
            whole.rename(mark)
        while (now := order("hold.json")) is not None and now["id"] == hold["id"]:
            time.sleep(POLL_S)
        mark.unlink(missing_ok=True)

    def has_come(self, hold: dict[str, Any]) -> bool:
        """Whether this process has come to the order's own point."""
        return (hold["id"], hold["point"]) in self._done


holder = Holder()


def change_runner(module: Any) -> None:
    """Before each step of a rank: holds, deaths, and faults of rows."""
    import torch

    run, draw = module.ModelRunner._run, module.Sampling.draw
    spoiled: list[int] = []

    def is_held(hold: dict[str, Any], positions_T: Any) -> bool:
        if "position" not in hold:
            return hold["point"] == "step"
        if hold["point"] == "copy" and not holder.has_come(hold):
            return False  # nothing is copied in this group
        return bool((positions_T == hold["position"]).any())

    def run_or_fail(self: Any, plan: Any, batch: Any, *rest: Any) -> Any:
        forward = batch.forward
        spoiled.clear()
        holder.reach("step", lambda hold: is_held(hold, forward.positions_T))
        if Path(FOLDER, f"fatal.{os.getpid()}").exists():
            self._exchanges.make_up = no_memory
            no_memory()
        for token, fault in (order("tokens.json") or {}).items():
            places = torch.nonzero(forward.input_ids_T == int(token)).flatten()
            if len(places) and fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif len(places) and fault == "out of memory":
                no_memory()
            elif len(places) and fault == "nan":
                last = forward.query_starts[1:].long() - 1  # of each row
                rows = torch.searchsorted(last, places)
                spoiled.extend(torch.nonzero(torch.isin(forward.logits_rows_S, last[rows])).flatten().tolist())
        return run(self, plan, batch, *rest)

    def draw_spoiled(self: Any, logits_SV: Any, *args: Any, **kwargs: Any) -> Any:
        logits_SV[spoiled] = float("nan")
        return draw(self, logits_SV, *args, **kwargs)

    def no_memory() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    module.ModelRunner._run = run_or_fail
    module.Sampling.draw = draw_spoiled


def change_lanes(module: Any) -> None:
    """Before each transfer of a rank."""
    carry_out = module.LaneThread._carry_out
    points = {"FetchAdapter": "adapter", "CopyKV": "copy"}

    def carry_out_later(self: Any, op: Any) -> Any:
        point = points.get(type(op).__name__, "")
        holder.reach(point, lambda hold: hold["point"] == point and (point == "adapter" or op.kind == hold["kind"]))
        return carry_out(self, op)

    module.LaneThread._carry_out = carry_out_later


def change_text(module: Any) -> None:
    """Before a gateway reads a prompt."""
    run = module.TextWorkers.run

    async def run_later(self: Any, tenant: str, size: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        def function_later(*args: Any, **kwargs: Any) -> Any:
            if size >= module.INLINE_BYTES:  # on a thread
                holder.reach("text", lambda hold: hold["point"] == "text")
            return function(*args, **kwargs)

        return await run(self, tenant, size, function_later, *args, **kwargs)

    module.TextWorkers.run = run_later


def change_launcher(module: Any) -> None:
    """Serve's API for scaling from outside is open, so that a test can have a group taken down."""
    module.serve.RunTarget = partial(module.serve.RunTarget, external_scaler_enabled=True)


def change_calls(module: Any) -> None:
    """Requests of this size go through Ray's object store, as large ones do."""
    assert module.MOST_BY_VALUE > 0
    module.MOST_BY_VALUE = int(os.environ.get("TANDEM_TEST_MOST_BY_VALUE", module.MOST_BY_VALUE))


CHANGES: dict[str, Callable[[Any], None]] = {
    "tandem.workers.rank.model_runner": change_runner,
    "tandem.workers.rank.transfers.lanes": change_lanes,
    "tandem.cluster.gateway.http.text_workers": change_text,
    "tandem.cluster.gateway.generation.serve_dispatch": change_calls,
    "tandem.cluster.service.serve_app": change_launcher,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls the change of a module when it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in CHANGES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                CHANGES[name](module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, AfterImport())
