"""Names of KV blocks: a chained digest of everything their content depends on.

A block's key is H(parent key, its tokens) and the first parent is H(model revision, KV dtype, adapter digest, salt), so
two blocks have one key exactly when their keys and values are the same: a prefix is found by content, never by name
(the idea of vLLM's automatic prefix caching). Called by the block manager and the tiers; knows no request, no device.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
_ROOT = b"tandem-kv-root"
_BLOCK = b"tandem-kv-block"


def root_key(model_revision: str, kv_dtype: str, adapter_digest: str | None, salt: str) -> bytes:
    """The parent of every first block: what makes equal tokens have unequal KV, or keeps tenants apart.

    Fields are length-prefixed, so no two different tuples share an encoding; None is not the empty string.
    """
    digest = blake2b(digest_size=KEY_BYTES, person=_ROOT)
    for field in (model_revision, kv_dtype, adapter_digest, salt):
        data = b"" if field is None else field.encode()
        digest.update(struct.pack("<?Q", field is not None, len(data)))
        digest.update(data)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block of `token_ids` (unsigned 32-bit each) that follows the block named `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + packed, digest_size=KEY_BYTES, person=_BLOCK).digest()
