"""The `tandem host-tier` process: host memory for KV that outlives ranks, and its protocol. Linux only."""
