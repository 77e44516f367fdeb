"""KV blocks: reference counts, prefix hits, copy-on-write."""
