"""Mechanisms that have been replaced stay gone: the one that took their place is in the right column."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "cluster", "configs", "offload", "parallel", "tools", "workers")
RETIRED = {
    "SteppedEngine": "workers/engine/engine.py, driven by engine_loop.py",
    "poll_transfers": "Engine.turn",
    "AdapterMoves": "workers/engine/transfers/transfer_manager.py",
    "TransferDone": "TransferResult",
    "AdapterMove": "FetchAdapter, PlaceAdapter, DropAdapter",
    "disk_error": "Failure.kind",
    "transfers_done": "Executor.poll",
    "InProcessExecutor": "workers/executor/rank_group.py over in_process_ranks.py",
    "LocalExecutor": "workers/executor/rank_group.py over local_ranks.py",
    "RayExecutor": "workers/executor/rank_group.py over cluster/group/ray_ranks.py",
    "AdapterTurns": "workers/engine/waiting/max_loras.py",
    "AdapterPool": "AdapterCache",
    "UNPLACED": "Blocker.ADAPTER",
    "HELD": "Blocker.FORK",
    "PREEMPTED": "Status.WAITING, queued",
    "_aside": "WaitingQueue.block",
    "bring_back": "WaitingQueue.unblock",
    "requeue": "WaitingQueue.unblock",
    "COMPARE_AND_SET": "PUT of cluster/state/durable_map.py",
    "_was_lost": "cluster/state/epoch.py",
    "_sentinel": "cluster/state/epoch.py",
    "RequestRun": "cluster/gateway/generation/generation.py",
    "GroupClient": "cluster/gateway/generation/serve_dispatch.py",
    "RequestStream": "RequestPart",
    "RequestView": "RouteHint",
    "_Attempt": "ServeAttempt",
    "Opening": "BillingRecord",
    "UsageRow": "BillingRecord",
    "PackedMatrix": "PackedMethod",
    "PlainMatrix": "DenseMethod",
    "MakeMatrix": "MakeMethod",
    "GatewayState": "TextServices, Accounts, Generations",
}


@pytest.mark.parametrize("name", RETIRED)
def test_a_replaced_mechanism_is_gone(name: str) -> None:
    word = re.compile(rf"\b{name}\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not found, f"{name} is back; it was replaced by {RETIRED[name]}"
