"""The bits of KV blocks on their way through the tiers: for tests of an engine whose only rank is this process."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.transfers.transfer_manager import TransferOutcome


class Bits:
    """Watches a KVOffload: what comes up to the device under a key must be, bit by bit, what went down under it. (That
    may have been several times: computed again in another batch, a block's last bits may be others.)"""

    def __init__(self, offload: KVOffload, planes: Sequence[torch.Tensor]) -> None:
        """planes: all KV memory of the rank, block by block in dimension 0."""
        self.num_compared = 0
        self._planes = planes
        self._went_down: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self._close = offload._close
        offload._close = self._look  # type: ignore[method-assign]

    def _look(self, opened: Any, outcome: TransferOutcome) -> None:
        """Before the end of a ticket is applied: until then nobody else has its blocks."""
        move = opened.move
        for place, (key, block_id) in enumerate(zip(move.keys, move.block_ids, strict=False)):
            bits = b"".join(plane[block_id].view(torch.uint8).numpy().tobytes() for plane in self._planes)
            if move.kind == "store":
                self._went_down[key].add(bits)
            elif move.kind == "load" and place not in opened.failed:
                assert bits in self._went_down[key], f"block {block_id} came up with other bits"
                self.num_compared += 1
        self._close(opened, outcome)
