"""KV tiers in host memory and on disk: where each block is and which blocks may be evicted. Torch-free."""
