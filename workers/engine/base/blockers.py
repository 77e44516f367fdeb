"""Blocker and Awaited: what waiting sequences wait for, and that it has come. See waiting/waiting_queue.py."""

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from tandem.workers.messages.transfer import Failure


class Blocker(Enum):
    """A reason to wait. Each has a key of its own kind."""

    FORK = "fork"  # key: the RequestState whose prompt another choice computes; not queued yet: it counts for no tenant
    ADAPTER = "adapter"  # key: the digest of an adapter that is not on the device
    KV = "kv"  # key: the ticket of a transfer
    TURN = "turn"  # key: the digest of an adapter that has no place in the step
    ALONE = "alone"  # key: the RequestState that must run alone, while another one does
    BATCH = "batch"  # key: "next", the batch behind the one that runs (batching_policy.py)
    GRAMMAR = "grammar"  # key: the digest of a grammar that is not compiled


class Awaited(NamedTuple):
    """Something that sequences wait for; told to unblock() once it has come, or never will (failure)."""

    blocker: Blocker
    key: Hashable
    failure: Failure | None = None
