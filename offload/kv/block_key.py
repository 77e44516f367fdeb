"""Keys of KV blocks: a chained digest of everything that their content depends on.

A block's key is H(parent key, its tokens), and the first parent is H(model revision, KV dtype, adapter digest, salt).
Two blocks have the same key exactly when their keys and values are the same, so a prefix is found by content (vLLM's
automatic prefix caching). Called by the block manager and the tiers.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
_ROOT = b"tandem-kv-root"
_BLOCK = b"tandem-kv-block"
_GROUP = b"tandem-kv-group"


def root_key(model_revision: str, kv_dtype: str, adapter_digest: str | None, salt: str) -> bytes:
    """Returns the parent of every first block, 16 bytes: it separates models, KV dtypes and adapters, and by `salt`
    tenants.

    Fields are length-prefixed, so different tuples have different encodings; None differs from the empty string.
    """
    digest = blake2b(digest_size=KEY_BYTES, person=_ROOT)
    for field in (model_revision, kv_dtype, adapter_digest, salt):
        data = b"" if field is None else field.encode()
        digest.update(struct.pack("<?Q", field is not None, len(data)))
        digest.update(data)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the key, 16 bytes, of a full block of `token_ids` (unsigned 32-bit each) that follows the block
    `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + packed, digest_size=KEY_BYTES, person=_BLOCK).digest()


def group_key(key: bytes, group: int) -> bytes:
    """Returns the key, 16 bytes, of the block that a group of layers has for the tokens of `key`. Group 0 has `key`
    itself."""
    return blake2b(key, digest_size=KEY_BYTES, person=_GROUP, salt=struct.pack("<I", group)).digest() if group else key
