"""Blocker and Event: what waiting sequences wait for, and the news that it has come. See waiting/waiting_queue.py."""

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from tandem.workers.messages.transfer import Failure


class Blocker(Enum):
    """A reason to wait, with its key.

    FORK: the RequestState whose prompt another choice computes. ADAPTER: the digest of an adapter that is not on the
    device. KV: the ticket of a transfer. TURN: the digest of an adapter that has no place in the step. ALONE: the
    RequestState that must run alone, while another one does. BATCH: "next", the batch behind the one that runs
    (batching_policy.py). GRAMMAR: the digest of a grammar that is not compiled.
    Those that wait for FORK have not been queued yet: they count for no tenant and hold no adapter.
    """

    FORK = "fork"
    ADAPTER = "adapter"
    KV = "kv"
    TURN = "turn"
    ALONE = "alone"
    BATCH = "batch"
    GRAMMAR = "grammar"


class Event(NamedTuple):
    """Something that sequences may wait for has come, or never will (failure)."""

    blocker: Blocker
    key: Hashable
    failure: Failure | None = None
