"""Makes a generation and its answer of a checked body, for all APIs that generate."""
