"""Idempotency-Key: a request that is sent again is answered once and billed once."""
