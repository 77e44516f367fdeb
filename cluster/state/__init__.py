"""Redis: the client and its breaker, every key, heartbeats, notifications, snapshot files."""
