"""KV events: what a coordinator tells gateways of the prefixes whose KV its group has, over the token channel.

    link opens --> KvFacts, a snapshot in parts, then KvEvents as KV comes and goes      <-- KvAsk: the snapshot again

Only the key of each index_blocks-th block of a chain is told (offload/kv/block_key.py), and of it its first HEAD_BYTES:
a wrong hit costs time, never a wrong answer. The idea of telling routers of KV is Dynamo's and vLLM's
(--kv-events-config); theirs go to any subscriber, with the tokens of each block. Torch-free.
"""

from typing import Final

import msgspec

HEAD_BYTES: Final = 8
INDEX_TOKENS: Final = 128
"""Tokens between two keys that are told, where blocks are not larger."""


def index_blocks(block_size: int) -> int:
    """Returns the number of blocks between two keys that are told."""
    return max(1, INDEX_TOKENS // block_size)


class KvFacts(msgspec.Struct, frozen=True, array_like=True, tag="kv_facts"):
    """First message of a link: what keys depend on beside tokens, adapter and salt, so that a gateway makes the same.

    nonce: of the gateway's life. model_revision, kv_dtype: as root_key() takes them. block_size: tokens.
    index_blocks: blocks between two keys that are told.
    """

    nonce: str
    model_revision: str
    kv_dtype: str
    block_size: int
    index_blocks: int

    @property
    def index_tokens(self) -> int:
        """Tokens between two keys that are told."""
        return self.block_size * self.index_blocks


class KvEvents(msgspec.Struct, frozen=True, array_like=True, tag="kv_events"):
    """Changes of one group's KV since the message before, or a part of a snapshot of all of it.

    number: per link; a snapshot's first part is number 1, and a hole means that a message was lost. stored: heads of
    keys that are on the device now, whatever is below it. kept: of those that are only in host memory or on disk now.
    gone: of those that are nowhere. is_last: of the parts of a snapshot. A message without keys says that none was
    lost before it.
    """

    nonce: str
    number: int
    stored: list[bytes] = []
    kept: list[bytes] = []
    gone: list[bytes] = []
    is_snapshot: bool = False
    is_last: bool = True


class KvAsk(msgspec.Struct, frozen=True, array_like=True, tag="kv_ask"):
    """A gateway asks a group for a snapshot."""
