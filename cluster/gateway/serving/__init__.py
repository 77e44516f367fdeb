"""From a checked body to a generation and its answer, for all APIs that generate."""
