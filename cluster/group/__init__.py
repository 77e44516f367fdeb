"""The coordinator process: one engine, its ranks, its deployment."""
