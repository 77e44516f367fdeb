"""Redis: clients, every key, epochs and durable maps, leases and heartbeats, notifications, snapshot files."""
