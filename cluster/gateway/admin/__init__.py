"""Routes that need an admin key: tenants and adapters."""
