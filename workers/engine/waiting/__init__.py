"""Who waits for what: fair shares, adapters, max_loras."""
