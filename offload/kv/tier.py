"""The Protocol of a KV tier below the device, for bookkeeping: two-phase in both directions.

Called by tiered_store.py; implemented by host_tier.py and disk_tier.py. A tier handles keys and places, never bytes.
prepare_* pins, the bytes move elsewhere, then complete_* or fail_* follows; only complete keys are found.
"""

from typing import Protocol


class KVTier(Protocol):
    """The keys of one tier."""

    def has(self, key: bytes) -> bool:
        """Returns whether the block is complete in this tier. Pure."""
        ...

    def prepare_load(self, key: bytes) -> bool:
        """Pins a complete block until complete_load or fail_load. Returns False when it is not here."""
        ...

    def complete_load(self, key: bytes) -> None: ...

    def fail_load(self, key: bytes) -> None:
        """Unpins and forgets a block whose bytes could not be read."""
        ...

    def complete_store(self, key: bytes) -> None: ...

    def fail_store(self, key: bytes) -> None: ...
