"""The simulator: the product's own engine, router, failover and scaling on a virtual clock; no Ray, no torch."""
