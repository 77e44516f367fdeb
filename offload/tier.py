"""What a tier of KV below the device is, for the bookkeeping side: a Protocol, two-phase in both directions.

Called by tiered_store.py; implemented by host_tier.py and disk_tier.py. A tier knows keys and places, never bytes,
never a request. Prepare pins, bytes move elsewhere, then complete or fail; a key that is not complete is not found.
"""

from typing import Protocol


class KVTier(Protocol):
    """One tier's keys."""

    def has(self, key: bytes) -> bool:
        """Whether the block is whole here. Pure."""
        ...

    def prepare_load(self, key: bytes) -> bool:
        """Pins a whole block until complete_load or fail_load. False when it is not here."""
        ...

    def complete_load(self, key: bytes) -> None: ...

    def fail_load(self, key: bytes) -> None:
        """Its bytes could not be read: unpins and forgets it."""
        ...

    def complete_store(self, key: bytes) -> None: ...

    def fail_store(self, key: bytes) -> None: ...
