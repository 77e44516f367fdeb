"""`tandem bench`: load for a running service, and the engine in this process, with what vLLM's bench prints of them."""
