"""GroupKv: what one group tells gateways of its KV, with the pool and the tiers that know where a block is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.blocks.kv_journal import KeyChanges, KvJournal
from tandem.workers.messages.kv_events import KvFacts

if TYPE_CHECKING:  # of features that may be off
    from tandem.offload.kv.tiered_store import TieredStore


@dataclass(frozen=True, eq=False)
class GroupKv:
    """The KV of one group, as gateways are told of it. facts: for no gateway in particular. below: None without a tier
    below the device."""

    facts: KvFacts
    journal: KvJournal
    device: BlockPool
    below: "TieredStore | None"

    def take_changes(self) -> KeyChanges | None:
        """See KvJournal."""
        return self.journal.take_changes(self._is_on_device, self._is_below)

    def _is_on_device(self, key: bytes) -> bool:
        return self.device.lookup(key) is not None

    def _is_below(self, key: bytes) -> bool:
        return self.below is not None and self.below.place(key) is not None
