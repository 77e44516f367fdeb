"""Mechanisms that have been replaced stay gone: the one that took their place is in the right column."""

import re
from pathlib import Path

from tools.sources import TOPS, Source, lines_with, sources

FILES = sources(Path(__file__).resolve().parents[2], (*TOPS, "benchmarks", "tools"))
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
    "_Attempt": "RequestPart",
    "TokenSink": "RequestPart",
    "prepare_chat": "conversation_of",
    "Opening": "BillingRecord",
    "UsageRow": "BillingRecord",
    "PackedMatrix": "PackedMethod",
    "PlainMatrix": "DenseMethod",
    "MakeMatrix": "MakeMethod",
    "GatewayState": "TextServices, Accounts, GatewayContext",
    "Envelope": "RequestMiddleware",
    "AdapterFile": "AdapterList",
    "RunningAdapters": "AdapterService.request",
    "MovingRedis": "BackgroundClient",
    "RequestRedis": "RequestClient",
    "LeastOutstandingTokens": "cluster/routing/policies/",
    "TenantWeights": "Sharing.refresh_weights",
    "OpenTenancy": "Tenancy",
    "NoLedger": "Ledger",
    "NoTenantAdmin": "TenantAdmin",
}


def test_replaced_mechanisms_are_gone() -> None:
    word = re.compile(rf"\b({'|'.join(RETIRED)})\b")
    assert not lines_with(word, FILES), "they were replaced, see RETIRED"
    assert lines_with(word, [Source("a.py", "Front = RequestRun\n_Attempts = 1\n")]) == ["a.py:1: Front = RequestRun"]
