"""/v1/files: files of tenants, in pieces in Redis."""
