"""Live groups and gateways as Redis and metrics show them."""
